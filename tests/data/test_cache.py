"""Prepared folders: prepared once, by one process, and never taken for whole when they are not."""

import errno
import json
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import config, one_sentence
from PIL import Image

import data
from data.cache import prepared
from data.remote import brought
from errors import ConfigError, Unavailable
from runtime.storage.bucket import Folder


def slow_write(folder: Path) -> None:
  """Writes a file, and a mark beside the cache each time it is called."""
  with (folder.parent.parent / "calls").open("a") as calls:
    calls.write("x")
  (folder / "part").write_text("half")
  time.sleep(0.5)
  (folder / "part").write_text("whole")


def prepare(root: str) -> None:
  assert (prepared(root, "text", "key", slow_write) / "part").read_text() == "whole"


def test_one_of_several_processes_prepares_and_the_others_wait(tmp_path: Path):
  context = multiprocessing.get_context("fork")
  several = [context.Process(target=prepare, args=(str(tmp_path / "cache"),)) for _ in range(4)]
  for process in several:
    process.start()
  for process in several:
    process.join(30)
  assert [process.exitcode for process in several] == [0] * 4
  assert (tmp_path / "calls").read_text() == "x"


_opened: list[str] | None = None  # the files that are opened now, if somebody asks


def _note(event: str, values: tuple[Any, ...]) -> None:
  if event == "open" and _opened is not None:
    _opened.append(str(values[0]))


sys.addaudithook(_note)  # stays for ever


@pytest.mark.parametrize("kind", ["txt", "jsonl", "npy", "bin", "png"])
def test_a_second_start_opens_no_file_of_the_data(kind: str, tmp_path: Path):
  """It looks at sizes and times only, and takes the rest from the cache."""
  global _opened
  for i in range(40):
    file = tmp_path / "data" / ("cats", "dogs")[i % 2] / f"{i}.{kind}"
    file.parent.mkdir(parents=True, exist_ok=True)
    if kind == "png":
      Image.new("RGB", (8, 8), (i, 0, 0)).save(file)
    elif kind == "npy":
      np.save(file, np.arange(99, dtype=np.uint16))
    elif kind == "bin":
      np.arange(99, dtype=np.uint16).tofile(file)
    else:
      file.write_text(json.dumps({"text": f"{i} some words\n" * 9}) if kind == "jsonl" else f"{i} some words\n" * 9)
  c = config(
    data__path=str(tmp_path / "data"),
    data__cache_dir=str(tmp_path / "cache"),
    data__name="images" if kind == "png" else "text",
  )
  if kind == "png":
    c.model.inputs, c.model.objective = "images", "class"
  found = []
  for _ in range(2):
    _opened = []
    try:
      data.load(c)
    finally:
      opened, _opened = _opened, None
    found.append(sum(path.startswith(str(tmp_path / "data")) for path in opened))
  assert found[0] >= 40
  assert found[1] == 0


def test_a_killed_preparation_is_not_taken_for_whole_and_goes_on(tmp_path: Path):
  root = str(tmp_path / "cache")
  process = multiprocessing.get_context("fork").Process(target=prepare, args=(root,))
  process.start()
  unfinished = lambda: list((tmp_path / "cache").glob(".text-*/part"))
  until = time.monotonic() + 30
  while not unfinished() and time.monotonic() < until:
    time.sleep(0.01)
  process.kill()
  process.join()
  found: list[str] = []

  def go_on(folder: Path) -> None:
    found.append((folder / "part").read_text())
    (folder / "part").write_text("whole")

  assert (prepared(root, "text", "key", go_on) / "part").read_text() == "whole"
  assert found == ["half"]
  assert [path.suffix for path in (tmp_path / "cache").glob(".*")] == [".json"]  # what data/sealed.py writes down


def test_a_full_disk_is_one_sentence_and_the_next_run_goes_on(tmp_path: Path):
  def fill(folder: Path) -> None:
    (folder / "part").write_text("half")
    raise OSError(errno.ENOSPC, "No space left on device", str(folder / "part"))

  with one_sentence("data.cache_dir=", "is full", "another folder", kind=Unavailable):
    prepared(str(tmp_path), "text", "key", fill)
  assert not list(tmp_path.glob("text-*"))
  folder = prepared(str(tmp_path), "text", "key", lambda to: (to / "more").write_text("x"))
  assert (folder / "part").read_text() == "half"


def test_an_object_that_is_removed_while_it_is_read_does_not_blame_the_disk(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
  def download(folder: Folder, file: Path) -> None:
    raise FileNotFoundError(f"{folder} does not exist")

  monkeypatch.setattr(Folder, "names", lambda folder: ["a.txt"])
  monkeypatch.setattr(Folder, "generations", lambda folder, names: [b"1"])
  monkeypatch.setattr(Folder, "download", download)
  with one_sentence("data.path='gs://bucket/texts' changes", "texts/a.txt does not exist; run again", kind=Unavailable):
    brought("gs://bucket/texts", "data.path", str(tmp_path))


def test_bad_input_leaves_nothing(tmp_path: Path):
  def refuse(folder: Path) -> None:
    (folder / "part").touch()
    raise ConfigError("data.path='x' holds no text; use another")

  with one_sentence("data.path='x'"):
    prepared(str(tmp_path), "text", "key", refuse)
  assert not [file for file in tmp_path.iterdir() if not file.name.endswith(".lock")]


def test_an_error_that_is_not_about_the_cache_is_not_blamed_on_it(tmp_path: Path):
  with pytest.raises(PermissionError):
    prepared(str(tmp_path / "cache"), "text", "key", lambda to: _denied(tmp_path / "elsewhere"))


def _denied(path: Path) -> None:
  raise PermissionError(errno.EACCES, "Permission denied", str(path))
