"""ArrayFile reads the numbers that a file holds, whether it maps the file or not, and limits how much is mapped."""

import gc
from pathlib import Path

import numpy as np
import pytest
from helpers import one_sentence

from data import files
from data.files import ArrayFile, array_file


@pytest.fixture
def numbers(tmp_path: Path) -> np.ndarray:
  """Some numbers, also in a file `x` after a header of 3 bytes."""
  x = np.arange(1000, dtype="<u2") * 7
  (tmp_path / "x").write_bytes(b"abc" + x.tobytes())
  return x


@pytest.mark.parametrize("mapped", [1 << 20, 0])
def test_reads_are_the_numbers_of_the_file(
  mapped: int, numbers: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
  monkeypatch.setattr(files, "MAPPED", mapped)
  monkeypatch.setattr(files, "_room", files._Room())
  file = array_file(tmp_path / "x", "<u2", offset=3)
  assert len(file) == 1000
  starts = np.array([990, 0, 3, 3])
  np.testing.assert_array_equal(file.read(starts, 10), numbers[starts[:, None] + np.arange(10)])
  np.testing.assert_array_equal(file.slice(5, 1000), numbers[5:])
  assert file.read(np.array([], int), 4).shape == (0, 4)
  assert file.slice(7, 7).shape == (0,)
  assert (file._opened[1] is not None) == bool(mapped)


def test_only_so_many_bytes_are_mapped_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(files, "MAPPED", 2500)
  monkeypatch.setattr(files, "_room", files._Room())
  for name in "abc":
    (tmp_path / name).write_bytes(bytes(1000))
  some = {name: array_file(tmp_path / name, np.uint8) for name in "abc"}
  for file in some.values():
    file.slice(0, 1)
  assert [file._opened[1] is not None for file in some.values()] == [True, True, False]
  del some, file
  gc.collect()
  again = array_file(tmp_path / "c", np.uint8)
  again.slice(0, 1)
  assert again._opened[1] is not None


@pytest.mark.parametrize("mapped", [1 << 20, 0])
def test_a_file_that_becomes_shorter_is_an_error_and_not_a_crash(
  mapped: int, numbers: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
  monkeypatch.setattr(files, "MAPPED", mapped)
  monkeypatch.setattr(files, "_room", files._Room())
  file: ArrayFile = array_file(tmp_path / "x", "<u2", offset=3)
  file.slice(0, 10)
  (tmp_path / "x").write_bytes(b"abc")
  with one_sentence("has become shorter while it was read"):
    file.slice(0, 10)
