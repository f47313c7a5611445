"""`python -m tools.benchmark throughput --check`: compares a new measurement with a record."""

import copy
import json
from pathlib import Path

import pytest
from machines import Machine, measured

from lab.benchmarks import comparison, sections, throughput


def test_the_check_reports_which_rows_are_reproduced(tmp_path: Path, capsys: pytest.CaptureFixture):
  file = tmp_path / "mine.json"
  # A machine's steps are 0.9, 1.0 and 1.1 times its median. The recorded ratio is 1; 0.95 to 1.05 is reproduced.
  file.write_text(json.dumps(measured("--rows=fsdp,two_d,peer", "--devices=8")))
  options = lambda: throughput.parse(["--rounds=2"])[0]
  assert throughput.again(file, options(), Machine({"fsdp/8": 1.05})) == 0
  lines = capsys.readouterr().out.splitlines()
  assert any(line.startswith("fsdp/8 ") and " reproduced: 0.952 " in line and "0.95 of the recorded" in line
             for line in lines)  # fmt: skip
  assert throughput.again(file, options(), Machine({"fsdp/8": 1.2})) == 1
  lines = [line for line in capsys.readouterr().out.splitlines() if "reproduced" in line]
  assert [line.split()[0] for line in lines if "NOT reproduced" in line] == ["fsdp/8"]
  peers = ["peer/eager", "peer/sdpa", "peer/sdpa-compiled"]
  assert [line.split()[0] for line in lines] == ["single/1", "fsdp/8", "two_d/8", *peers]
  assert throughput.again(file, throughput.parse(["--rows=two_d"])[0], Machine({"fsdp/8": 1.2})) == 0


def test_a_record_without_a_row_that_came_later_is_checked_without_it(tmp_path: Path, capsys: pytest.CaptureFixture):
  file, old = tmp_path / "mine.json", measured("--rows=fsdp,peer", "--devices=8")
  del old["cells"]["peer/sdpa-compiled"]
  file.write_text(json.dumps(old))
  assert "compiled" not in sections.summary("mine", old)
  capsys.readouterr()
  assert throughput.again(file, throughput.parse(["--rounds=2"])[0], Machine()) == 0
  assert "peer/sdpa-compiled" not in capsys.readouterr().out


def test_a_check_that_compares_nothing_fails(tmp_path: Path, capsys: pytest.CaptureFixture):
  file, old = tmp_path / "mine.json", measured("--rows=fsdp", "--devices=8")
  file.write_text(json.dumps(old))
  assert throughput.again(file, throughput.parse(["--devices=4"])[0], Machine()) == 1
  assert "nothing was compared" in capsys.readouterr().out
  old["cells"]["gone/8"] = old["cells"]["fsdp/8"]
  file.write_text(json.dumps(old))
  assert throughput.again(file, throughput.parse([])[0], Machine()) == 1
  assert "gone/8               NOT reproduced: this row no longer exists" in capsys.readouterr().out


def test_the_check_finds_memory_that_differs_from_the_record(tmp_path: Path):
  old = measured("--rows=fsdp", "--devices=8")
  new = copy.deepcopy(old)
  new["cells"]["fsdp/8"]["bytes"]["total"] *= 1.5
  lines, good = comparison.compare(old, new)
  assert not good
  assert "NOT reproduced" in lines[1]
  assert "memory 18.8 MB, recorded 12.5 MB" in lines[1]
  assert comparison.compare(old, new | {"versions": {"jax": "1"}})[1]  # another compiler may plan other memory
  elsewhere = comparison.compare(old, old | {"machine": "another"})[0]
  assert "of the recorded speed" not in elsewhere[1]
  assert "speeds are not compared" in elsewhere[-1]


def test_a_peer_or_a_record_without_figures_is_not_a_failure():
  old = measured("--rows=fsdp,peer", "--devices=8")
  without = copy.deepcopy(old)
  without["cells"]["peer/eager"] |= {"error": "torch is not installed", "rounds": []}
  lines, good = comparison.compare(old, without)
  assert good
  assert "not compared: torch is not installed" in lines[2]
  without["cells"]["fsdp/8"] |= {"error": "out of memory", "rounds": []}
  lines, good = comparison.compare(old, without)
  assert not good
  assert "NOT reproduced: out of memory" in lines[1]
  assert "not compared: the record has no figures" in comparison.compare(without, old)[0][1]
