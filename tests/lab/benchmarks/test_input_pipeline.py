"""The table of the input pipeline: its cells and figures, and that the peers read the records that ours reads."""

import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import config, one_sentence

from data.files import array_file
from data.images.store import Images
from data.text.tokens import Windows
from lab.benchmarks import input_pipeline, input_worker, peer_input

RECORDS = {
  "count": 9, "batch_size": 16, "fields": {}, "shapes": {"tokens": [16, 129]}, "sums": {"tokens": 7},
}  # fmt: skip
# Batches in a second of each round; each cell takes half a second.
SPEEDS = {
  "text/host": [200, 300, 400],
  "text/placed/8": [50, 60, 70],
  "text/torch/0": [100, 100, 400],
  "text/torch/2": [90, 90, 90],
  "text/grain_loader/0": [10, 10, 10],
  "text/grain_dataset/2": [100, 50, 100],
}


def made_up(**changed: Any) -> input_pipeline.Record:
  """A record with one case, in which most cells were not measured."""
  cells = input_pipeline.cells("text", RECORDS, 0.5, "python")
  found: dict[str, Any] = {cell.name: {"rounds": []} for cell in cells}
  for name, speeds in SPEEDS.items():
    found[name]["rounds"] = [{"turn": i, "place": 0, "batches": s // 2, "seconds": 0.5} for i, s in enumerate(speeds)]
  return {
    "command": "python -m tools.benchmark input_pipeline", "machine": "a machine", "versions": {"python": "3"},
    "date": "2030-01-31",
    "cases": {"text": {"batch_size": 16}}, "left_out": {}, "cells": found,
  } | changed  # fmt: skip


def test_the_table_shows_medians_and_ratios_within_rounds():
  """A peer's fastest cell counts: 0 workers for PyTorch. Its ratios are 2, 3 and 1; those of grain are 2, 6 and 4."""
  text = input_pipeline.tables(made_up())["input"]
  assert (
    "| text, 16 × 128 tokens | 300 (4,800) | 100 (1,600), DataLoader, 0 workers | 100 (1,600), MapDataset, 2 workers "
    "| 2.00 (1.00–3.00) | 4.00 (2.00–6.00) |"
  ) in text
  assert "| text, 16 × 128 tokens | – | – | – | 60 (960) |" in text
  assert "The aim is 2 times both. It is met." in text
  assert "Not measured" not in text


def test_the_table_shows_missed_aims_and_what_was_not_measured():
  made = made_up(left_out={"cifar10": "CIFAR-10 is not on this machine"})
  for turn in made["cells"]["text/host"]["rounds"]:
    turn["batches"] //= 2
  made["cells"]["text/grain_dataset/2"] = {"rounds": [], "error": "grain is not installed"}
  made["cells"]["text/grain_loader/0"] = {"rounds": []}
  text = input_pipeline.tables(made)["input"]
  assert "100 (1,600), DataLoader, 0 workers | – | 1.00 (0.50–1.50) | – |" in text
  assert "Missed: text, 16 × 128 tokens, PyTorch: 1.00." in text
  assert "Not measured: CIFAR-10, 64 images: CIFAR-10 is not on this machine" in text
  assert "Not measured: grain_dataset/2: grain is not installed" in text


class Faked:
  """Answers like the processes that measure. CIFAR-10 is missing, grain is not installed, and one cell is wrong."""

  def __init__(self) -> None:
    self.asked: list[dict[str, Any]] = []

  def __call__(self, command: Sequence[str], spec: dict[str, Any]) -> dict[str, Any]:
    if spec.get("task") == "records":
      images = spec["config"]["model"]["inputs"] == "images"
      return {"error": "CIFAR-10 is not on this machine"} if images else RECORDS
    self.asked.append(spec)
    if spec.get("peer", "").startswith("grain"):
      return {"error": "grain is not installed"}
    sums = {"sums": {"tokens": 8 if spec.get("workers") == 2 else 7}} if "peer" in spec else {}
    found = {"batches": 5, "seconds": 0.5, "shapes": {"tokens": [16, 129], "mask": [16]}} | sums
    return found | {"versions": {"python": "3.0", "torch": "2"} if "peer" in spec else {}}


def test_every_cell_is_measured_in_every_round():
  run, lines = Faked(), []
  options = input_pipeline.parse(["--rounds=2", "--seconds=0.5", "--peer-python=/my/python"])
  made = input_pipeline.measure(options, lines.append, run)
  assert list(made["cases"]) == ["text", "long"]
  assert made["left_out"] == {"cifar10": "CIFAR-10 is not on this machine"}
  assert [cell["rounds"] and len(cell["rounds"]) for cell in made["cells"].values()] == [
    2,
    2,
    2,
    2,
    2,
    2,
    *[[]] * 5,
  ] * 2
  assert made["cells"]["text/torch/2"]["error"].startswith("it made other batches: their sums are {'tokens': 8}")
  assert made["cells"]["long/grain_loader/0"]["error"] == "grain is not installed"
  assert sorted(s["config"]["batch_size"] for s in run.asked if s.get("task") == "host") == [16, 16, 64, 64]
  for name in ("text/host", "long/host"):
    first, second = made["cells"][name]["rounds"]
    assert first["place"] != second["place"]  # the cells take turns
  assert made["versions"]["torch"] == "2"
  assert made["versions"]["python"] != "3.0"
  assert "/my/python" not in json.dumps(made)
  assert "--rounds=2 --seconds=0.5" in made["command"]
  with one_sentence("no data can be measured", "no disk"):
    input_pipeline.measure(options, lines.append, lambda *_: {"error": "no disk"})


def test_a_peer_reads_the_records_that_ours_reads(tmp_path: Path):
  tokens, images = np.arange(100, dtype=np.uint16), np.arange(5 * 48, dtype=np.uint8)
  tokens.tofile(tmp_path / "tokens")
  images.tofile(tmp_path / "images")
  np.arange(5, dtype="<i4").tofile(tmp_path / "labels")
  for source in (
    Windows(array_file(tmp_path / "tokens", np.uint16, offset=6), 8),
    Images(array_file(tmp_path / "images", np.uint8), array_file(tmp_path / "labels", "<i4"), (4, 4, 3)),
  ):
    records = peer_input.Records(input_worker.fields_of(source), len(source))
    ours = source.read(np.arange(len(source)))
    assert len(records) == len(source) > 4
    for name, column in ours.items():
      theirs = np.stack([records[i][name] for i in range(len(records))])
      np.testing.assert_array_equal(theirs, column)
      assert theirs.dtype == column.dtype or not column.shape[1:]  # a peer collates labels as it likes
      assert not np.shares_memory(records[0][name], records[0][name])  # it copies, as ours does


def test_our_cells_run(tmp_path: Path):
  (tmp_path / "text.txt").write_bytes(bytes(range(1, 128)) * 100)
  asked = config("data_parallel", data__path=str(tmp_path / "text.txt"), data__cache_dir=str(tmp_path / "cache"))
  spec = {"config": asked.to_dict(), "seconds": 0.01, "devices": 8}
  records = input_worker.describe_records(spec)
  assert records["shapes"] == {"tokens": [16, 33]}
  assert records["sums"] == {"tokens": int(np.sum([i % 127 + 1 for n in range(8) for i in range(32 * n, 32 * n + 33)]))}
  for task in ("host", "placed"):
    found = input_worker.TASKS[task](spec)
    assert found["batches"] >= 1
    assert found["seconds"] >= 0.01
    assert input_pipeline.difference(records, found) is None


def test_a_missing_peer_is_reported_with_the_fix(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
  for peer, package in (("torch", "torch"), ("grain_loader", "grain"), ("grain_dataset", "grain")):
    monkeypatch.setitem(sys.modules, package, None)
    spec = {"peer": peer, "workers": 0, "fields": {}, "count": 8, "batch_size": 2, "seconds": 0.01}
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(spec)))
    peer_input.main()
    said = f"{package} is not installed; pip install '.[peer]', or name a Python with --peer-python"
    assert json.loads(capsys.readouterr().out) == {"error": said}


def test_bad_options_are_one_sentence():
  with one_sentence("seconds=0.0", "above 0"):
    input_pipeline.parse(["--seconds=0"])
