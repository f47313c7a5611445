"""The measurement of very long runs: each part runs, and the table shows medians, aims and an earlier version."""

import types
from pathlib import Path
from typing import Any

import pytest
from helpers import one_sentence

from lab.benchmarks import growth, growth_worker


def measured_here(root: Path, spec: dict[str, Any]) -> dict[str, Any]:
  return growth_worker.TASKS[spec["task"]](spec)


def test_every_part_runs_and_is_in_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(growth, "run", measured_here)
  monkeypatch.setattr(growth_worker, "sys", types.SimpleNamespace(addaudithook=lambda note: None))
  options = growth.parse(["--scale=0.001", "--rounds=1", f"--folder={tmp_path}", f"--before={tmp_path}"])
  record = growth.measure(options, print)
  assert list(tmp_path.iterdir()) == []
  assert record["parts"].keys() == growth.PARTS.keys()
  for found in record["parts"].values():
    assert found["before"][0]["seconds"] > 0
    assert found["now"][0]["seconds"] > 0
  record["parts"]["page"] = {"now": [{"seconds": x, "page_bytes": 1e6 * x} for x in (1.0, 3.0, 2.0)]}
  table = growth.tables(record)["growth"]
  assert "| page of 100 evaluations | – | 2 s, 2.00 MB written | 2.00 MB written |" in table
  assert "Medians of 3 rounds" in table
  assert str(tmp_path) not in table


def test_bad_input_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  for arguments, parts in (
    (["--scale=2"], ["scale=2", "at most 1"]),
    (["--rounds=0"], ["rounds=0"]),
    (["--parts=page,nothing"], ["parts='nothing'", "restart, picture"]),
  ):
    with one_sentence(*parts):
      growth.parse(arguments)
  ended = types.SimpleNamespace(returncode=1, stdout="", stderr="no such module")
  monkeypatch.setattr(growth.subprocess, "run", lambda *_, **__: ended)
  with one_sentence("the task 'page'", str(tmp_path), "no such module", "nothing was recorded"):
    growth.run(tmp_path, {"task": "page"})
