"""Kinds of text files: all give the same documents, and one clear error if they are damaged."""

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import config, one_sentence

from data import text
from data.dataset import Dataset, Part
from data.text import cutting, prepare, readers
from data.text.files import held_out
from data.text.sources import find_text

COUNT = 300
ROWS = [{"id": i, "text": f"row {i}, of größe {i * i}", "label": ("no", "yes")[i % 2]} for i in range(COUNT)]
TRAIN = [row for i, row in enumerate(ROWS) if not held_out(i)]
VALIDATION = [row for i, row in enumerate(ROWS) if held_out(i)]


def load(tmp_path: Path, path: Path | str | dict[str, float], **fields: Any) -> Dataset:
  source = path if isinstance(path, dict) else str(path)
  return text.load(config(data__path=source, data__cache_dir=str(tmp_path / "cache"), **fields))


def documents(part: Part, split: str = "train") -> list[bytes]:
  tokens = getattr(part, split).tokens
  return tokens.slice(0, len(tokens)).tobytes().split(b"\0")[:-1]


def texts(rows: list[dict[str, Any]]) -> list[bytes]:
  return [row["text"].encode() for row in rows]


def zst(file: Path, content: bytes) -> None:
  with pa.CompressedOutputStream(str(file), "zstd") as out:
    out.write(content)


def as_json(rows: list[dict[str, Any]]) -> bytes:
  return "".join(json.dumps(row) + "\n" for row in rows).encode()


def arrow(file: Path, rows: list[dict[str, Any]], schema: pa.Schema | None = None) -> None:
  table = pa.Table.from_pylist(rows, schema)
  with pa.OSFile(str(file), "wb") as out, pa.ipc.new_stream(out, table.schema) as writer:
    writer.write_table(table, max_chunksize=70)


def saved_dataset(folder: Path, rows: list[dict[str, Any]], schema: pa.Schema | None = None) -> None:
  """What `Dataset.save_to_disk` of `datasets` 5.2.0 writes, in two files."""
  folder.mkdir(parents=True)
  files = [f"data-{i:05d}-of-00002.arrow" for i in range(2)]
  arrow(folder / files[0], rows[: len(rows) // 3], schema)
  arrow(folder / files[1], rows[len(rows) // 3 :], schema)
  arrow(folder / "cache-1234.arrow", rows, schema)  # what `map` leaves there is not part of it
  (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": file} for file in files]}))
  (folder / "dataset_info.json").write_text("{}")


def saved_splits(folder: Path, **splits: list[dict[str, Any]]) -> None:
  """What `DatasetDict.save_to_disk` writes."""
  for name, rows in splits.items():
    saved_dataset(folder / name, rows)
  (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))


KINDS: dict[str, Callable[[Path], Any]] = {
  "a.jsonl": lambda file: file.write_bytes(as_json(ROWS)),
  "a.ndjson": lambda file: file.write_bytes(as_json(ROWS).rstrip()),  # no end of the last line
  "a.jsonl.gz": lambda file: file.write_bytes(gzip.compress(as_json(ROWS))),
  "a.jsonl.zst": lambda file: zst(file, as_json(ROWS)),
  "a.parquet": lambda file: pq.write_table(pa.Table.from_pylist(ROWS), file, row_group_size=70),
  "a.arrow": lambda file: arrow(file, ROWS),
  "saved": lambda folder: saved_dataset(folder, ROWS),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_row_is_a_document_whatever_the_kind_of_file(tmp_path: Path, name: str):
  KINDS[name](tmp_path / name)
  part = load(tmp_path, tmp_path / name).parts[0]
  assert documents(part) == texts(TRAIN)
  assert documents(part, "validation") == texts(VALIDATION)


def test_equal_rows_have_equal_fingerprints(tmp_path: Path):
  fingerprints = set()
  for name in KINDS:
    KINDS[name](tmp_path / name)
    fingerprints.add(load(tmp_path, tmp_path / name).parts[0].fingerprint)
  assert len(fingerprints) == 1


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("start", [1, 69, 70, 71, 299, 300])
def test_reading_goes_on_from_any_position(tmp_path: Path, name: str, start: int, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(cutting, "PIECE", 8)  # cuts the rows
  KINDS[name](tmp_path / name)
  files = find_text(str(tmp_path / name))
  pieces = list(readers.read(files, readers.Fields()))
  last = [i for i, piece in enumerate(pieces) if piece.last]
  assert len(last) == COUNT
  assert len(pieces) > COUNT
  assert [piece.position is not None for piece in pieces] == [piece.last for piece in pieces]
  at = last[start - 1]
  assert list(readers.read(files, readers.Fields(), pieces[at].position)) == pieces[at + 1 :]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("count", [1, 25])
def test_plain_text_goes_on_from_any_position(tmp_path: Path, suffix: str, count: int, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(cutting, "PIECE", 100)
  write_plain(tmp_path / "corpus", suffix, count)
  files = find_text(str(tmp_path / "corpus"))
  pieces = list(readers.read(files, readers.Fields()))
  assert len(pieces) > 30
  for at in range(0, len(pieces), 31):
    assert list(readers.read(files, readers.Fields(), pieces[at].position)) == pieces[at + 1 :]


def write_plain(folder: Path, suffix: str, count: int) -> None:
  write = {"": Path.write_bytes, ".gz": lambda f, x: f.write_bytes(gzip.compress(x)), ".zst": zst}[suffix]
  for i in range(count):
    file = folder / ("sub", "sub-b")[i % 2] / f"{i}.txt{suffix}"
    file.parent.mkdir(parents=True, exist_ok=True)
    write(file, "".join(f"line {j * j} of file {i} größe\n" for j in range(6000 // count)).encode())


@pytest.mark.parametrize("count", [1, 3, 25])
def test_compressed_text_is_split_as_plain_text_is(tmp_path: Path, count: int):
  parts = []
  for suffix in ("", ".gz", ".zst"):
    write_plain(tmp_path / f"corpus{suffix}", suffix, count)
    parts.append(load(tmp_path, tmp_path / f"corpus{suffix}").parts[0])
  assert parts[0].fingerprint == parts[1].fingerprint == parts[2].fingerprint
  assert documents(parts[0], "validation") == documents(parts[1], "validation")
  assert len(documents(parts[0])) == (count if count < 20 else 24)


def test_one_row_in_twenty_is_held_out_without_a_period():
  held = np.array([held_out(row) for row in range(100_000)])
  assert held.mean() == pytest.approx(1 / 20, abs=0.003)
  for period in range(2, 101):
    by_place = held[: 100_000 // period * period].reshape(-1, period).mean(0)
    assert by_place.max() < 0.05 + 6 * np.sqrt(0.0475 * period / 100_000)


def test_rows_are_numbered_over_all_files(tmp_path: Path):
  (tmp_path / "rows").mkdir()
  for i, row in enumerate(ROWS):
    (tmp_path / "rows" / f"{i:03d}.jsonl").write_bytes(as_json([row]))
  part = load(tmp_path, tmp_path / "rows").parts[0]
  assert documents(part, "validation") == texts(VALIDATION)


def test_a_source_may_mix_kinds(tmp_path: Path):
  folder = tmp_path / "mixed"
  saved_dataset(folder / "saved", ROWS[:100])
  pq.write_table(pa.Table.from_pylist(ROWS[100:]), folder / "b.parquet")
  plain = "".join(f"line {i}\n" for i in range(100))
  (tmp_path / "c.txt").write_text(plain)
  (folder / "d.bin.gz").write_bytes(gzip.compress(b"\0binary"))
  part = load(tmp_path, f"{folder},{tmp_path / 'c.txt'}").parts[0]
  train, validation = documents(part), documents(part, "validation")
  (start,) = (document for document in train if document.startswith(b"line 0"))
  assert 740 < len(start) < 760
  assert sorted(train + validation) == sorted([*texts(ROWS), start, plain[len(start) :].encode()])


def test_a_saved_dataset_brings_its_own_splits(tmp_path: Path):
  train, other, test = ROWS[:100], ROWS[100:200], ROWS[200:]
  saved_splits(tmp_path / "both", unsupervised=other, train=train, test=test)
  part = load(tmp_path, tmp_path / "both").parts[0]
  assert documents(part) == texts(train)
  assert documents(part, "validation") == texts(test)

  saved_splits(tmp_path / "three", train=train, test=test, validation=other)
  part = load(tmp_path, tmp_path / "three").parts[0]
  assert documents(part, "validation") == texts(other)

  saved_splits(tmp_path / "one", train=ROWS)
  assert documents(load(tmp_path, tmp_path / "one").parts[0], "validation") == texts(VALIDATION)

  part = load(tmp_path, tmp_path / "one", data__validation_path=str(tmp_path / "both")).parts[0]
  assert documents(part) == texts(ROWS)
  assert documents(part, "validation") == texts(test)

  saved_splits(tmp_path / "none", test=test, extra=other)
  with one_sentence("data.path=", "no split 'train'", "test, extra"):
    load(tmp_path, tmp_path / "none")
  assert len(documents(load(tmp_path, tmp_path / "none" / "test").parts[0])) > 80


def test_empty_rows_are_left_out_of_training_text(tmp_path: Path):
  rows = [{"text": x} for x in (None, "", *("some text",) * 50)]
  (tmp_path / "a.jsonl").write_bytes(b"\n" + as_json(rows) + b"\n\n")
  part = load(tmp_path, tmp_path / "a.jsonl").parts[0]
  assert len(documents(part) + documents(part, "validation")) == 50


def test_another_column_may_hold_the_text(tmp_path: Path):
  pq.write_table(pa.Table.from_pylist([{"text": "no", "content": row["text"]} for row in ROWS]), tmp_path / "a.parquet")
  part = load(tmp_path, tmp_path / "a.parquet", data__text_field="content").parts[0]
  assert documents(part) == texts(TRAIN)


CLASS = {"model__objective": "class", "model__classes": 0}


def labels_of(part: Part, split: str = "train") -> list[int]:
  source = getattr(part, split)
  return source.read(np.arange(len(source)))["label"].tolist()


@pytest.mark.parametrize("name", KINDS)
def test_names_of_classes_are_sorted_and_numbered(tmp_path: Path, name: str):
  KINDS[name](tmp_path / name)
  dataset = load(tmp_path, tmp_path / name, **CLASS)
  assert dataset.model["classes"] == 2
  assert dataset.class_names == ("no", "yes")
  assert labels_of(dataset.parts[0]) == [row["id"] % 2 for row in TRAIN]
  assert labels_of(dataset.parts[0], "validation") == [row["id"] % 2 for row in VALIDATION]
  batch = dataset.parts[0].train.read(np.array([0]))
  expected = TRAIN[0]["text"].encode()
  assert bytes(batch["tokens"][0][batch["segments"][0] == 1].astype(np.uint8)) == expected[:32]


def test_integer_classes_stay_as_they_are(tmp_path: Path):
  rows = [{"text": f"text {i}", "grade": (5, 1, 3)[i % 3]} for i in range(100)]
  (tmp_path / "a.jsonl").write_bytes(as_json(rows))
  with one_sentence("3 classes with numbers up to 5", "model.classes=6"):
    load(tmp_path, tmp_path / "a.jsonl", data__label_field="grade", **CLASS)
  dataset = load(tmp_path, tmp_path / "a.jsonl", data__label_field="grade", **CLASS | {"model__classes": 6})
  assert dataset.model["classes"] == 6
  assert dataset.class_names == ()
  assert labels_of(dataset.parts[0]) == [row["grade"] for i, row in enumerate(rows) if not held_out(i)]


def test_a_class_may_appear_in_validation_text_first(tmp_path: Path):
  first = VALIDATION[0]["id"]
  (tmp_path / "a.jsonl").write_bytes(
    as_json([row | {"label": int(row["id"] == first or row["id"] % 2)} for row in ROWS])
  )
  assert load(tmp_path, tmp_path / "a.jsonl", **CLASS).model["classes"] == 2


def test_names_that_a_saved_dataset_has_for_its_classes_are_used(tmp_path: Path):
  feature = {"info": {"features": {"label": {"names": ["bad", "good"], "_type": "ClassLabel"}}}}
  schema = pa.schema([("text", pa.string()), ("label", pa.int64())], metadata={"huggingface": json.dumps(feature)})
  rows = [{"text": f"text {i}", "label": i % 2} for i in range(100)]
  saved_dataset(tmp_path / "saved", rows, schema)
  pq.write_table(pa.Table.from_pylist(rows, schema), tmp_path / "a.parquet")
  for name in ("saved", "a.parquet"):
    assert load(tmp_path, tmp_path / name, **CLASS).class_names == ("bad", "good")


def test_labelled_documents_may_be_empty(tmp_path: Path):
  rows = [{"text": "" if i % 3 else "text", "label": i % 2} for i in range(100)]
  (tmp_path / "a.jsonl").write_bytes(as_json(rows))
  part = load(tmp_path, tmp_path / "a.jsonl", **CLASS).parts[0]
  assert len(part.train) + len(part.validation) == 100


def test_labels_that_do_not_work_are_refused(tmp_path: Path):
  def check(rows: list[dict[str, Any]], *parts: str, **fields: Any) -> None:
    (tmp_path / "a.jsonl").write_bytes(as_json(rows))
    with one_sentence(*parts):
      load(tmp_path, tmp_path / "a.jsonl", **CLASS, **fields)

  fine = [{"text": "x", "label": 1}] * 99
  check([*fine, {"text": "x", "label": None}], "data.label_field='label' is None in line 100 of")
  check([*fine, {"text": "x", "label": -1}], "data.label_field='label' is -1 in line 100 of")
  check([*fine, {"text": "x", "label": 0.5}], "data.label_field='label' is 0.5 in line 100 of")
  check([*fine, {"text": "x", "label": "a"}], "data.label_field='label'", "names and integers")
  only = [{"text": "x", "label": int(held_out(i))} for i in range(100)]
  check(only, "data.label_field='label' is 1 in validation text only")
  check(fine, "data.label_field='class' is not in line 1", "text, label", data__label_field="class")
  check(fine, "has a single class", "data.label_field")
  (tmp_path / "plain.txt").write_text("text\n" * 100)
  with one_sentence("plain text, which has no classes", ".jsonl"):
    load(tmp_path, tmp_path / "plain.txt", **CLASS)
  for name in ("a", "b"):
    rows = [{"text": "x", "label": f"{name}{i % 2}"} for i in range(100)]
    (tmp_path / f"{name}.jsonl").write_bytes(as_json(rows))
  with one_sentence("data.path mixes", "a0, a1", "b0, b1"):
    load(tmp_path, {str(tmp_path / "a.jsonl"): 1, str(tmp_path / "b.jsonl"): 1}, **CLASS)


def test_files_with_the_same_name_size_and_time_are_told_apart(tmp_path: Path):
  for letter in "ab":
    (tmp_path / letter).mkdir()
    (tmp_path / letter / "x.txt").write_text(f"{letter}\n" * 500)
    os.utime(tmp_path / letter / "x.txt", (1, 1))
  both = load(tmp_path, {str(tmp_path / letter): 1.0 for letter in "ab"})
  assert [chr(part.train.read(np.array([0]))["tokens"][0, 0]) for part in both.parts] == ["a", "b"]


def test_a_file_that_is_not_text_is_refused(tmp_path: Path):
  np.savez(tmp_path / "digits.npz", image=np.zeros((4, 8, 8), np.uint8))
  with one_sentence("digits.npz", "cannot be read as text", "configs/fsdp.py:images"):
    load(tmp_path, tmp_path / "digits.npz")


@pytest.mark.parametrize("name", [name for name in KINDS if name != "saved"])
def test_a_missing_column_is_refused(tmp_path: Path, name: str):
  KINDS[name](tmp_path / name)
  with one_sentence("data.text_field='texts' is not in", name, "id, text, label", "did you mean 'text'"):
    load(tmp_path, tmp_path / name, data__text_field="texts")
  with one_sentence("data.text_field='id' is 0 in", name, "holds text"):
    load(tmp_path, tmp_path / name, data__text_field="id")


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.arrow", "a.txt.gz", "a.txt.zst"])
@pytest.mark.parametrize("damage", ["truncated", "garbage"])
def test_a_damaged_file_is_refused(tmp_path: Path, name: str, damage: str):
  if name.startswith("a.txt"):
    write_plain(tmp_path, Path(name).suffix, 1)
    (tmp_path / "sub" / f"0.txt{Path(name).suffix}").rename(tmp_path / name)
  else:
    KINDS[name](tmp_path / name)
  content = (tmp_path / name).read_bytes()
  (tmp_path / name).write_bytes(content[: len(content) * 2 // 3] if damage == "truncated" else b"garbage" * 99)
  with one_sentence(name, "cannot be read", "again"):
    load(tmp_path, tmp_path / name)
  assert not list((tmp_path / "cache").glob("*text*/"))  # nothing to go on from


def test_invalid_json_is_refused(tmp_path: Path):
  good = as_json(ROWS[:3])
  for line, problem in ((b'{"text": "no end\n', "is not valid JSON"), (b"[1, 2]\n", "is not a JSON object")):
    (tmp_path / "a.jsonl").write_bytes(good + b"\n" + line + good)
    with one_sentence("line 5 of", "a.jsonl' in data.path", problem):
      load(tmp_path, tmp_path / "a.jsonl")


@pytest.mark.parametrize("change", ["append", "truncate", "remove"])
def test_a_source_that_changes_while_it_is_read_is_refused(
  tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch
):
  write_plain(tmp_path / "corpus", "", 2)
  file = tmp_path / "corpus" / "sub-b" / "1.txt"
  add = prepare.Writer.add

  def interfere(*arguments: Any) -> None:
    add(*arguments)
    if change == "append":
      file.write_bytes(file.read_bytes() + b"more\n")
    elif change == "truncate":
      file.write_bytes(b"short\n")
    else:
      file.unlink(missing_ok=True)

  monkeypatch.setattr(prepare, "BATCH", 1 << 14)
  monkeypatch.setattr(cutting, "PIECE", 1 << 10)
  monkeypatch.setattr(prepare.Writer, "add", interfere)
  with one_sentence("1.txt' in data.path changed while it was read"):
    load(tmp_path, tmp_path / "corpus")
  assert not list((tmp_path / "cache").glob("*text*/"))


def test_too_few_rows_to_validate_on_are_refused(tmp_path: Path):
  (tmp_path / "a.jsonl").write_bytes(as_json(TRAIN[:4]))
  with one_sentence("data.path=", "for validation", "data.validation_path"):
    load(tmp_path, tmp_path / "a.jsonl")


def write_tokens(folder: Path) -> Path:
  folder.mkdir()
  for name, size in (("train", 900), ("val", 100)):
    np.random.default_rng(size).integers(0, 200, size).astype("<u2").tofile(folder / f"{name}.bin")
  return folder


def test_token_files_of_other_programs_need_no_tokenizer(tmp_path: Path):
  tokens = write_tokens(tmp_path / "tokens")
  dataset = load(tmp_path, tokens)
  assert (dataset.text, dataset.tokenizer, dataset.model) == (None, "", {})
  assert len(dataset.parts[0].train) == (900 - 1) // 32
  other = load(tmp_path, tokens / "train.bin", data__validation_path=str(tokens / "val.bin"))
  assert len(other.parts[0].validation.tokens) == 100


def test_token_files_and_text_are_mixed_with_their_tokenizer_only(tmp_path: Path):
  tokens = write_tokens(tmp_path / "tokens")
  write_plain(tmp_path / "corpus", "", 1)
  both = {str(tokens): 1, str(tmp_path / "corpus"): 1}
  for tokenizer in ("bytes", "bpe"):
    with one_sentence(f"data.tokenizer='{tokenizer}' did not write", str(tokens), "tokenizer.json"):
      load(tmp_path, both, data__tokenizer=tokenizer, model__vocab_size=300)
  with one_sentence("data.tokenizer='bpe' did not write", str(tokens)):
    load(tmp_path, tokens, data__tokenizer="bpe", model__vocab_size=300)
  with one_sentence("data.validation_path=", "holds text", "holds tokens"):
    load(tmp_path, tokens, data__validation_path=str(tmp_path / "corpus"))
  load(tmp_path, tmp_path / "corpus", data__tokenizer="bpe", model__vocab_size=300)
  (folder,) = (tmp_path / "cache").glob("bpe-*")
  dataset = load(tmp_path, both, data__tokenizer=str(folder), model__vocab_size=0)
  assert dataset.model == {"vocab_size": 300}
  assert dataset.text is not None
  assert [part.name for part in dataset.parts] == sorted(both)
