"""The throughput table: its cells, its figures, its page and its check.

Here every process that would measure is given, and answers at once; test_throughput_command.py measures two cells.
"""

import copy
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers import PARITY
from machines import FOUND, GPUS, Machine, measured

import strategies
from benchmarks import cells, comparison, figures, rounds, tables, throughput
from configs import base


def test_the_page_and_the_plots_show_the_records():
  assert tables.stale() == [], "python -m benchmarks.throughput --tables"


def test_all_rows_of_a_record_did_the_same_work():
  for name, record in tables.read().items():
    if record["hardware"]["simulated"]:  # in float32
      assert figures.loss_spread(record) < PARITY, name


def test_a_page_or_a_plot_of_another_record_is_found_out(tmp_path: Path):
  results, page, folder = tmp_path / "results", tmp_path / "README.md", tmp_path / "plots"
  results.mkdir()
  shutil.copy(tables.PAGE, page)
  made = measured("--rows=fsdp,peer,input", "--devices=2,8")
  file = results / "mine.json"
  file.write_text(json.dumps(made))
  (results / "other.json").write_text(json.dumps({"kind": "something else"}))
  tables.write(results, page, folder)
  assert tables.stale(results, page, folder) == []
  made["cells"]["fsdp/8"]["rounds"][0]["seconds"][0] = 7.0
  file.write_text(json.dumps(made))
  assert tables.stale(results, page, folder) == ["README.md", "mine-memory.png", "mine-speed.png"]
  file.unlink()
  assert tables.stale(results, page, folder) == ["README.md", "mine-memory.png", "mine-speed.png"]
  tables.write(results, page, folder)
  assert tables.stale(results, page, folder) == []


def test_the_page_says_that_simulated_devices_show_overhead():
  made = measured("--rows=fsdp", "--devices=8", run=Machine({"fsdp/8": 1.25}))
  text = tables.section("mine", made)
  assert tables.parts({"mine": made})["records"] == text
  assert "Overhead on shared cores, not scaling." in text
  row = next(line for line in text.splitlines() if line.startswith("| fsdp "))
  # 64 · 128 tokens in 1.25 s, of 400 GFLOP/s; the step's range is that of all steps, the ratio's that of rounds.
  share = made["flops"] / 1.25 / 4e11
  assert row == (
    f"| fsdp | 8 | data=8 | 6,554 | 0.80 (0.80–0.80) | 1,250 (1,125–1,375) ms | 12.5 MB | – | – | {share:.0%} | 3.0 s |"
  )
  assert "MFU |" not in text


def test_the_page_says_which_aims_are_missed():
  """On the most devices, as shown: 0.846 is shown as 0.85, and no miss."""
  seconds = {"fsdp/8": 1.07, "two_d/8": 1.182, "three_d/8": 2.0, "three_d/2": 9.0, "single/None": 0.8}
  made = measured("--rows=fsdp,two_d,three_d,peer", "--devices=2,8", run=Machine(seconds))
  assert {aim.row: round(aim.got, 2) for aim in figures.aims(made) if not aim.met} == {
    "fsdp": 0.93, "three_d": 0.5, "peer": 0.8,
  }  # fmt: skip
  assert "Missed: fsdp 0.93 of 0.95, three_d 0.50 of 0.85, peer 0.80 of 1.00." in tables.section("mine", made)
  assert "All of those measured are met." in tables.section("mine", measured("--rows=two_d", "--devices=8"))
  made["cells"]["fsdp/8"] |= {"error": "out of memory", "rounds": []}
  made["cells"]["peer/eager"] |= {"error": "torch is not installed", "rounds": []}
  made["cells"]["peer/sdpa"] |= {"error": "torch is not installed", "rounds": []}
  assert "Missed: three_d 0.50 of 0.85. Not measured: fsdp, peer." in tables.section("mine", made)
  assert "aims" not in tables.section("mine", measured("--rows=fsdp", "--devices=1"))
  assert "aims" not in tables.section("mine", measured("--rows=fsdp", run=Machine(found=GPUS), preset="throughput_gpu"))


def test_a_share_of_the_makers_figure_is_called_mfu():
  known = GPUS | {"hardware": GPUS["hardware"] | {"peak_flops": 989e12}}
  made = measured("--rows=fsdp", run=Machine(found=known), preset="throughput_gpu")
  assert [row.devices for row in figures.rows(made)] == [1, 1, 2, 4]
  text = tables.section("mine", made)
  assert "| MFU |" in text
  assert "not scaling" not in text
  assert figures.row(made, "fsdp/4").flops_share == pytest.approx(made["flops"] / 989e12 / 4)


def test_every_strategy_has_a_row_at_every_number_of_devices():
  asked = cells.plan(base.get_config("lm", "single"), cells.rows(), cells.DEVICES, "python", "cpu", "float32")
  names = [cell.name for cell in asked]
  expected = {f"{name}/{n}" for name in strategies.names() for n in (1, 2, 4, 8)} - {f"single/{n}" for n in (2, 4, 8)}
  assert set(names) == expected | {"input/text", "input/cifar10", "peer/eager", "peer/sdpa", "peaks"}
  assert names[0] == "single/1"
  assert {cell.spec["config"]["data"]["name"] for cell in asked if cell.compiled} == {"synthetic"}


def test_the_cells_take_turns_and_the_reference_comes_often(tmp_path: Path):
  run = Machine()
  asked = cells.plan(base.get_config("throughput", "single"), cells.rows(), cells.DEVICES, "python", "cpu", "float32")
  found = rounds.measure(asked, 2, 1, tmp_path, lambda _: None, run)
  in_rounds = [name for task, name in run.asked if task != "compile"][rounds.BEFORE :]
  assert in_rounds.count("single/1") == 2 * -(-(len(asked) - 1) // rounds.BETWEEN)
  assert all(in_rounds[at] == "single/1" for at in range(0, len(asked), rounds.BETWEEN + 1))
  orders = [[n for n in found if found[n]["rounds"][turn]["place"] == 1] for turn in (0, 1)]
  assert orders[0] != orders[1]
  caches = [cell.spec for cell in asked if cell.compiled]
  assert len(
    {rounds._cached(cell, tmp_path)["config"]["compilation_cache_dir"] for cell in asked if cell.compiled}
  ) == (len(caches))


class Unsteady(Machine):
  """Slower by another factor in each round; and one in five runs of the reference is in a bad moment."""

  def __call__(self, command: Sequence[str], spec: dict[str, Any]) -> dict[str, Any]:
    result = super().__call__(command, spec)
    runs = self.asked.count(("steps", "single/1")) - 1
    if spec.get("task") == "steps":
      moment = 3.0 if self.asked[-1][1] == "single/1" and runs % 5 == 2 else 1.0
      result["seconds"] = [(1, 2, 3, 5, 7)[runs // 5] * moment * s for s in result["seconds"]]
    return result


def test_a_cell_is_compared_with_the_reference_of_its_round():
  """A machine that is slow for a round slows both, and one that is slow for a moment neither."""
  made = measured("--rows=fsdp,two_d,hsdp,three_d,tensor_parallel,pipeline,pmap_ddp,data_parallel", run=Unsteady())
  assert len(made["cells"]["single/1"]["rounds"]) == 5 * 5
  row = figures.row(made, "fsdp/8")
  assert row.seconds.high > 7 * row.seconds.low
  for figure in (row.relative.median, row.relative.low, row.relative.high):
    assert figure == pytest.approx(1.0)


def test_rounds_in_which_the_reference_failed_are_not_compared():
  made = measured("--rows=fsdp", "--devices=8", run=Machine({"fsdp/8": 1.25}))
  reference = made["cells"]["single/1"]
  reference["rounds"], reference["error"] = reference["rounds"][:2], "out of memory"
  made["cells"]["fsdp/8"]["rounds"][3]["seconds"] = [9.0, 9.0, 9.0]
  assert [row.error for row in figures.rows(made)] == ["out of memory", None]
  assert figures.row(made, "fsdp/8").relative == figures.Figure(0.8, 0.8, 0.8)


def test_a_loss_that_is_no_number_is_a_difference():
  made = measured("--rows=fsdp,two_d", "--devices=8")
  assert figures.loss_spread(made) == 0
  made["cells"]["fsdp/8"]["rounds"][1]["loss"] = math.nan
  assert not figures.loss_spread(made) < PARITY


def test_a_run_that_is_stopped_keeps_its_whole_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  class Stopped(Machine):
    def __call__(self, command: Sequence[str], spec: dict[str, Any]) -> dict[str, Any]:
      if spec.get("devices") == 8 and spec["task"] == "steps" and self.asked.count(("steps", "fsdp/8")) == self.at:
        raise KeyboardInterrupt
      return super().__call__(command, spec)

  Stopped.at = 2  # in the third round
  made = measured("--rows=fsdp,input", "--devices=8", "--rounds=5", run=Stopped())
  assert made["rounds"] == 2
  assert {turn["turn"] for cell in made["cells"].values() for turn in cell["rounds"]} == {0, 1}
  assert len(made["cells"]["fsdp/8"]["rounds"]) == 2
  Stopped.at = 0
  with pytest.raises(KeyboardInterrupt):
    measured("--rows=fsdp", "--devices=8", run=Stopped())
  monkeypatch.setattr(throughput, "measure", lambda *_: made)
  monkeypatch.setattr(throughput, "ROOT", tmp_path)
  options, _ = throughput.parse([])
  throughput.keep(base.get_config("throughput", "single"), "throughput", options, FOUND)  # into no result
  assert [file.name for file in (tmp_path / "runs").iterdir()] == ["2-cores-of-made-up-throughput.json"]


def test_a_row_that_fails_says_why_and_the_others_go_on():
  class Failing(Machine):
    def __call__(self, command: Sequence[str], spec: dict[str, Any]) -> dict[str, Any]:
      name = super().__call__(command, spec)
      failed = {"compile": "two_d", "steps": "hsdp"}.get(spec.get("task", ""))
      return {"error": "out of memory"} if failed and spec["config"]["strategy"] == failed else name

  run = Failing()
  made = measured("--rows=two_d,hsdp,fsdp", "--devices=8", run=run)
  assert [row.error for row in figures.rows(made)] == [None, None, "out of memory", "out of memory"]
  assert run.asked.count(("steps", "two_d/8")) == 0
  assert run.asked.count(("steps", "hsdp/8")) == 1
  assert "not measured: out of memory" in tables.section("mine", made)


def test_the_check_says_which_rows_are_reproduced(tmp_path: Path, capsys: pytest.CaptureFixture):
  file = tmp_path / "mine.json"
  # Steps of 0.9, 1.0 and 1.1 times the median: from 0.91 to 1.11 of the single device is within the spread.
  file.write_text(json.dumps(measured("--rows=fsdp,two_d,input,peer", "--devices=8")))
  options = lambda: throughput.parse(["--rounds=2"])[0]
  assert throughput.again(file, options(), Machine({"fsdp/8": 1.05})) == 0
  lines = capsys.readouterr().out.splitlines()
  assert any(line.startswith("fsdp/8 ") and " reproduced: 0.952 " in line and "0.95 of the recorded" in line
             for line in lines)  # fmt: skip
  assert throughput.again(file, options(), Machine({"fsdp/8": 1.2})) == 1
  lines = [line for line in capsys.readouterr().out.splitlines() if "reproduced" in line]
  assert [line.split()[0] for line in lines if "NOT reproduced" in line] == ["fsdp/8"]
  assert [line.split()[0] for line in lines] == ["single/1", "fsdp/8", "two_d/8", "peer/eager", "peer/sdpa"]
  assert throughput.again(file, throughput.parse(["--rows=two_d"])[0], Machine({"fsdp/8": 1.2})) == 0


def test_a_check_of_nothing_is_no_success(tmp_path: Path, capsys: pytest.CaptureFixture):
  file, old = tmp_path / "mine.json", measured("--rows=fsdp", "--devices=8")
  file.write_text(json.dumps(old))
  assert throughput.again(file, throughput.parse(["--devices=4"])[0], Machine()) == 1
  assert "nothing was compared" in capsys.readouterr().out
  old["cells"]["gone/8"] = old["cells"]["fsdp/8"]
  file.write_text(json.dumps(old))
  assert throughput.again(file, throughput.parse([])[0], Machine()) == 1
  assert "gone/8               NOT reproduced: there is no such row any more" in capsys.readouterr().out


def test_the_check_sees_memory_that_is_not_the_records(tmp_path: Path):
  old = measured("--rows=fsdp", "--devices=8")
  new = copy.deepcopy(old)
  new["cells"]["fsdp/8"]["bytes"]["total"] *= 1.5
  lines, good = comparison.compare(old, new)
  assert not good
  assert "NOT reproduced" in lines[1]
  assert "memory 18.8 MB, recorded 12.5 MB" in lines[1]
  assert comparison.compare(old, new | {"versions": {"jax": "1"}})[1]  # another compiler may plan otherwise
  elsewhere = comparison.compare(old, old | {"machine": "another"})[0]
  assert "of the recorded speed" not in elsewhere[1]
  assert "speeds are not compared" in elsewhere[-1]


def test_what_cannot_be_compared_is_no_failure():
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
