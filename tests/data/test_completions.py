"""Prompts and completions: which tokens a row becomes, which of them count, and which rows are refused."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import config, one_sentence
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

import data
from data import text
from data.batches import EvaluationBatches
from data.dataset import Dataset, Part
from data.text import cutting, packing, prepare, readers
from data.text.files import held_out

# The last prompt is empty, and the last completion is longer than a sequence.
ROWS = [{"prompt": f"{i}²? " * (i % 5), "completion": f"größe {i * i}" * (1 + i % 3), "id": i} for i in range(60)]
ROWS += [{"prompt": "a long question, " * 20, "completion": "yes", "id": 60}]
ROWS += [{"prompt": "", "completion": "a long answer, " * 20, "id": 61}]
WITH_PROMPTS = {"data__prompt_field": "prompt", "data__packing": "documents"}


def as_json(rows: list[dict[str, Any]]) -> bytes:
  return "".join(json.dumps(row) + "\n" for row in rows).encode()


def arrow(file: Path) -> None:
  table = pa.Table.from_pylist(ROWS)
  with pa.OSFile(str(file), "wb") as out, pa.ipc.new_stream(out, table.schema) as writer:
    writer.write_table(table, max_chunksize=20)


KINDS = {
  "a.jsonl": lambda file: file.write_bytes(as_json(ROWS)),
  "a.jsonl.gz": lambda file: file.write_bytes(gzip.compress(as_json(ROWS))),
  "a.parquet": lambda file: pq.write_table(pa.Table.from_pylist(ROWS), file, row_group_size=20),
  "a.arrow": arrow,
}


def load(tmp_path: Path, path: Any, **fields: Any) -> Dataset:
  source = path if isinstance(path, dict) else str(path)
  return text.load(config(data__path=source, data__cache_dir=str(tmp_path / "cache"), **WITH_PROMPTS | fields))


def documents(part: Part, split: str = "train") -> list[tuple[list[int], list[int]]]:
  """The tokens of each document: its prompt, and its completion with the END token."""
  source = getattr(part, split)
  tokens, completions = (file.slice(0, len(file)) for file in (source.tokens, source.completions))
  ends = np.fromfile(source.tokens.path.with_suffix(".ends"), "<i8")
  pairs = zip(np.split(tokens, ends[:-1]), np.split(completions, ends[:-1]), strict=True)
  return [(own[~learned].tolist(), own[learned].tolist()) for own, learned in pairs]


def in_bytes(rows: list[dict[str, Any]]) -> list[tuple[list[int], list[int]]]:
  return [([*row["prompt"].encode()], [*row["completion"].encode(), 0]) for row in rows]


@pytest.mark.parametrize("name", KINDS)
def test_a_row_is_a_prompt_and_a_completion_whatever_the_kind_of_file(
  tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
):
  monkeypatch.setattr(cutting, "PIECE", 8)  # cuts completions
  monkeypatch.setattr(prepare, "BATCH", 1)  # prepares prompts and completions one by one
  KINDS[name](tmp_path / name)
  part = load(tmp_path, tmp_path / name).parts[0]
  assert documents(part) == in_bytes([row for i, row in enumerate(ROWS) if not held_out(i)])
  assert documents(part, "validation") == in_bytes([row for i, row in enumerate(ROWS) if held_out(i)])


def test_reading_goes_on_after_each_row(tmp_path: Path):
  """A row is one piece: prompt and completion are never apart."""
  KINDS["a.jsonl"](tmp_path / "a.jsonl")
  files, fields = text.find_text(str(tmp_path / "a.jsonl")), readers.Fields("completion", prompt="prompt")
  pieces = list(readers.read(files, fields))
  assert [piece.text.decode() for piece in pieces] == [row["prompt"] + row["completion"] for row in ROWS]
  for at in range(1, len(pieces), 7):
    assert list(readers.read(files, fields, pieces[at].position)) == pieces[at + 1 :]


@pytest.mark.parametrize("length", [8, 32, 400])
def test_each_prediction_of_a_completion_is_made_once_and_every_sequence_has_one(
  tmp_path: Path, length: int, monkeypatch: pytest.MonkeyPatch
):
  monkeypatch.setattr(packing, "BLOCK", 5)
  KINDS["a.jsonl"](tmp_path / "a.jsonl")
  part = load(tmp_path, tmp_path / "a.jsonl", model__seq_len=length).parts[0]
  batch = part.train.read(np.arange(len(part.train)))
  counted = (np.diff(batch["segments"]) == 0) & batch["completions"][:, 1:]
  assert counted.any(axis=1).all()
  assert not batch["completions"][batch["segments"] == 0].any()
  pairs = np.stack([batch["tokens"][:, :-1], batch["tokens"][:, 1:]], axis=-1)[counted]
  expected = []
  for prompt, completion in documents(part):
    tokens = [*prompt, *completion]
    expected += [(tokens[i - 1], tokens[i]) for i in range(max(1, len(prompt)), len(tokens))]
  assert sorted(map(tuple, pairs.tolist())) == sorted(expected)


def test_pieces_that_are_all_prompt_are_left_out(tmp_path: Path):
  """Sequences of 9 tokens. Of the long document, pieces begin at 0, 8, 16 and 24. Its completion begins at token 17."""
  rows = [{"prompt": "abcdefghijklmnopq", "completion": "ABCDEFGHIJKL"}, {"prompt": "r", "completion": "RS"}]
  for name, some in (("train", ROWS), ("validation", rows)):
    (tmp_path / f"{name}.jsonl").write_bytes(as_json(some))
  fields = {"data__validation_path": str(tmp_path / "validation.jsonl"), "model__seq_len": 8}
  part = load(tmp_path, tmp_path / "train.jsonl", **fields).parts[0]
  batch = part.validation.read(np.arange(len(part.validation)))
  shown = [bytes(row.astype(np.uint8)) for row in batch["tokens"]]
  assert shown == [b"qABCDEFGH", b"HIJKL\0\0\0\0", b"rRS\0\0\0\0\0\0"]
  np.testing.assert_array_equal(batch["segments"].sum(axis=1), [9, 6, 4])
  np.testing.assert_array_equal(
    batch["completions"].astype(int), [[0] + [1] * 8, [1] * 6 + [0] * 3, [0, 1, 1, 1] + [0] * 5]
  )


def llama_like(folder: Path) -> Path:
  """A tokenizer.json that puts <s> before a text, as those of Llama's models do."""
  bpe = Tokenizer(models.BPE())
  bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  alphabet = pre_tokenizers.ByteLevel.alphabet()
  trainer = trainers.BpeTrainer(
    vocab_size=300, special_tokens=["<s>", "</s>", "<user>"], initial_alphabet=alphabet, show_progress=False
  )
  bpe.train_from_iterator(["größe a long answer, question? " * 9], trainer)
  bpe.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", bpe.token_to_id("<s>"))])
  folder.mkdir()
  bpe.save(str(folder / "tokenizer.json"))
  return folder


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe", "tokenizer.json"])
def test_a_prompt_has_the_tokens_that_generate_gives_it(
  tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
):
  """And the completion has its own, as if it were alone: no token covers the border between the two."""
  monkeypatch.setattr(cutting, "PIECE", 8)
  rows = [row | {"prompt": f"<user>{row['prompt']}gr"} for row in ROWS]
  (tmp_path / "a.jsonl").write_bytes(as_json(rows))
  chosen = str(llama_like(tmp_path / "tokenizer")) if tokenizer == "tokenizer.json" else tokenizer
  dataset = load(tmp_path, tmp_path / "a.jsonl", data__tokenizer=chosen, model__vocab_size=300)
  assert dataset.text
  train = [row for i, row in enumerate(rows) if not held_out(i)]
  found = documents(dataset.parts[0])
  assert [prompt for prompt, _ in found] == [dataset.text.encode(row["prompt"]) for row in train]
  begins = len(dataset.text.encode(""))
  assert begins == (tokenizer == "tokenizer.json")
  (end,) = dataset.text.ends
  short = [(row, own) for row, (_, own) in zip(train, found, strict=True) if len(row["completion"].encode()) < 16]
  assert len(short) > 15
  for row, own in short:  # longer ones are cut
    assert own == [*dataset.text.encode(row["completion"])[begins:], end]


def test_bits_per_byte_are_those_of_completions(tmp_path: Path):
  KINDS["a.jsonl"](tmp_path / "a.jsonl")
  for tokenizer in ("bytes", "bpe"):
    part = load(tmp_path, tmp_path / "a.jsonl", data__tokenizer=tokenizer, model__vocab_size=300).parts[0]
    completions = [row["completion"].encode() for i, row in enumerate(ROWS) if held_out(i)]
    tokens = sum(len(completion) for _, completion in documents(part, "validation"))
    assert part.bytes_per_token == sum(len(completion) + 1 for completion in completions) / tokens
    assert part.byte_pairs is None  # so there is no baseline
    assert part.counts["tokens of completions"][1] == tokens < part.counts["tokens"][1]


def test_mixed_sources_all_have_prompts(tmp_path: Path):
  for name in ("a", "b"):
    (tmp_path / f"{name}.jsonl").write_bytes(as_json([row | {"prompt": name} for row in ROWS]))
  mixed = data.mixture(load(tmp_path, {str(tmp_path / f"{name}.jsonl"): 1 for name in "ab"}))
  batch = data.Batches(mixed, 16).read(0)
  assert batch["completions"].shape == batch["tokens"].shape
  assert batch["completions"].dtype == np.bool_
  first_tokens = {chr(token) for token in batch["tokens"][:, 0] if token}
  assert first_tokens >= {"a", "b"}


def test_the_choice_of_the_fields_changes_the_fingerprint(tmp_path: Path):
  KINDS["a.jsonl"](tmp_path / "a.jsonl")
  fields = [
    {}, {"data__prompt_field": "completion", "data__completion_field": "prompt"},
    {"data__prompt_field": "", "data__text_field": "completion"},
  ]  # fmt: skip
  (tmp_path / "b.jsonl").write_bytes(as_json([{"prompt": "12", "completion": "3"}] * 60))
  (tmp_path / "c.jsonl").write_bytes(as_json([{"prompt": "1", "completion": "23"}] * 60))  # only the border differs
  nonempty = [row for row in ROWS if row["prompt"]]
  (tmp_path / "a.jsonl").write_bytes(as_json(nonempty))
  found = [load(tmp_path, tmp_path / "a.jsonl", **some).parts[0].fingerprint for some in fields]
  found += [load(tmp_path, tmp_path / name).parts[0].fingerprint for name in ("b.jsonl", "c.jsonl")]
  assert len(set(found)) == 5


def test_examples_of_the_loader_fit_the_model(tmp_path: Path):
  KINDS["a.jsonl"](tmp_path / "a.jsonl")
  dataset = data.load(config(data__path=str(tmp_path / "a.jsonl"), data__cache_dir=str(tmp_path), **WITH_PROMPTS))
  batch = EvaluationBatches(dataset.parts[0].validation, 8).read(0)
  assert set(batch) == {"tokens", "segments", "completions", "id", "mask"}


FINE = [{"prompt": "1 + 1 =", "completion": "2"}] * 9


@pytest.mark.parametrize(
  "row, fields, parts",
  [
    ({"completion": "2"}, {}, ["data.prompt_field='prompt' is not in line 10 of", "a.jsonl'", "has completion"]),
    ({"prompt": "2"}, {}, ["data.completion_field='completion' is not in line 10 of", "a.jsonl'", "has prompt"]),
    ({"prompt": 3, "completion": "2"}, {}, ["data.prompt_field='prompt' is 3 in line 10 of", "holds text"]),
    ({"prompt": None, "completion": "2"}, {}, ["data.prompt_field='prompt' is None in line 10 of", "holds text"]),
    (
      {"prompt": "x", "completion": ["2"]},
      {},
      ["data.completion_field='completion' is ['2'] in line 10", "holds text"],
    ),
    ({"prompt": "x", "completion": ""}, {}, ["data.completion_field='completion' is empty in line 10 of", "a.jsonl'"]),
    ({"prompt": "x", "completion": None}, {}, ["data.completion_field='completion' is empty in line 10 of"]),
    (["x", "2"], {}, ["line 10 of", '{"prompt": "...", "completion": "..."}']),
    ({}, {"data__completion_field": "prompt"}, ["data.prompt_field='prompt'", "data.completion_field='prompt'", "two"]),
    ({}, {"data__prompt_field": "promt"}, ["data.prompt_field='promt' is not in line 1 of", "did you mean 'prompt'"]),
  ],
)
def test_rows_without_a_prompt_or_a_completion_are_refused(tmp_path: Path, row: Any, fields: dict, parts: list[str]):
  (tmp_path / "a.jsonl").write_bytes(as_json([*FINE, row]))
  with one_sentence(*parts):
    load(tmp_path, tmp_path / "a.jsonl", **fields)


def test_an_empty_completion_of_a_table_names_its_row(tmp_path: Path):
  pq.write_table(pa.Table.from_pylist([*FINE, {"prompt": "x", "completion": ""}]), tmp_path / "a.parquet")
  with one_sentence("data.completion_field='completion' is empty in row 10 of", "a.parquet'", "leave out the row"):
    load(tmp_path, tmp_path / "a.parquet")


def test_sources_without_prompts_are_refused(tmp_path: Path):
  (tmp_path / "plain.txt").write_text("text\n" * 100)
  KINDS["a.jsonl"](tmp_path / "a.jsonl")
  np.arange(1000, dtype="<u2").tofile(tmp_path / "tokens.bin")
  with one_sentence("plain.txt' in data.path is plain text", "no prompts", "data.prompt_field='prompt'", ".jsonl"):
    load(tmp_path, {str(tmp_path / "a.jsonl"): 1, str(tmp_path / "plain.txt"): 1})
  with one_sentence("tokens.bin' holds tokens without prompts", "data.prompt_field='prompt'", "JSON lines"):
    load(tmp_path, tmp_path / "tokens.bin", model__vocab_size=1000)


def test_too_few_rows_to_validate_on_are_refused(tmp_path: Path):
  (tmp_path / "a.jsonl").write_bytes(b"\n" + as_json(ROWS[:4]))  # of the first 9 lines, only the first is held out
  with one_sentence("data.path=", "for validation", "data.validation_path"):
    load(tmp_path, tmp_path / "a.jsonl")
