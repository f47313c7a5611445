"""`python -m tools.benchmark throughput --check`: compares a new measurement with a record."""

import copy
import itertools
import json
from pathlib import Path

import pytest
from machines import Machine, measured

from configs import base
from lab.benchmarks import cells, comparison, figures, rounds, sections, throughput


def test_the_check_reports_which_rows_are_reproduced(tmp_path: Path, capsys: pytest.CaptureFixture):
  file = tmp_path / "mine.json"
  # A machine's steps are 0.9, 1.0 and 1.1 times its median. The recorded ratio is 1; 0.95 to 1.05 is reproduced.
  file.write_text(json.dumps(measured("--rows=fsdp,two_d,peer", "--devices=8")))
  options = lambda: throughput.parse(["--rounds=2"])[0]
  assert throughput.again(file, options(), Machine({"fsdp/8": 1.05})) == 0
  lines = capsys.readouterr().out.splitlines()
  assert any(line.startswith("fsdp/8 ") and " reproduced: 0.952 (0.952–0.952) " in line for line in lines)
  assert any(line.startswith("fsdp/8 ") and "0.95 of the recorded" in line for line in lines)
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


def varying(record: figures.Record, *factors: float) -> figures.Record:
  """The record with runs of the single device that take so many times longer, in turn. The other rows do as well."""
  made = copy.deepcopy(record)
  for cell in made["cells"].values():
    for turn, factor in zip(cell["rounds"], itertools.cycle(factors), strict=False):
      if "seconds" in turn:
        turn["seconds"] = [factor * seconds for seconds in turn["seconds"]]
  return made


@pytest.mark.parametrize(
  "factors, slower, verdict",
  [
    ((1.0, 1.09), 1.0, True),
    ((1.0, 1.09), 1.3, False),
    ((1.0, 1.11), 1.0, None),
    ((1.0, 1.11), 1.3, None),  # nor is a row said to be wrong
    ((1.0, 2.0), 1.0, None),
  ],
)
def test_there_is_no_verdict_where_the_single_device_itself_varies(
  factors: tuple[float, ...], slower: float, verdict: bool | None
):
  """Up to a tenth. The ratios of a round are as recorded all the same, because both are slow together."""
  old = measured("--rows=fsdp", "--devices=8", "--rounds=4")
  new = varying(measured("--rows=fsdp", "--devices=8", "--rounds=4", run=Machine({"fsdp/8": slower})), *factors)
  lines, good = comparison.compare(old, new)
  assert good is verdict
  assert figures.spread(new) == pytest.approx(max(factors) - 1)
  text = "\n".join(lines)
  assert f"spread of single {max(factors) - 1:.0%}" in text
  assert ("no verdict on speed: the single device varies by" in text) is (verdict is None)
  assert ("fsdp/8               no verdict: " in text) is (verdict is None)
  assert ("NOT reproduced" in text) is (verdict is False)


def test_other_memory_is_found_where_speed_cannot_be_judged():
  old = measured("--rows=fsdp", "--devices=8")
  new = varying(old, 1.0, 2.0)
  new["cells"]["fsdp/8"]["bytes"]["total"] *= 1.5
  assert comparison.compare(old, new)[1] is False


def test_a_single_device_that_ran_once_allows_no_verdict():
  old = measured("--rows=fsdp", "--devices=8", "--rounds=1")
  lines, good = comparison.compare(old, old)
  assert good is None
  assert "ran only once" in lines[-1]


def test_the_check_says_the_load(capsys: pytest.CaptureFixture, tmp_path: Path):
  old, file = measured("--rows=fsdp", "--devices=8"), tmp_path / "mine.json"
  assert "now load 1.5, spread of single 0%; recorded load unknown, spread" in "\n".join(
    comparison.compare(old | {"load": None}, old | {"load": 1.54})[0]
  )
  file.write_text(json.dumps(old))

  class Varying(Machine):
    def __call__(self, command, spec):
      factor = 1.0 + sum(name == "single/1" for _, name in self.asked) % 2
      result = super().__call__(command, spec)
      return result | {"seconds": [factor * one for one in result["seconds"]]} if "seconds" in result else result

  assert throughput.again(file, throughput.parse(["--rounds=4"])[0], Varying()) == throughput.UNSTEADY
  assert "no verdict on speed" in capsys.readouterr().out


class Slow(Machine):
  """A machine whose processes take 20 s each, and none of them lasts until after `deadline`."""

  now, deadline = 0.0, 0.0

  def __call__(self, command, spec):
    self.now, left = min(self.now + 20, self.deadline), self.deadline - self.now
    return super().__call__(command, spec) if left >= 20 else {"error": rounds.NO_TIME}


@pytest.mark.parametrize("seconds, rows, ran", [(10_000, 13, 5), (1500, 13, 4), (600, 13, 1), (300, 5, 1)])
def test_a_measurement_ends_in_time(tmp_path: Path, seconds: int, rows: int, ran: int):
  """Half of the time is for compiling. A round that would not end in time is not begun."""
  asked = base.get_config("throughput", "single")
  chosen = cells.select(asked, throughput.cells.rows(), (8,), "python", "cpu", "float32")
  chosen = [cell for cell in chosen if cell.row not in ("peer", "expert", "expert_fsdp")]
  machine, said = Slow(), []
  machine.deadline = seconds
  found = rounds.measure(chosen, 5, 3, tmp_path, said.append, machine, seconds, lambda: machine.now)
  assert sum("error" not in found[cell.name] for cell in chosen if cell.compiled) == rows
  assert len({turn["turn"] for turn in found["single/1"]["rounds"]}) == ran
  assert machine.now <= seconds
  left_out = [cell for name, cell in found.items() if "error" in cell and name != cells.PEAKS]
  assert {cell["error"] for cell in left_out} <= {rounds.NO_TIME}
  old = measured("--devices=8", "--rounds=5")
  lines, good = comparison.compare(old, old | {"cells": found})
  assert good is (None if seconds == 300 else True)  # in 300 s, the single device runs only once
  assert sum("not compared: no time was left for it" in line for line in lines) == len(left_out)
