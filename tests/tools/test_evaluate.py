"""Text and questions measured with a trained model: the numbers of the library transformers, under every strategy."""

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import jax
import model_folders
import numpy as np
import pytest
from helpers import config, in_full, one_sentence
from tokenizers import Tokenizer as Loaded

import train
from data.text import tokenizers
from data.text.tokenizers import BYTES, Tokenizer
from models import generate
from models.parameters import bind
from reporting.evaluation import choices
from reporting.evaluation.documents import documents
from reporting.source import Model, open_model
from tools import evaluate as tool

GOLDEN = model_folders.FOLDER / "evaluate"
EXPECTED = json.loads((GOLDEN / "llama.json").read_text())
TEXTS = [json.loads(line)["content"] for line in (GOLDEN / "texts.jsonl").read_text().splitlines()]
SMALL = {"steps": 2, "batch_size": 16, "eval_batch_size": 16, "eval_examples": 16, "sample_length": 0}


def folder_of(name: str, to: Path) -> Path:
  """The folder of a golden model, with the golden tokenizer."""
  to.mkdir()
  for file in ("config.json", "model.safetensors"):
    shutil.copy(model_folders.FOLDER / name / file, to)
  shutil.copy(GOLDEN / "tokenizer.json", to)
  return to


@pytest.fixture
def evaluate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  """Runs the command on a golden model, and returns what it writes as JSON."""
  monkeypatch.setattr(tool, "start_jax", lambda config: jax.devices())  # keeps the cache of conftest.py

  def run(*arguments: str, name: str = "llama") -> dict[str, Any]:
    folder, found = tmp_path / name, tmp_path / "found.json"
    source = folder if folder.exists() else folder_of(name, folder)
    tool.main([str(source), f"--data.cache_dir={tmp_path}/cache", "--seq-len=32", f"--json={found}", *arguments])
    return json.loads(found.read_text())

  return run


UNDER = ["single", "fsdp", "tensor_parallel", "pipeline", "three_d", "pmap_ddp"]


@pytest.mark.parametrize(
  "name, under", in_full([*(("llama", under) for under in UNDER), ("mixtral", "expert")], ("llama", "fsdp"))
)
def test_every_strategy_finds_what_transformers_finds(name: str, under: str, evaluate, capsys: pytest.CaptureFixture):
  """One text is longer than a sequence; questions and choices have different lengths."""
  expected = json.loads((GOLDEN / f"{name}.json").read_text())
  text = ["--data.path=" + str(GOLDEN / "texts.jsonl"), "--data.text_field=content", "--batch-size=16"]
  found = evaluate(*text, f"--choices={GOLDEN / 'questions.jsonl'}", f"--strategy={under}", name=name)
  shown = capsys.readouterr().out

  values, loss = found["text"], -sum(expected["texts"])
  size = len("".join(TEXTS).encode())
  assert (values["documents"], values["bytes"], values["tokens"]) == (5, size, sum(expected["tokens"]))
  assert values["loss"] == pytest.approx(loss / sum(expected["tokens"]), rel=1e-5)
  assert values["perplexity"] == pytest.approx(math.exp(values["loss"]))
  assert values["bits_per_byte"] == pytest.approx(loss / math.log(2) / size, rel=1e-5)
  assert f"bits/byte  {values['bits_per_byte']:.4f}" in shown

  for ours, theirs in zip(found["choices"]["scores"], expected["scores"], strict=True):
    assert ours == pytest.approx(theirs, rel=1e-5)
  right = "0.3333" if name == "llama" else "0.1667"
  assert f"accuracy   {right} by likelihood, 0.1667 by likelihood a byte" in shown


def test_log_likelihoods_need_no_logits_of_all_positions(monkeypatch: pytest.MonkeyPatch):
  """Five positions at a time, of eleven."""
  monkeypatch.setattr(generate, "LOGITS", 5 * 2 * 64)
  runner, params = model_folders.loaded("llama")
  model, random = bind(runner.program.sizes, params), np.random.default_rng(0)
  tokens, counted = random.integers(0, 64, (2, 12)), random.integers(0, 2, (2, 12)).astype(bool)
  found = jax.jit(generate.TextWriter(model).log_likelihoods)(tokens, counted)
  logits = np.asarray(jax.jit(lambda tokens: model(tokens))(tokens[:, :-1]), np.float64)
  likelihoods = np.take_along_axis(logits, tokens[:, 1:, None], axis=2)[..., 0] - np.log(np.exp(logits).sum(axis=2))
  assert found == pytest.approx((likelihoods * counted[:, 1:]).sum(axis=1), rel=1e-5)


def test_some_sequences_are_measured_in_their_own_tokens(evaluate):
  found = evaluate(
    f"--data.path={GOLDEN / 'texts.jsonl'}", "--data.text_field=content", "--batch-size=16", "--examples=1"
  )
  values = found["text"]
  assert 0 < values["tokens"] <= 32 < sum(EXPECTED["tokens"])
  per_token = values["bytes"] / sum(EXPECTED["tokens"])
  assert values["bits_per_byte"] == pytest.approx(values["loss"] / math.log(2) / per_token)


@pytest.mark.full
def test_a_run_is_evaluated_on_the_command_line(tmp_path: Path):
  """Under another strategy, too. By default a sequence is as long as in the run."""
  train.train(config("fsdp", **SMALL), tmp_path / "run")
  (tmp_path / "a.txt").write_text("Some words, é.\n" * 40)
  found = []
  for more in ([], ["--strategy=fsdp", f"--seq-len={config().model.seq_len}"]):
    arguments = [f"--data.path={tmp_path / 'a.txt'}", "--batch-size=16", *more]
    tool.main([str(tmp_path / "run"), *arguments, f"--json={tmp_path / 'found.json'}"])
    values = json.loads((tmp_path / "found.json").read_text())["text"]
    assert values["tokens"] == values["bytes"] == 16 * 40
    found.append(values["loss"])
  assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.parametrize(
  "name, context, length", [("llama", 4096, 1024), ("llama", 64, 64), ("llama", None, 1024), ("mistral", 64, 64)]
)
def test_a_sequence_of_a_folder_has_1024_tokens_if_its_context_allows(
  name: str, context: int | None, length: int, tmp_path: Path
):
  said = json.loads((model_folders.FOLDER / name / "config.json").read_text())
  (tmp_path / "config.json").write_text(json.dumps(said | {"max_position_embeddings": context}))
  assert open_model(str(tmp_path)).seq_len == length
  assert open_model(str(tmp_path)).trained == context


def sequences(path: Path, to: Path, tokenizer: Tokenizer = BYTES, length: int = 8) -> tuple[list[list[int]], Any]:
  """The pieces of all sequences that are made of a text, each with the token before it."""
  found = documents(str(path), config(model__seq_len=length, data__cache_dir=str(to)), tokenizer)
  (part,) = found.dataset.parts
  batch = part.validation.read(np.arange(len(part.validation)))
  pieces = []
  for tokens, segments in zip(batch["tokens"], batch["segments"], strict=True):
    pieces += [tokens[segments == s].tolist() for s in range(1, segments.max() + 1)]
  return pieces, found


def test_each_token_of_each_document_is_predicted_once_and_nothing_else(tmp_path: Path):
  """Also what training would hold out. The END token, 0, is before a document, not behind it."""
  texts = [bytes(range(1, 30)), *(bytes([n, n + 1]) for n in range(40, 100, 2)), b"\x80"]
  lines = [json.dumps({"text": text.decode("latin-1")}) for text in texts]
  (tmp_path / "a.jsonl").write_text("\n".join([*lines, '{"text": ""}']))
  pieces, found = sequences(tmp_path / "a.jsonl", tmp_path / "cache")
  stored = [text.decode("latin-1").encode() for text in texts]
  assert (found.count, found.tokens, found.bytes) == (len(texts), *(len(b"".join(stored)),) * 2)
  assert sorted(bytes(piece[1:]) for piece in pieces if not piece[0]) == sorted(text[:8] for text in stored)
  assert [bytes(p) for p in sorted(pieces) if p[0]] == [bytes(range(s, min(s + 9, 30))) for s in (8, 16, 24)]


def golden_tokenizer(front: bool) -> Tokenizer:
  """The golden tokenizer, with <s> in front of texts or without."""
  found = tokenizers.from_file(GOLDEN / "tokenizer.json")
  plain = Loaded.from_file(str(GOLDEN / "tokenizer.json"))
  without = dataclasses.replace(found.text, encode=lambda text: plain.encode(text, add_special_tokens=False).ids)
  return found if front else dataclasses.replace(found, text=without)


def test_a_document_begins_as_the_tokenizer_begins_texts(tmp_path: Path):
  """With <s>, which is 1 here; or else with the END token, 2."""
  (tmp_path / "a.txt").write_text("so it is")
  for front, first in ((True, 1), (False, 2)):
    ((begin, *rest),), _ = sequences(tmp_path / "a.txt", tmp_path / "cache", golden_tokenizer(front))
    assert [1, *rest] == golden_tokenizer(True).text.encode("so it is")
    assert begin == first


def row(question: str, choice: str, tokenizer: Tokenizer = BYTES, between: str = " ") -> tuple[str, str]:
  """What stands before a choice, and what its score is the likelihood of."""
  asked = choices.Question(question, (choice,), 0, "")
  (found,) = choices.rows([asked], tokenizer, between=between, longest=100)
  text = lambda ids: bytes(ids).decode()
  return text(found.tokens[: found.before]), text(found.tokens[found.before :])


@pytest.mark.parametrize(
  "tokens, unit, batches",
  [
    # The longest first: one row of 24 or 16 predictions is all that fits, and three of 8.
    (30, 1, [([3], 24), ([2], 16), ([0, 1, 4], 8), ([5, 6, 6], 8)]),
    (30, 2, [([3, 3], 24), ([2, 2], 16), ([0, 1, 4, 5], 8), ([6, 6, 6, 6], 8)]),
    (32, 4, [([3] * 4, 24), ([2] * 4, 16), ([0, 1, 4, 5], 8), ([6] * 4, 8)]),
    (1, 1, [([3], 24), ([2], 16), *[([n], 8) for n in (0, 1, 4, 5, 6)]]),
    (999, 2, [([3, 3], 24), ([2, 2], 16), ([0, 1, 4, 5, 6, 6], 8)]),
  ],
)
def test_rows_of_similar_length_make_whole_batches(tokens: int, unit: int, batches: list[tuple[list[int], int]]):
  """Lengths are powers of two from 8, and at most 24; what is missing of a batch repeats the last row."""
  rows = [choices.Answer([0] * size, 1) for size in (9, 2, 10, 18, 9, 3, 8)]  # one more than predictions
  assert list(choices._batches(rows, 24, tokens, unit)) == batches


def test_a_choice_begins_with_the_space_before_it():
  assert row("a b", "c") == ("a b", " c")
  assert row("a b  ", "c") == ("a b", "  c")
  assert row("a b\n", " c") == ("a b", "\n c")
  assert row("a b", "c", between="") == ("a b", "c")


def test_without_a_question_the_end_token_is_before_a_choice():
  assert row("", "c") == ("\0", "c")
  assert (
    choices.rows([choices.Question("", ("so",), 0, "")], golden_tokenizer(True), between=" ", longest=9)[0].before == 1
  )


def test_a_choice_begins_where_its_tokens_differ_from_those_of_the_question():
  """A tokenizer that joins "b" and "c" to one token, and the last letters of both texts."""
  joined = lambda piece: np.array([*piece.replace(b"bc", b"X")])
  merging = dataclasses.replace(BYTES, encode_prompts=lambda pieces: [joined(piece) for piece in pieces])
  assert row("ab", "cd", merging, between="") == ("a", "Xd")
  assert row("ab", "dd", merging, between="") == ("ab", "dd")


def test_scores_are_compared_as_sums_and_by_the_bytes_of_the_choice():
  """Of equal scores, the first counts."""
  asked = [choices.Question("", ("éé", "abc"), 0, "")]
  for scores, expected in {
    (-4.0, -4.0): (1, 1),  # by bytes -1 and -1.33; by characters it would be -2 and -1.33
    (-4.0, -3.5): (0, 1),
    (-4.0, -2.5): (0, 0),
  }.items():
    found = choices.Scores(asked, [np.array(scores)])
    assert (found.accuracy, found.accuracy_per_byte) == expected


@pytest.mark.parametrize("answer, number", [("1", 1), ('"B"', 1), ('"A"', 0), ('"the second"', 1), ('"C"', 2)])
def test_an_answer_is_a_number_a_letter_or_a_text(answer: str, number: int, tmp_path: Path):
  """The text comes first: "C" is the third choice here, and would be as a letter, too."""
  (tmp_path / "a.jsonl").write_text(
    f'\n{{"question": "", "choices": ["one", "the second", "C"], "answer": {answer}}}\n'
  )
  (found,) = choices.read(str(tmp_path / "a.jsonl"))
  assert found.answer == number


@pytest.mark.parametrize(
  "line, parts",
  [
    ("{", ["is not valid JSON"]),
    ("[]", ["has no field 'question'", '{"question":']),
    ('{"question": "a", "choices": ["b", "c"]}', ["has no field 'answer'"]),
    ('{"question": 1, "choices": ["b", "c"], "answer": 0}', ["question=1", "use text"]),
    ('{"question": "a", "choices": ["b"], "answer": 0}', ["choices=['b']", "at least two"]),
    ('{"question": "a", "choices": ["b", " "], "answer": 0}', ["' ' in choices", "not empty"]),
    ('{"question": "a", "choices": ["b", "c"], "answer": 2}', ["answer=2", "0 to 1"]),
    ('{"question": "a", "choices": ["b", "c"], "answer": true}', ["answer=True"]),
    ('{"question": "a", "choices": ["b", "c"], "answer": "D"}', ["answer='D'", "its letter"]),
  ],
)
def test_a_line_that_is_no_question_gets_one_sentence(line: str, parts: list[str], tmp_path: Path):
  file = tmp_path / "a.jsonl"
  file.write_text('{"question": "a", "choices": ["b", "c"], "answer": 0}\n' + line)
  with one_sentence(f"line 2 of {str(file)!r} in choices", *parts):
    choices.read(str(file))


@pytest.mark.parametrize(
  "name, arguments, parts",
  [
    ("llama", [], ["data.path is missing", "--data.path=FILE_OR_FOLDER", "--choices"]),
    ("llama", ["--data.path=nowhere"], ["data.path='nowhere'", "does not exist"]),
    ("llama", ["--choices=nowhere"], ["choices='nowhere'", "name a file"]),
    ("llama", ["--data.path=a", "--strategy=fdsp"], ["strategy='fdsp'", "did you mean 'fsdp'"]),
    ("llama", ["--data.path=a", "--seq-len=0"], ["seq-len=0", "at least 1"]),
    ("llama", ["--data.path=a", "--examples=-1"], ["examples=-1", "0 for all"]),
    ("llama", ["--data.path=a", "--strategy=fsdp", "--batch-size=3"], ["batch-size=3", "use 8"]),
    ("llama", [f"--choices={GOLDEN / 'questions.jsonl'}", "--seq-len=9"], ["line 5 of", "seq-len=9", "--seq-len=29"]),
  ],
)
def test_mistakes_get_one_sentence(name: str, arguments: list[str], parts: list[str], evaluate):
  with one_sentence(*parts):
    evaluate(*arguments, name=name)


def test_a_model_that_predicts_no_tokens_gets_one_sentence():
  with one_sentence("no tokenizer"):
    tool.main([str(model_folders.FOLDER / "llama"), "--data.path=a"])
  model = Model(config(model__objective="class"), BYTES, lambda strategy: {}, None, 32)
  with one_sentence("model.objective='class'", "language model"):
    tool.with_options(model, tool.argparse.Namespace())
