"""The table of the preparation: its text, its parts and its figures."""

import gzip
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers import one_sentence

from lab.benchmarks import preparation, preparation_worker


class Faked:
  """Answers like the processes that measure: 10 MB/s, and 300 MB of memory, of which 200 were there before."""

  def __init__(self) -> None:
    self.asked: list[tuple[str, dict[str, Any]]] = []

  def __call__(self, command: Sequence[str], spec: dict[str, Any]) -> dict[str, Any]:
    fields = spec["fields"]
    self.asked.append((spec["task"], fields))
    if spec["task"] == "load":
      text, cache = Path(fields["data.path"]), Path(fields["data.cache_dir"])
      first = not cache.exists()
      cache.mkdir(exist_ok=True)
      (cache / "tokens").write_bytes(bytes(2_000_000))
      self.content = gzip.decompress(text.read_bytes()) if text.suffix == ".gz" else text.read_bytes()
      seconds = len(self.content) / 1e7 if first else 0.25
      return {"seconds": seconds, "before_bytes": 200_000_000, "peak_bytes": 300_000_000, "examples": 9}
    if spec["task"] == "read":
      return {"seconds": 1.0, "before_bytes": 201_000_000, "after_bytes": 202_000_000}
    return {"step_seconds": [0.05, 0.1, 0.2], "read_seconds": [0.001, 0.0005, 0.0001]}


def test_the_table_shows_speed_memory_and_the_share_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  run = Faked()
  monkeypatch.setattr(preparation, "library", lambda: [("a.py", b"some text\n" * 10_000)])
  sizes = preparation.parse(["--size=3e6", "--bpe-size=2e6", "--gz-size=1e6"]).sizes
  made = preparation.measure(sizes, str(tmp_path), lambda _: None, run)
  assert list(tmp_path.iterdir()) == []
  assert [task for task, _ in run.asked] == ["load", "load", "read"] * 2 + ["load"] * 4 + ["step"]
  assert [f.get("data.tokenizer") for _, f in run.asked] == [None] * 6 + ["bpe"] * 2 + [None] * 3
  assert str(tmp_path) not in str(made)
  for name, size in sizes.items():
    assert size <= made["texts"][name]["bytes"] < size + 1e6
  text = preparation.tables(made)["preparation"]
  for label in ("bytes", "BPE", "bytes, from .txt.gz"):
    row = next(line for line in text.splitlines() if f" MB, {label} |" in line)
    seconds = float(row.split(" | ")[1].removesuffix(" s"))
    assert seconds == pytest.approx(float(row.split()[1]) / 10, abs=0.06)
    assert row.endswith("s | 10.0 MB/s | 300.0 MB | 200.0 MB | 0.25 s | 2.0 MB |")
  assert f"| {made['texts']['size']['bytes'] / 1e6:.1f} MB | 201.0 MB | 202.0 MB | 0.50 ms |" in text
  assert "a training step takes 100.0 ms on one device. Reading its batch takes 0.50 ms, 0.50% of that" in text
  assert "`python -m tools.benchmark preparation --size=3e+06 --bpe-size=2e+06 --gz-size=1e+06`" in text


def test_the_text_is_repeated_and_numbered(tmp_path: Path):
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(preparation, "library", lambda: [("a.py", b"x\n"), ("b.py", b"y\n")])
    written = preparation.write_text(tmp_path / "text", 50)
  expected = "# copy 0 of a.py\nx\n# copy 0 of b.py\ny\n# copy 1 of a.py\nx\n"
  assert (tmp_path / "text").read_text() == expected
  assert written == len(expected)


def test_the_standard_library_is_there():
  names = [name for name, _ in preparation.library()]
  assert "json/decoder.py" in names
  assert not [name for name in names if "site-packages" in name]


def test_the_parts_run(tmp_path: Path):
  (tmp_path / "text.txt").write_bytes(bytes(range(1, 128)) * 200)
  fields = {"data.path": str(tmp_path / "text.txt"), "data.cache_dir": str(tmp_path / "cache")}
  found = preparation_worker.time_load({"fields": fields})
  assert 0 < found["before_bytes"] <= found["peak_bytes"]
  assert found["seconds"] > 0
  found = preparation_worker.read_batches({"fields": fields, "batches": 3})
  assert found["after_bytes"] > 0
  assert found["seconds"] > 0


def test_memory_is_that_of_this_process():
  before, size = preparation_worker.memory("VmRSS"), 1 << 26
  with mmap.mmap(-1, size) as held:
    held.write(b"x" * size)
    assert 0.9 * size < preparation_worker.memory("VmRSS") - before < 2.5 * size
  assert preparation_worker.memory("VmHWM") >= before + 0.9 * size


def test_bad_input_is_one_sentence(tmp_path: Path):
  for arguments, parts in (
    (["--bpe-size=3"], ["bpe_size=3 ", "at least 1e+06"]),
    (["--size=inf"], ["size=inf", "finite"]),
  ):
    with one_sentence(*parts):
      preparation.parse(arguments)
  with one_sentence(f"folder='{tmp_path}'", "1,000,000,000.0 GB", "are needed"):
    preparation.check_room(preparation.parse([f"--folder={tmp_path}", "--size=333333333333333333"]))
  with one_sentence("the task 'load' failed", "no disk"):
    preparation.measure(preparation.parse(["--size=1e6"]).sizes, None, lambda _: None, lambda *_: {"error": "no disk"})
