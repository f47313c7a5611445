"""Prompts and completions in tokens: together they are the text, and special tokens mean the same in both."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import config
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from data.text import tokenizers
from data.text.spans import Document, Span, pair
from reporting.evaluation import choices
from reporting.evaluation.documents import documents

TEXT = "The capital of France is Paris. Who is there?\nNobody is, I say: größer!  And 12345 of them, playing plays."
METASPACE = {scheme: pre_tokenizers.Metaspace(prepend_scheme=scheme) for scheme in ("first", "always", "never")}
LLAMA_2 = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
PREPEND = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
KINDS: dict[str, tuple[Any, Any, Any]] = {  # normalizer, pre-tokenizer, decoder
  "prepend": (PREPEND, None, LLAMA_2),
  **{f"metaspace {name}": (None, form, decoders.Metaspace(prepend_scheme=name)) for name, form in METASPACE.items()},
  "bytes": (None, pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()),
  "bytes with a space": (None, pre_tokenizers.ByteLevel(add_prefix_space=True), decoders.ByteLevel()),
  "bytes, NFC": (normalizers.NFC(), pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()),
  "Unigram": (None, METASPACE["always"], decoders.Metaspace()),
}
PAIRS = [
  ("What is it?", " Paris"), ("What is it?", "Paris"), ("What is it? ", "Paris"), ("What is it?\n", "\nParis"),
  ("gr", "ößer"), ("12", "345"), ("play", "ing"), ("", " Paris"), ("", "Paris"), ("a  ", "  b"), ("<user>Who?", " I"),
  ("Who is " * 100, " there"), ("Who?", "<user> I"), ("é", "é"),
]  # fmt: skip


def made(folder: Path, name: str, single: str = "<s> $A") -> Path:
  """A tokenizer of this kind, which puts special tokens around a text as `single` says."""
  model = models.Unigram() if name == "Unigram" else models.BPE(unk_token="<unk>")
  found = Tokenizer(model)
  found.normalizer, found.pre_tokenizer, found.decoder = KINDS[name]
  special = ["<unk>", "<s>", "</s>", "<user>"]
  alphabet = [*pre_tokenizers.ByteLevel.alphabet()] if name.startswith("bytes") else sorted({*TEXT, "▁", "é"})
  options = {"unk_token": "<unk>"} if name == "Unigram" else {}
  trainer = (trainers.UnigramTrainer if name == "Unigram" else trainers.BpeTrainer)(
    vocab_size=len(alphabet) + 60, special_tokens=special, initial_alphabet=alphabet, show_progress=False, **options
  )
  found.train_from_iterator([TEXT] * 3, trainer)
  found.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
  ids = [(token, found.token_to_id(token)) for token in ("<s>", "</s>") if token in single]
  found.post_processor = processors.TemplateProcessing(single, special_tokens=ids)
  folder.mkdir()
  found.save(str(folder / "tokenizer.json"))
  return folder / "tokenizer.json"


def parts(tokenizer: tokenizers.Tokenizer, prompt: str, completion: str) -> tuple[list[int], list[int]]:
  """The tokens of a prompt, and those of its completion."""
  ids, counted = tokenizer.encode_spans([pair(prompt.encode(), completion.encode())])[0]
  border = int(np.argmax(counted))
  assert counted[border:].all()
  return ids[:border].tolist(), ids[border:].tolist()


@pytest.mark.parametrize("name", KINDS)
def test_tokens_of_prompt_and_completion_are_those_of_the_text(name: str, tmp_path: Path):
  """And the prompt's are those that `generate` gives it. Without a prompt, a completion begins as texts begin."""
  file = made(tmp_path / "made", name)
  tokenizer, loaded = tokenizers.from_file(file), Tokenizer.from_file(str(file))
  decode = lambda ids: loaded.decode(ids, skip_special_tokens=False)
  for prompt, completion in PAIRS:
    before, after = parts(tokenizer, prompt, completion)
    assert before == tokenizer.text.encode(prompt) == loaded.encode(prompt).ids
    assert after[-1] == loaded.token_to_id("</s>")
    if prompt and "<user>" not in prompt + completion:
      assert decode(before + after[:-1]).removeprefix("<s>").removeprefix(" ") == prompt + completion
    else:  # some put a space behind special tokens
      assert before + after[:-1] == loaded.encode(prompt + completion).ids


def test_a_completion_has_the_tokens_that_it_has_in_the_text(tmp_path: Path):
  """Wherever the tokens of the whole text have a border there."""
  file = made(tmp_path / "made", "prepend")
  tokenizer, loaded = tokenizers.from_file(file), Tokenizer.from_file(str(file))
  for prompt, completion in (PAIRS[0], PAIRS[1], PAIRS[10], PAIRS[12]):
    before, after = parts(tokenizer, prompt, completion)
    assert before + after[:-1] == loaded.encode(prompt + completion).ids


@pytest.mark.parametrize("single", ["<s> $A", "<s> $A </s>", "$A </s>", "$A"])
def test_begin_and_end_tokens_stand_once_and_not_between(single: str, tmp_path: Path):
  file = made(tmp_path / "made", "bytes", single)
  tokenizer, loaded = tokenizers.from_file(file), Tokenizer.from_file(str(file))
  begin, end = loaded.token_to_id("<s>"), loaded.token_to_id("</s>")
  plain = lambda text: loaded.encode(text, add_special_tokens=False).ids
  front = [begin] if "<s>" in single else []
  for text in ("Who?", "<s>Who?", ""):
    expected = plain(text) if text.startswith("<s>") else [*front, *plain(text)]
    assert tokenizer.text.encode(text) == expected
    for completion in (" I", " I</s>"):  # an end that is written is not doubled
      assert parts(tokenizer, text, completion) == (expected, [*plain(" I"), end])
  middle = parts(tokenizer, "Who?", "<user> I</s><user>")[1]
  assert middle == [loaded.token_to_id("<user>"), *plain(" I"), end, loaded.token_to_id("<user>"), end]
  assert len(tokenizer.encode([b"<s>Who?"])[0]) > 5  # in other texts, names of special tokens are text


def test_choices_follow_questions_as_completions_follow_prompts(tmp_path: Path):
  file = made(tmp_path / "made", "prepend", "<s> $A </s>")
  tokenizer, loaded = tokenizers.from_file(file), Tokenizer.from_file(str(file))
  for question in ("Who?", "<s>Who?<user>"):
    asked = choices.Question(question, ("I", "Paris"), 0, "")
    for row, choice in zip(choices.rows([asked], tokenizer, between=" ", longest=99), asked.choices, strict=True):
      assert row.tokens == [1, *loaded.encode(f"{question} {choice}", add_special_tokens=False).ids][-len(row.tokens) :]
      assert row.tokens.count(1) == 1
      assert row.tokens[: row.before] == tokenizer.text.encode(question)


def test_an_evaluation_reads_the_tokens_of_training(tmp_path: Path):
  file = made(tmp_path / "made", "prepend", "<s> $A </s>")
  (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "<s>Who?", "completion": " Paris"}) + "\n")
  given = {"data__prompt_field": "prompt", "data__packing": "documents", "model__seq_len": 30, "model__vocab_size": 0}
  tokenizer = tokenizers.from_file(file)
  found = documents(str(tmp_path / "a.jsonl"), config(data__cache_dir=str(tmp_path), **given), tokenizer)
  batch = found.dataset.parts[0].validation.read(np.arange(1))
  before, after = parts(tokenizer, "<s>Who?", " Paris")
  assert batch["tokens"][0][batch["segments"][0] > 0].tolist() == before + after
  assert before.count(1) == 1
  assert (found.tokens, found.bytes) == (len(after), len(" Paris") + 1)


def test_documents_in_spans_keep_their_order(tmp_path: Path):
  """Of both kinds, in one batch."""
  tokenizer = tokenizers.from_file(made(tmp_path / "made", "bytes"))
  rendered = Document(pair(b"Who?", b" I").spans, rendered=True, closed=True)
  given = [rendered, pair(b"a", b"b"), rendered, pair(b"", b"c")]
  alone = [tokenizer.encode_spans([document])[0] for document in given]
  for found, expected in zip(tokenizer.encode_spans(given), alone, strict=True):
    assert found.ids.tolist() == expected.ids.tolist()
    assert found.counted.tolist() == expected.counted.tolist()


@pytest.mark.parametrize("composed", [True, False])
@pytest.mark.parametrize("name", ["bytes", "bytes, NFC", "metaspace first", "prepend"])
def test_a_token_on_the_border_of_an_answer_counts(name: str, composed: bool, tmp_path: Path):
  """As the offsets of its characters say, in tokens that are bytes and in others, also if characters are composed."""
  file = made(tmp_path / "made", name)
  tokenizer, loaded = tokenizers.from_file(file), Tokenizer.from_file(str(file))
  texts = [
    "I say: gr" if composed else "o\u0308o\u0308o\u0308 I say: gr",
    "ößer! And 12345 of them, play",
    "ing plays. Wh" if composed else "ing plays. \u0958Wh",  # in NFC as many bytes longer
    "o is there?\nNo",
    "body",
  ]
  document = Document(tuple(Span(part.encode(), i % 2 == 1) for i, part in enumerate(texts)), True, True)
  whole = loaded.encode("".join(texts), add_special_tokens=False)
  borders = np.cumsum([0, *map(len, texts)])
  spans = [(borders[i], borders[i + 1]) for i in (1, 3)]
  expected = [any(start < stop and end > begin for begin, stop in spans) for start, end in whole.offsets]
  ids, counted = tokenizer.encode_spans([document])[0]
  last = max(i for i, counts in enumerate(expected) if counts)
  assert (ids.tolist(), counted.tolist()) == (whole.ids[: last + 1], expected[: last + 1])
  covers = [any(start < border < end for border in borders[1:-1]) for start, end in whole.offsets]
  assert sum(covers) > 1
