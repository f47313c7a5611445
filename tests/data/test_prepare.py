"""Preparing text: the result does not depend on kills and full disks, and the memory not on the size.

Run as a script, this file is the process that the tests kill.
"""

import errno
import gzip
import json
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import ROOT, config, one_sentence
from own_memory import peak_bytes

from data import growing, text
from data.text import cutting, prepare
from errors import Unavailable

LINES = [f"line {i * i} of größe {i}, and it's that long" for i in range(2000)]
ROWS = [
  {"text": " ".join(LINES[i : i + i % 7]), "label": ("a", "b")[i % 2], "ids": [*range(i % 40)]} for i in range(1000)
]
SMALL = {"BATCH": 3000, "SAVE_EVERY": 9000}  # of prepare.py, for a save every few batches


def write_plain(folder: Path, suffix: str = "") -> Path:
  folder.mkdir()
  for i in range(3):
    content = "\n".join(LINES[i::3]).encode()
    (folder / f"{i}.txt{suffix}").write_bytes(gzip.compress(content) if suffix else content)
  return folder


def write_json(file: Path) -> Path:
  file.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in ROWS).encode()))
  return file


def write_parquet(file: Path) -> Path:
  pq.write_table(pa.Table.from_pylist(ROWS), file, row_group_size=300)
  return file


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
  "plain": (lambda tmp: write_plain(tmp / "corpus"), {}),
  "gzip": (lambda tmp: write_plain(tmp / "corpus", ".gz"), {"data__tokenizer": "bpe", "model__vocab_size": 300}),
  "json": (
    lambda tmp: write_json(tmp / "a.jsonl.gz"),
    {"model__objective": "class", "data__tokenizer": "bpe", "model__vocab_size": 300},
  ),
  "parquet": (lambda tmp: write_parquet(tmp / "a.parquet"), {}),
  "ids": (lambda tmp: write_parquet(tmp / "a.parquet"), {"data__text_field": "ids", "model__vocab_size": 256}),
  "prompts": (
    lambda tmp: write_json(tmp / "a.jsonl.gz"),
    {"data__prompt_field": "text", "data__completion_field": "label", "data__packing": "documents"},
  ),
}


def contents(cache: Path) -> dict[str, bytes]:
  """The files of the prepared text or ids. There must be nothing else but a tokenizer."""
  (folder,) = [*cache.glob("text-*"), *cache.glob("ids-*")]
  assert not [path for path in cache.iterdir() if path.name.startswith(".") and path.is_dir()]
  return {file.name: file.read_bytes() for file in folder.iterdir()}


def kill_at(event: int) -> None:
  """Kills this process at the given event. An event is half of a write to a file, or just before or after a flush."""
  left = [event]

  def happens() -> None:
    left[0] -= 1
    if left[0] < 0:
      os.kill(os.getpid(), signal.SIGKILL)

  write, fdatasync, replace = growing.GrowingFile.write, os.fdatasync, Path.replace

  def half_write(file: growing.GrowingFile, data: Any) -> None:
    if left[0] == 0:
      file._file.write(memoryview(data).cast("B")[: memoryview(data).nbytes // 2])
      file._file.flush()
    happens()
    write(file, data)

  def flush(descriptor: int) -> None:
    happens()
    fdatasync(descriptor)

  def rename(path: Path, target: Path) -> Path:
    happens()
    found = replace(path, target)
    happens()
    return found

  growing.GrowingFile.write, os.fdatasync, Path.replace = half_write, flush, rename  # type: ignore[method-assign]


def prepare_with_kills(fields: dict[str, Any], log: Path) -> None:
  """Runs a preparation in processes that are killed, each after more events, until one finishes."""
  for attempt in range(1000):
    if not (child := os.fork()):
      try:
        log_starts(log)
        kill_at(5 + 7 * attempt)
        text.load(config(**fields))
        os._exit(0)
      except BaseException:
        traceback.print_exc()
        os._exit(1)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
      assert os.WEXITSTATUS(status) == 0
      return
    assert os.WTERMSIG(status) == signal.SIGKILL


def log_starts(log: Path) -> None:
  """From now on, a preparation writes down where it begins to read."""
  read = prepare.read

  def logged(files: Any, fields: Any, start: Any, *others: Any) -> Any:
    with log.open("a") as out:
      out.write(f"{list(start)}\n")
    return read(files, fields, start, *others)

  prepare.read = logged  # type: ignore[assignment]


def run_script(*arguments: str) -> str:
  root = Path(__file__).parents[2]
  environment = os.environ | {"PYTHONPATH": f"{root}:{root / 'tests'}", "JAX_PLATFORMS": "cpu"}
  done = subprocess.run([sys.executable, __file__, *arguments], env=environment, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  return done.stdout


def fields_of(case: str, tmp_path: Path, cache: str) -> dict[str, Any]:
  write, fields = CASES[case]
  path = tmp_path / "corpus" if (tmp_path / "corpus").exists() else next(tmp_path.glob("a.*"), None) or write(tmp_path)
  return fields | {"data__path": str(path), "data__cache_dir": str(tmp_path / cache)}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
  for name, value in SMALL.items():
    monkeypatch.setattr(prepare, name, value)
  monkeypatch.setattr(cutting, "PIECE", 500)


@pytest.mark.full
def test_a_preparation_that_is_killed_many_times_gives_the_same_files(tmp_path: Path, small: None):
  cases = {}
  for case in CASES:
    (tmp_path / case).mkdir()
    text.load(config(**fields_of(case, tmp_path / case, "undisturbed")))
    cases[str(tmp_path / case / "log")] = fields_of(case, tmp_path / case, "killed")
  run_script("kill", json.dumps(cases))
  for case in CASES:
    starts = [json.loads(line) for line in (tmp_path / case / "log").read_text().splitlines()]
    assert starts == sorted(starts)
    assert len({tuple(start) for start in starts}) > 5  # went on from where it was
    expected = contents(tmp_path / case / "undisturbed")
    assert contents(tmp_path / case / "killed") == expected
    assert set(expected) >= {"train.tokens", "train.ends", "validation.tokens", "validation.ends", "meta.json"}
    assert ("pairs.npy" in expected) == (case != "ids")


def test_saves_and_batches_do_not_affect_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  text.load(config(**fields_of("json", tmp_path, "large")))
  for name, value in SMALL.items():
    monkeypatch.setattr(prepare, name, value)
  text.load(config(**fields_of("json", tmp_path, "small")))
  assert contents(tmp_path / "small") == contents(tmp_path / "large")


def test_after_a_full_disk_the_preparation_goes_on(tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch):
  text.load(config(**fields_of("plain", tmp_path, "undisturbed")))
  write, room, starts = growing.GrowingFile.write, [60_000], []
  read = prepare.read

  def write_on_full_disk(file: growing.GrowingFile, data: Any) -> None:
    size = memoryview(data).nbytes
    if size > room[0]:
      write(file, memoryview(data).cast("B")[: room[0]])
      raise OSError(errno.ENOSPC, "No space left on device")
    room[0] -= size
    write(file, data)

  def read_from(files: Any, fields: Any, start: Any, *others: Any) -> Any:
    starts.append(tuple(start))
    return read(files, fields, start, *others)

  monkeypatch.setattr(growing.GrowingFile, "write", write_on_full_disk)
  monkeypatch.setattr(prepare, "read", read_from)
  with one_sentence("data.cache_dir=", "is full", "continues", kind=Unavailable):
    text.load(config(**fields_of("plain", tmp_path, "full")))
  assert not list((tmp_path / "full").glob("text-*"))
  room[0] = 1 << 40
  text.load(config(**fields_of("plain", tmp_path, "full")))
  assert starts[0] == (0, 0, 0, 0, 0) < starts[1]
  assert contents(tmp_path / "full") == contents(tmp_path / "undisturbed")


def test_the_prepared_files_hold_what_they_should(tmp_path: Path, small: None):
  text.load(config(**fields_of("json", tmp_path, "cache")))
  (folder,) = (tmp_path / "cache").glob("text-*")
  meta = json.loads((folder / "meta.json").read_text())
  for split in ("train", "validation"):
    tokens = np.fromfile(folder / f"{split}.tokens", meta["dtype"])
    ends = np.fromfile(folder / f"{split}.ends", "<i8")
    assert meta["tokens"][split] == len(tokens) == ends[-1]
    assert meta["documents"][split] == len(ends) == len(np.fromfile(folder / f"{split}.labels", "<i4"))
    np.testing.assert_array_equal(np.flatnonzero(tokens == 0) + 1, ends)  # 0 is the END token, and not in the text
  assert sum(meta["documents"].values()) == len(ROWS)
  assert meta["bytes"] == sum(len(row["text"].encode()) + 1 for row in ROWS)
  assert meta["labels"] == ["a", "b"]


@pytest.mark.full
def test_the_memory_does_not_grow_with_the_text(tmp_path: Path):
  page = "\n".join(LINES[:100]) + "\n"
  (tmp_path / "plain.txt").write_text(page * (1 << 14))  # 80 MB
  line = json.dumps({"text": page}) + "\n"
  (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress((line * (1 << 10)).encode(), 1) * (1 << 4))
  (tmp_path / "small.jsonl.gz").write_bytes(gzip.compress(b'{"text": "small"}\n' * 1000))
  names = ["small.jsonl.gz", "plain.txt", "rows.jsonl.gz"]
  before, *after = map(int, run_script("memory", str(tmp_path), *names).split())
  assert max(after) - before < 48 << 20


@pytest.mark.full
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_text_is_prepared_without_jax(tokenizer: str, tmp_path: Path):
  """Its import takes as long as some megabytes, and 140 MB of memory."""
  code = f"""
import sys
import data
from configs import base
config = base.get_config("tiny", "single")
config.data.update(path={str(write_plain(tmp_path / "corpus"))!r}, cache_dir={str(tmp_path)!r}, tokenizer={tokenizer!r})
config.model.vocab_size = 300
print(data.load(config).parts[0].fingerprint)
print({{"jax", "flax", "tensorstore"}} & sys.modules.keys())
"""
  done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
  fingerprint, imported = done.stdout.split()
  assert imported == "set()", done.stderr
  fields = {"data__path": str(tmp_path / "corpus"), "data__cache_dir": str(tmp_path), "model__vocab_size": 300}
  assert text.load(config(**fields, data__tokenizer=tokenizer)).parts[0].fingerprint == fingerprint


if __name__ == "__main__":
  if sys.argv[1] == "kill":
    for name, value in SMALL.items():
      setattr(prepare, name, value)
    cutting.PIECE = 500
    for log, fields in json.loads(sys.argv[2]).items():
      prepare_with_kills(fields, Path(log))
  else:
    for name in sys.argv[3:]:
      text.load(config(data__path=f"{sys.argv[2]}/{name}", data__cache_dir=f"{sys.argv[2]}/cache"))
      print(peak_bytes())
