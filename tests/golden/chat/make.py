"""Writes tokenizers for the chat templates here, and the tokens that the library transformers makes of dialogues.

    pip install transformers
    python tests/golden/chat/make.py

Each folder holds a template of ours, `marked.jinja`, with the tag `generation` around answers. This program writes the
same without the tag, a tokenizer, and `expected.json`: for each dialogue its tokens, which of them are the assistant's,
and those of the dialogue up to its last answer, with the generation prompt. The templates use what published ones use:

- headers: a header and an end for each turn, a default system turn, trimming
- brackets: no generation prompt; the system's text in the first question; turns must alternate
- tools: tools, calls and their results; a macro, JSON, `continue`; content that is missing
- thoughts: left out of all answers but those to the last question, which a namespace finds
- parts: a date, another name for the assistant, content in parts, headers that end in empty lines
- words: no control token but the end of a text; `break`
"""

import json
import re
from pathlib import Path

import tokenizers
import transformers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

FOLDER = Path(__file__).parent
TEXTS = [
  "You are a helpful assistant. What is the capital of France? The capital is Paris. Thank you, and what of Italy?",
  "user assistant system tool [INST] [/INST] Human: Assistant: think about it, then call the tool with arguments.",
  '{"name": "weather", "arguments": {"city": "Rome"}} is a call of the tool; it is 21 degrees there.\n\n',
]
KINDS = {  # the tokenizer of each template
  "headers": "bytes", "brackets": "spaces", "tools": "bytes", "thoughts": "bytes", "parts": "spaces",
  "words": "prepended",
}  # fmt: skip
CONTROL = [
  "<s>",
  "</s>",
  "<|im_start|>",
  "<|im_end|>",
  "<|start|>",
  "<|sep|>",
  "<|end|>",
  "<start>",
  "<end>",
  "<think>",
]
ASK, ANSWER = (
  {"role": "user", "content": "What is the capital of France? "},
  {"role": "assistant", "content": " It is Paris.\n"},
)
MORE = [{"role": "user", "content": "\n\nAnd of Italy, größer 😀?"}, {"role": "assistant", "content": "Rome."}]
SYSTEM = {"role": "system", "content": "You are helpful."}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"city": "Ort, größer"}}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rom é"}}}
RESULT = {"role": "tool", "content": "21"}
DAY = {"type": "function", "function": {"name": "day", "arguments": {"country": "It"}}}
DIALOGUES = {
  "one": [ASK, ANSWER],
  "two": [ASK, ANSWER, *MORE],
  "system": [SYSTEM, ASK, ANSWER, *MORE, ASK, ANSWER],
  "asked last": [SYSTEM, ASK, ANSWER, MORE[0]],
  "empty system": [SYSTEM | {"content": ""}, ASK, ANSWER],
}
OWN = {
  "tools": {
    "called": [ASK, {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]}, RESULT, ANSWER],
    "another call": [ASK, {"role": "assistant", "tool_calls": [DAY]}, RESULT, ANSWER],
    "with text": [ASK, {"role": "assistant", "content": "Wait.", "tool_calls": [CALL]}, RESULT, ANSWER],
  },
  "thoughts": {
    "thought": [
      ASK, ANSWER | {"content": "<think>\nFrance?\n</think>\n\nParis"},
      MORE[0], MORE[1] | {"reasoning": "Italy"},
    ],
    "in two steps": [ASK, ANSWER | {"content": "<think>a</think>b"}, RESULT, ANSWER],
  },
  "parts": {"parts": [ASK | {"content": [{"type": "text", "text": "So "}, {"type": "text", "text": "what?"}]}, ANSWER]},
  "words": {"stopped": [ASK, ANSWER, {"role": "stop", "content": ""}, ASK]},
}  # fmt: skip


def make_tokenizer(kind: str) -> tokenizers.Tokenizer:
  """A small BPE. It puts <s> in front of texts, which a template must not get twice."""
  alphabet = (
    pre_tokenizers.ByteLevel.alphabet() if kind == "bytes" else ["▁", *map(chr, range(33, 127)), "\n", "é", "ö", "ß"]
  )
  made = tokenizers.Tokenizer(models.BPE(unk_token=None if kind == "bytes" else "<unk>", byte_fallback=False))
  if kind == "bytes":
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
  elif kind == "spaces":
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = decoders.Metaspace(prepend_scheme="first")
  else:  # as that of Llama 2
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
  trainer = trainers.BpeTrainer(
    vocab_size=len(alphabet) + 160, special_tokens=["<unk>", *CONTROL], initial_alphabet=alphabet, show_progress=False
  )
  made.train_from_iterator(TEXTS, trainer)
  made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in CONTROL])
  made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))])
  return made


def expected(name: str, plain: str, marked: str, tokenizer: transformers.PreTrainedTokenizerFast) -> dict:
  found = {}
  for dialogue, messages in (DIALOGUES | OWN.get(name, {})).items():
    tools = [WEATHER] if dialogue == "called" else None
    try:
      whole = tokenizer.apply_chat_template(messages, tools, chat_template=plain, return_dict=False)
    except Exception as error:
      print(name, dialogue, error)
      continue
    own = tokenizer.apply_chat_template(
      messages, tools, chat_template=marked, return_dict=True, return_assistant_tokens_mask=True
    )
    assert own["input_ids"] == whole, (name, dialogue)
    last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    asked = tokenizer.apply_chat_template(
      messages[:last], tools, chat_template=plain, add_generation_prompt=True, return_dict=False
    )
    counted = [i for i, one in enumerate(own["assistant_masks"]) if one]
    found[dialogue] = {"messages": messages, "tools": tools, "tokens": whole, "counted": counted, "asked": asked}
  return found


if __name__ == "__main__":
  for name, kind in KINDS.items():
    folder = FOLDER / name
    marked = (folder / "marked.jinja").read_text()
    plain = re.sub(r"\{%- (end)?generation %\}", "", marked)
    make_tokenizer(kind).save(str(folder / "tokenizer.json"), pretty=False)
    end = {"__type": "AddedToken", "content": "</s>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": end}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    (folder / "chat_template.jinja").write_text(plain)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    (folder / "expected.json").write_text(json.dumps(expected(name, plain, marked, tokenizer)) + "\n")
  print("transformers", transformers.__version__)
