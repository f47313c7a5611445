"""Texts that a trained model writes: those of the library transformers, under every strategy, and shown in order."""

import dataclasses
import io
from pathlib import Path
from typing import Any

import model_folders
import numpy as np
import pytest
from helpers import config, in_full, one_sentence
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import strategies
import train
from data.dataset import Text
from data.text import tokenizers
from data.text.tokenizers import BYTES
from models.generate import Sampling
from reporting.source import Model
from tools import generate as tool

GREEDY = Sampling(temperature=0.0)
NUMBERS = Text(
  encode=lambda text: [int(word) for word in text.split()],
  decode=lambda ids: " ".join(map(str, ids)),
  to_bytes=bytes,
  files=dict,
)
SMALL = {"steps": 2, "batch_size": 16, "eval_batch_size": 16, "eval_examples": 16, "sample_length": 0}


def check(name: str, under: str) -> None:
  """Compares what a strategy writes with the texts of transformers. Each prompt has another length."""
  runner, params = model_folders.loaded(name, under)
  expected = np.load(model_folders.FOLDER / name / "expected.npz")
  texts = [expected[key].tolist() for key in sorted(expected) if key.startswith("text ")]
  *_, end = tool.write(runner, params, NUMBERS, [text[:-12] for text in texts], length=12, sampling=GREEDY)
  assert [text[:-12] + writing.ids for text, writing in zip(texts, end, strict=True)] == texts
  assert len({len(text) for text in texts}) == 3


@pytest.mark.parametrize("name", in_full(model_folders.NAMES, "llama"))
def test_greedy_texts_are_those_of_transformers(name: str):
  """All in one batch; transformers wrote each alone."""
  check(name, "single")


@pytest.mark.parametrize("under", in_full([name for name in strategies.names() if name != "single"], "two_d"))
def test_every_strategy_writes_the_same(under: str):
  check("llama", under)


@pytest.mark.parametrize("under", in_full(["expert", "two_d"], "expert"))
def test_a_mixture_writes_the_same_on_devices_that_share_its_experts(under: str):
  check("mixtral", under)


@pytest.mark.parametrize(
  "under, layers, heads",
  in_full([("tensor_parallel", 1, 8), ("three_d", 2, 2), ("fsdp", 1, 1)], ("tensor_parallel", 1, 8)),
)
def test_devices_keep_keys_and_values_of_their_own_layers_and_heads(under: str, layers: int, heads: int):
  runner, params = model_folders.loaded("llama", under)
  prompt, length = np.ones((3, 5), np.int32), np.array([5, 2, 4], np.int32)
  texts = runner.writing.begin(params, prompt, length, size=8, seed=0, sampling=GREEDY)
  for _ in range(2):
    for x in texts.cache:
      depth, batch, kv_heads, *rest = x.shape
      assert x.sharding.shard_shape(x.shape) == (depth // layers, batch, kv_heads // heads, *rest)
    texts = runner.writing.extend(params, texts, GREEDY)


@pytest.mark.full
def test_a_run_writes_on_the_command_line(
  tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
  """The same text under another strategy, and from a line of standard input."""
  train.train(config("fsdp", **SMALL), tmp_path / "run")
  capsys.readouterr()
  found = []
  for arguments in (["--prompt=def "], ["--prompt=def ", "--strategy=two_d", "--mesh=model=2"], []):
    monkeypatch.setattr("sys.stdin", io.StringIO("def \n"))
    tool.main([str(tmp_path / "run"), "--length=8", "--seed=3", *arguments])
    shown = capsys.readouterr()
    found.append(shown.out)
    assert "note:" not in shown.err
  assert found[0] == found[1] == found[2]
  tool.main([str(tmp_path / "run"), "--length=29", "--prompt=def "])
  assert "note: texts of up to 33 tokens, from a model that was made for 32" in capsys.readouterr().err
  assert found[0].startswith("def ")
  assert found[0].endswith("\n")


def show(tokens: list[bytes], stops: tuple[str, ...] = ()) -> list[str]:
  """What is shown of one text, piece by piece. A token is a byte here."""
  writing, pieces = tool.Writing(BYTES.text, b">", stops), []

  def steps():
    for token in b"".join(tokens):
      writing.add(token)
      yield [writing]
      if writing.done:
        return
    writing.done = True
    yield [writing]

  tool.show(steps(), [">"], pieces.append)
  return [piece for piece in pieces if piece]


def test_characters_are_shown_when_they_are_complete():
  assert show(["aé".encode(), "😀".encode()]) == [">", "a", "é", "😀", "\n"]
  assert show([b"a", "😀".encode()[:2]]) == [">", "a", "\N{REPLACEMENT CHARACTER}", "\n"]


def test_texts_end_at_stop_strings_and_at_the_token_that_ends_texts():
  """Nothing of a stop string is shown, nor what may become one."""
  assert show([b"ab. c\n\nd"], ("\n\n",)) == [">", "a", "b", ".", " ", "c", "\n"]
  assert show([b"a\nb"], ("\n\n",)) == [">", "a", "\nb", "\n"]
  assert show([b"ab\0c"]) == [">", "a", "b", "\n"]


def test_texts_are_shown_in_the_order_of_their_prompts():
  first, second = (tool.Writing(BYTES.text, b">", ("!",)) for _ in range(2))
  pieces: list[str] = []

  def steps():
    for a, b in (b"xy", b"y!", b"!-"):
      first.add(a)
      second.add(b)
      yield [first, second]

  tool.show(steps(), ["1", "2"], pieces.append)
  assert "".join(pieces) == "1xy\n2y\n"


def test_a_space_that_a_tokenizer_drops_at_the_beginning_of_a_text_is_shown():
  """As those of Llama 2 and Mistral do."""
  made = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1, "</s>": 2}, unk_token="</s>"))
  made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
  assert made.decode([1]) == "b"
  writing = tool.Writing(dataclasses.replace(NUMBERS, decode=made.decode), made.encode("a").ids, ())
  writing.add(1)
  assert writing.shown() == " b"


def test_no_prompt_gets_one_sentence(monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr("sys.stdin", io.StringIO(""))
  with one_sentence("prompt is missing", "--prompt"):
    tool.encoded(Model(config(), BYTES, lambda strategy: {}, None, 32), [])


@pytest.mark.parametrize(
  "arguments, parts",
  [
    (["nowhere", "--prompt=a"], ["'nowhere'", "no workdir with a checkpoint"]),
    (["nowhere", "--prompt=a", "--strategy=fdsp"], ["strategy='fdsp'", "did you mean 'fsdp'"]),
    (["nowhere", "--prompt=a", "--length=0"], ["length=0", "at least 1"]),
    (["nowhere", "--prompt=a", "--top-p=2"], ["top_p=2.0"]),
    ([str(model_folders.FOLDER / "llama"), "--prompt=a"], ["no tokenizer"]),
  ],
)
def test_mistakes_get_one_sentence(arguments: list[str], parts: list[str]):
  with one_sentence(*parts):
    tool.main(arguments)


CHAT = Path(__file__).parents[1] / "golden" / "chat" / "headers"


def test_a_dialogue_is_kept_and_answers_end_with_their_turn(
  monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
  """Each answer is written behind all that was said. Its last token here ends a turn, not a text."""
  tokenizer, prompts = tokenizers.from_file(CHAT / "tokenizer.json"), []
  loaded = Tokenizer.from_file(str(CHAT / "tokenizer.json"))
  ids_of = lambda text: loaded.encode(text, add_special_tokens=False).ids

  def write(strategy: Any, params: Any, text: Text, given: list[list[int]], **options: Any) -> Any:
    prompts.append(given[0])
    writing = tool.Writing(text, given[0], options["stops"])
    for token in ids_of(f" Rome {len(prompts)}.<|im_end|>What"):
      writing.add(token)
      yield [writing]

  for name, stand_in in (("write", write), ("start_jax", lambda config: []), ("laid_out", lambda *options: None)):
    monkeypatch.setattr(tool, name, stand_in)
  model = Model(config(model__vocab_size=0), tokenizer, lambda strategy: {}, None, 32)
  monkeypatch.setattr(tool, "open_model", lambda source: model)
  tool.main(["DIR", "--chat", "--system=Be kind.", "--prompt=Italy?", "--prompt=And France?", "--length=9"])
  assert capsys.readouterr().out == "> Italy?\n Rome 1.\n> And France?\n Rome 2.\n"
  first = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nItaly?<|im_end|>\n<|im_start|>assistant\n"
  second = first + "Rome 1.<|im_end|>\n<|im_start|>user\nAnd France?<|im_end|>\n<|im_start|>assistant\n"
  assert prompts == [ids_of(first), ids_of(second)]  # the template trims


def test_a_dialogue_needs_a_template_and_tokens_that_the_model_knows():
  with one_sentence("data.tokenizer='bytes' has no chat template"):
    tool.Chatting(Model(config(), BYTES, lambda strategy: {}, None, 32), None)
  tokenizer = tokenizers.from_file(CHAT / "tokenizer.json")
  small = Model(config(model__vocab_size=40), tokenizer, lambda strategy: {}, None, 32)
  with one_sentence("the dialogue has token", "the model knows 40"):
    tool.Chatting(small, None).ask("Who?")
  with one_sentence("prompt='Who?' has token", "the model knows 40"):
    tool.encoded(small, ["Who?"])
  with one_sentence("system='Be kind.' begins a dialogue", "--chat"):
    tool.main(["DIR", "--system=Be kind.", "--prompt=a"])


@pytest.mark.full
def test_prompts_in_longer_arrays_are_continued_the_same():
  """As those of a dialogue, which share the programs of their lengths."""
  runner, params = model_folders.loaded("llama", "single")
  prompts = [[5, 6, 7], [8, 9]]
  ends = [
    list(tool.write(runner, params, NUMBERS, prompts, length=5, sampling=GREEDY, unit=unit))[-1] for unit in (1, 16)
  ]
  assert [writing.ids for writing in ends[0]] == [writing.ids for writing in ends[1]]
