"""Bad rows: with `data.on_bad_row="skip"` they are left out, counted and part of the fingerprint.

With "stop", what was prepared before them stays, as long as it is right.
"""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from helpers import config, one_sentence

from data import text
from data.text import prepare
from data.text.readers import Position

GOOD = [f'{{"text": "row {i} with some words"}}\n' for i in range(2000)]
BAD = {"not JSON": "{\n", "no field": '{"txt": "a"}\n', "a number": '{"text": 3.5}\n', "nested": "[" * 99_999 + "\n"}


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[Position]:
  """Where preparations begin to read. They save often."""
  monkeypatch.setattr(prepare, "BATCH", 3000)
  monkeypatch.setattr(prepare, "SAVE_EVERY", 9000)
  read, found = prepare.read, list[Position]()

  def read_from(files: Any, fields: Any, start: Any, *others: Any) -> Any:
    found.append(Position(*start))
    return read(files, fields, start, *others)

  monkeypatch.setattr(prepare, "read", read_from)
  return found


def load(path: Path, cache: Path, **fields: Any) -> Any:
  return text.load(config(data__path=str(path), data__cache_dir=str(cache), **fields))


def prepared(cache: Path) -> dict[str, bytes]:
  (folder,) = cache.glob("text-*")
  return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "meta.json"}


def test_bad_rows_are_skipped_counted_and_part_of_the_fingerprint(tmp_path: Path):
  rows = [*GOOD[:500], *BAD.values(), *GOOD[500:]]
  (tmp_path / "bad.jsonl").write_text("".join(rows))
  with one_sentence("line 501 of", "bad.jsonl"):
    load(tmp_path / "bad.jsonl", tmp_path / "stop")
  found = load(tmp_path / "bad.jsonl", tmp_path / "skip", data__on_bad_row="skip")
  assert "data.on_bad_row='skip' has left out 4 rows, such as: line 501 of" in found.description
  assert "line 502 of" in found.description
  assert "\n" not in found.description.partition("note: ")[2]
  # The same rows, which are held out by their numbers, without a bad one: blank lines count as rows.
  (tmp_path / "good.jsonl").write_text("".join([*GOOD[:500], *"\n" * len(BAD), *GOOD[500:]]))
  same = load(tmp_path / "good.jsonl", tmp_path / "good")
  assert prepared(tmp_path / "skip") == prepared(tmp_path / "good")
  assert found.parts[0].fingerprint != same.parts[0].fingerprint
  skipping = load(tmp_path / "good.jsonl", tmp_path / "good2", data__on_bad_row="skip")
  assert skipping.parts[0].fingerprint == same.parts[0].fingerprint  # nothing was skipped


@pytest.mark.parametrize(
  "kind,content",
  [
    ("csv", 'text,n\n"a, b",1\nb,2,3\nc,3\n'),
    ("json", '[{"text": "a, b"}, {"txt": 1}, {"text": "c"}]'),
    ("jsonl", '{"text": "a, b"}\n{"text": "' + "x" * 2_000_000 + '"}\n{"text": "c"}\n'),
  ],
)
def test_rows_of_each_kind_are_skipped(kind: str, content: str, tmp_path: Path):
  from data.text.rows import Fields, rows

  (tmp_path / f"a.{kind}").write_text(content)
  found = list(rows(*text.find_text(str(tmp_path / f"a.{kind}")), Fields(skip=True, limit=1 << 20)))
  assert [row.text for row in found] == [b"a, b", None, b"c"]
  assert [bool(row.wrong) for row in found] == [False, True, False]
  with one_sentence("2 of"):
    list(rows(*text.find_text(str(tmp_path / f"a.{kind}")), Fields(limit=1 << 20)))


def test_skipped_rows_of_token_ids_are_part_of_the_fingerprint(tmp_path: Path):
  """The same ids, once with a row that is left out."""
  ids = [json.dumps({"ids": [i, i + 1, 7] * 20}) + "\n" for i in range(60)]
  fields = {"data__text_field": "ids", "data__on_bad_row": "skip", "data__packing": "documents"}
  prints = []
  for name, bad in (("bad", "{\n"), ("blank", "\n")):
    (tmp_path / f"{name}.jsonl").write_text("".join([*ids[:30], bad, *ids[30:]]))
    found = load(tmp_path / f"{name}.jsonl", tmp_path / name, **fields)
    prints.append(found.parts[0].fingerprint)
    assert ("has left out 1 rows" in found.description) == (name == "bad")
  assert prints[0] != prints[1]


@pytest.mark.parametrize("fix", ["the row", "the field"])
def test_a_preparation_goes_on_after_a_bad_row_is_fixed(fix: str, tmp_path: Path, starts: list[Position]):
  file = tmp_path / "a.jsonl"
  file.write_text("".join([*GOOD, "{\n"]))
  with one_sentence("line 2001 of", "the next start goes on after the first"):
    load(file, tmp_path / "cache")
  if fix == "the row":
    file.write_text("".join([*GOOD, '{"text": "the last one"}\n']))
  how = {"data__on_bad_row": "skip"} if fix == "the field" else {}
  found = load(file, tmp_path / "cache", **how)
  assert starts[0] == Position()
  assert starts[1].rows > 1500
  assert load(file, tmp_path / "undisturbed", **how).parts[0].fingerprint == found.parts[0].fingerprint
  assert prepared(tmp_path / "cache") == prepared(tmp_path / "undisturbed")
  assert not list((tmp_path / "cache").glob(".text-*[0-9a-f]/*"))


@pytest.mark.parametrize("change", ["an earlier row", "compressed", "an earlier file", "stop again"])
def test_a_preparation_does_not_go_on_from_what_is_not_right(
  change: str, tmp_path: Path, starts: list[Position], monkeypatch: pytest.MonkeyPatch
):
  folder = tmp_path / "rows"
  folder.mkdir()
  names = ["b.jsonl.gz"] if change == "compressed" else ["b.jsonl"]
  write = lambda name, rows: (folder / name).write_bytes(
    gzip.compress("".join(rows).encode()) if name.endswith(".gz") else "".join(rows).encode()
  )
  write("a.jsonl", GOOD[:10])
  write(
    names[0], [*GOOD, *(["{\n"] if change != "stop again" else [*GOOD, '{"text": 1}\n', *GOOD, "[1]\n", '{"text": "'])]
  )
  how = {"data__on_bad_row": "skip"} if change == "stop again" else {}
  if change == "stop again":  # it skips rows, is killed, and then must stop at them
    check = prepare.check_unchanged
    prepare.check_unchanged = lambda files: (
      check(files) if len(files) == 1 else (_ for _ in ()).throw(KeyboardInterrupt)
    )
    try:
      with pytest.raises(KeyboardInterrupt):
        load(folder, tmp_path / "cache", **how)
    finally:
      prepare.check_unchanged = check
    with one_sentence("line 4001 of"):
      load(folder, tmp_path / "cache")
  else:
    with one_sentence("line 2001 of"):
      load(folder, tmp_path / "cache")
    good = GOOD if change == "compressed" else [GOOD[0].replace("row", "ROW"), *GOOD[1:]]
    write(names[0], good if change != "an earlier file" else GOOD)
    if change == "an earlier file":
      write("a.jsonl", GOOD[10:20])
    found = load(folder, tmp_path / "cache")
    assert load(folder, tmp_path / "undisturbed").parts[0].fingerprint == found.parts[0].fingerprint
  assert starts[1] == Position()


def test_text_that_becomes_far_larger_than_its_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  import limits

  monkeypatch.setattr(limits, "FREE", 1 << 20)
  file = tmp_path / "a.jsonl.gz"
  file.write_bytes(gzip.compress((json.dumps({"text": "a" * 1000}) + "\n").encode() * 5000))
  with one_sentence("a.jsonl.gz' and the other files of data.path have", "times as much", "data.limit_ratio"):
    load(file, tmp_path / "cache", data__limit_ratio=50)
  load(file, tmp_path / "cache", data__limit_ratio=5000)
