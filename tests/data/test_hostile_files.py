"""Damaged and hostile files: each reader gives a value or one sentence. tests/fuzz.py makes many more of them.

What that has found is in FOUND, in a small form. A new find belongs there, too.
"""

import io
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fuzz
import numpy as np
import pyarrow as pa
import pytest
from helpers import one_sentence

from data import sealed
from data.text.scan import TokenFile, TokenFiles, scan

CHANGES = 12  # damaged files of each reader
DEEP = b"[" * 100_000
Change = Callable[[bytes], bytes]


def edited(*places: Any) -> Change:
  """Changes a value in JSON: the path to it, and at last the value."""

  def change(seed: bytes) -> bytes:
    whole = json.loads(seed)
    inner = whole
    for name in places[:-2]:
      inner = inner[name]
    inner[places[-2]] = places[-1]
    return json.dumps(whole).encode()

  return change


def offsets_that_go_down(seed: bytes) -> bytes:
  """A column of texts in which one would have a negative length."""
  column = pa.StringArray.from_buffers(2, pa.py_buffer(np.array([0, 9, 3], "<i4")), pa.py_buffer(b"some words"))
  out = io.BytesIO()
  with pa.ipc.new_file(out, pa.schema({"text": pa.string()})) as file:
    file.write_batch(pa.record_batch({"text": column}))
  return out.getvalue()


def documents_that_overflow(seed: bytes) -> bytes:
  """An index whose documents end at the smallest number, so that the difference from the one before is positive."""
  return seed[:-16] + struct.pack("<2q", (1 << 63) - 1, -(1 << 63))


# The reader, what is changed, and a part of the sentence.
FOUND: dict[str, tuple[str, Change, str]] = {
  "a line that ends within a header": ("csv", lambda seed: b"text\rn\n1\n", "cannot be read"),
  "a column of two lines": ("csv", lambda seed: b'"a\nb",n\n1,2\n', "which has a\\nb, n"),
  "no tokenizer in a record": ("record", edited("data", "tokenizer", None), "data.tokenizer=None"),
  "devices of another version": (
    "record",
    lambda seed: edited("devices", [])(edited("version", 5)(seed)),
    "record version 5",
  ),
  "offsets that go down": ("arrow", offsets_that_go_down, "cannot be read"),
  "documents out of order": ("megatron", documents_that_overflow, "documents"),
  "classes of no text": (
    "class_names",
    edited("info", "features", "label", "names", [1, {}]),
    "'label' has the names [1, {}]",
  ),
  "a question that nests": ("choices", lambda seed: DEEP, "not valid JSON"),
  "rope_theta as text": ("config", edited("rope_theta", "x"), "rope_theta='x'"),
  "a section in a field": ("record", edited("config", "model", "attention", {"x": 0}), "model.attention.x"),
  "a number for a section": ("config_json", edited("pipeline", 3), "pipeline=3"),
  "a dtype that is no text": ("record", edited("arrays", "params/embedding", 1, "\ud800"), "arrays"),
  "a version that is a text": ("record", edited("version", "\ud800"), r"version '\ud800'"),
  "a manifest of another type": ("manifest", lambda seed: b"0", "prepared for other data or by a newer version"),
  "a manifest that nests": ("manifest", lambda seed: DEEP, "prepared for other data or by a newer version"),
  "files without a size": ("manifest", edited("files", {"meta.json": [None, 1, "a"]}), "prepared for other data"),
  "a cache that says nothing": ("meta", lambda seed: b"0", "meta.json"),
  "a cache that nests": ("meta", lambda seed: DEEP, "meta.json"),
  "a cache with a type of its own": ("meta", edited("dtype", "O"), "dtype='O'"),
  "a fingerprint that is no text": ("meta", edited("fingerprint", "\ud800"), "fingerprint="),
  "nothing that counts": ("meta", edited("counted_tokens", "validation", 0), ""),
  "losses without characters": ("meta", edited("lost", 3), ""),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """One for each reader, so that what is around the damaged file is made once."""
  return tmp_path_factory.mktemp("hostile")


@pytest.mark.parametrize("name", fuzz.READERS)
def test_a_damaged_file_is_read_or_refused_in_one_sentence(name: str, folder: Path):
  seed, read = fuzz.READERS[name][0](), fuzz.READERS[name][1]
  (folder / name).mkdir(exist_ok=True)
  assert fuzz.check(read, folder / name / "a", seed) == ""  # it is read as it is
  change = fuzz.changing(seed)
  for number in range(CHANGES):
    fuzz.check(read, folder / name / "a", change(random.Random(number)))


@pytest.mark.parametrize("case", FOUND)
def test_what_was_found_is_refused_in_one_sentence(case: str, folder: Path):
  name, change, part = FOUND[case]
  seed, read = fuzz.READERS[name][0](), fuzz.READERS[name][1]
  (folder / name).mkdir(exist_ok=True)
  said = fuzz.check(read, folder / name / "a", change(seed))
  assert part in said
  assert bool(part) == bool(said)


@pytest.mark.parametrize("change", ["path", "offset", "type"])
def test_a_cache_names_no_file_but_those_of_the_user(change: str, tmp_path: Path):
  """Tokens are read where they are, and where that is comes from the cache, which somebody else may have prepared."""
  np.arange(4000, dtype="<u2").tofile(tmp_path / "a.bin")
  (tmp_path / "secret").write_bytes(b"words of somebody" * 999)
  find = lambda: scan(TokenFiles((TokenFile(tmp_path / "a.bin"),)), str(tmp_path / "cache"), vocab_size=4000)
  assert len(find().tokens["train"]) == 3800
  (meta,) = (tmp_path / "cache").glob("tokens-*/meta.json")
  found = json.loads(meta.read_text())
  new = {"path": (0, str(tmp_path / "secret")), "offset": (3, 4000), "type": (1, "O")}[change]
  found["tokens"]["train"][0][new[0]] = new[1]
  meta.write_text(json.dumps(found))
  key = json.loads(sealed.beside(meta.parent).read_text())["key"]
  sealed.seal(meta.parent, meta.parent, key)
  with one_sentence("data.cache_dir has", "with tokens=", "remove that folder"):
    find()


def test_counts_of_pairs_are_what_they_are(tmp_path: Path):
  from data import described

  np.save(tmp_path / "pairs.npy", np.zeros((256, 256), np.int64))
  assert described.pairs(tmp_path).shape == (256, 256)
  for content in (b"", b"\x80\x04N.", fuzz.npy()):
    (tmp_path / "pairs.npy").write_bytes(content)
    with one_sentence("pairs.npy", "remove that folder"):
      described.pairs(tmp_path)
