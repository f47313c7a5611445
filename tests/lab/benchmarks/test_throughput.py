"""The throughput table: its cells, figures and pages.

`machines.Machine` stands in for the processes that measure. test_throughput_command.py measures two cells for real,
and test_throughput_check.py tests `--check`.
"""

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
from configs import base
from lab.benchmarks import cells, figures, rounds, sections, tables, throughput


def test_the_pages_and_plots_show_the_records():
  assert tables.stale() == [], "run python -m tools.benchmark throughput --tables"


def test_all_rows_of_a_record_reach_the_same_loss():
  for name, record in tables.read().items():
    if record["hardware"]["simulated"]:  # these run in float32
      assert figures.loss_spread(record) < PARITY, name


def test_an_outdated_page_or_plot_is_found(tmp_path: Path):
  results, folder = tmp_path / "results", tmp_path / "plots"
  results.mkdir()
  pages = {tmp_path / page.name: places for page, places in tables.PAGES.items()}
  for page in tables.PAGES:
    shutil.copy(page, tmp_path)
  outdated = ["README.md", "tables.md", "throughput.md", "mine-memory.png", "mine-speed.png"]
  made = measured("--rows=fsdp,peer", "--devices=2,8")
  file = results / "mine.json"
  file.write_text(json.dumps(made))
  (results / "other.json").write_text(json.dumps({"kind": "something else"}))
  tables.write(results, pages, folder)
  assert tables.stale(results, pages, folder) == []
  for turn in made["cells"]["fsdp/8"]["rounds"]:
    turn["seconds"] = [7.0] * 3
  file.write_text(json.dumps(made))
  assert tables.stale(results, pages, folder) == outdated
  file.unlink()
  assert tables.stale(results, pages, folder) == outdated
  tables.write(results, pages, folder)
  assert tables.stale(results, pages, folder) == []


def row_of(name: str, text: str) -> list[str]:
  return [line for line in text.splitlines() if line.startswith(f"| {name} ")]


def test_the_pages_show_the_figures_and_that_simulated_devices_show_overhead():
  made = measured("--rows=fsdp", "--devices=8", run=Machine({"fsdp/8": 1.25}))
  summary, details = sections.summary("mine", made), sections.details("mine", made)
  made_parts = tables.parts({"mine": made})
  assert (made_parts["records"], made_parts["tables"]) == (summary, details)
  assert "Overhead on shared cores, not scaling." in summary
  assert "never how it scales" in made_parts["message"]
  # 64 · 128 tokens in 1.25 s, of 400 GFLOP/s. The step's range is over all steps, the ratio's over rounds.
  needed, palm = figures.flops(made)
  assert palm > needed > 0.9 * palm
  share = needed / 1.25 / 4e11
  assert row_of("fsdp", summary) == [
    "| fsdp | data=8 | 0.80 (0.80–0.80) | 0.95 | 6,554 | 1,250 (1,125–1,375) ms | 12.5 MB |"
  ]
  assert row_of("fsdp", details) == [
    f"| fsdp | 8 | data=8 | 0.80 (0.80–0.80) | 6,554 | 1,250 (1,125–1,375) ms | {share:.0%} |",
    f"| fsdp | 8 | 12.5 MB | – | 1,250 ms | {needed / 4e11 * 1e3:.0f} ms | 3.0 s |",
  ]
  assert "MFU" not in details


def test_the_message_groups_equal_ratios_and_compares_with_pytorch():
  seconds = {"two_d/8": 1.25, "hsdp/8": 1.25, "single/None": 0.8}
  made = measured("--rows=fsdp,two_d,hsdp,peer", run=Machine(seconds))
  assert tables.headline(made) == (
    "**2 cores of made up, 3.5 M parameters.** On 8 simulated devices, throughput relative to one device is 1.00 for "
    "fsdp, 0.80 for hsdp and two_d. On one device, Meshwright is 0.80 times as fast as "
    "transformers' Llama in PyTorch, not compiled. "
    "Missed aims: hsdp 0.80 of 0.85, two_d 0.80 of 0.85, transformers' Llama 0.80 of 1.00."
  )
  kinds = [
    "| eager attention, float32, eager ",
    "| sdpa attention, float32, eager ",
    "| sdpa attention, float32, compiled ",
  ]
  shown = sections.summary("mine", made)
  assert [shown.count(kind) for kind in kinds] == [1, 1, 1]
  assert tables.headline(measured("--rows=single")) == "**2 cores of made up, 3.5 M parameters.**"


def test_the_summary_shows_only_the_most_devices():
  made = measured("--rows=fsdp", "--devices=2,8")
  assert len(row_of("fsdp", sections.summary("mine", made))) == 1
  assert len(row_of("fsdp", sections.details("mine", made))) == 2 * 2


def test_the_page_lists_missed_aims():
  """Only on the most devices, and as shown: 0.846 is shown as 0.85, which is not a miss."""
  seconds = {"fsdp/8": 1.07, "two_d/8": 1.182, "three_d/8": 2.0, "three_d/2": 9.0, "single/None": 0.8}
  made = measured("--rows=fsdp,two_d,three_d,peer", "--devices=2,8", run=Machine(seconds))
  assert {aim.row: round(aim.got, 2) for aim in figures.aims(made) if not aim.met} == {
    "fsdp": 0.93, "three_d": 0.5, "peer": 0.8,
  }  # fmt: skip
  assert "Missed aims: fsdp 0.93 of 0.95, three_d 0.50 of 0.85, transformers' Llama 0.80 of 1.00." in sections.summary(
    "mine", made
  )
  assert "All measured aims are met." in sections.summary("mine", measured("--rows=two_d", "--devices=8"))
  made["cells"]["fsdp/8"] |= {"error": "out of memory", "rounds": []}
  made["cells"]["peer/eager"] |= {"error": "torch is not installed", "rounds": []}
  made["cells"]["peer/sdpa"] |= {"error": "torch is not installed", "rounds": []}
  made["cells"]["peer/sdpa-compiled"] |= {"error": "torch is not installed", "rounds": []}
  assert "Missed aims: three_d 0.50 of 0.85. Not measured: fsdp, transformers' Llama." in sections.summary("mine", made)
  on_gpus = measured("--rows=fsdp", run=Machine(found=GPUS), preset="throughput_gpu")
  for without in (measured("--rows=fsdp", "--devices=1"), on_gpus):
    assert "aims" not in sections.summary("mine", without)
    assert "aims" not in tables.headline(without)


def test_a_share_of_the_makers_figure_is_called_mfu():
  known = GPUS | {"hardware": GPUS["hardware"] | {"peak_flops": 989e12}}
  made = measured("--rows=fsdp", run=Machine(found=known), preset="throughput_gpu")
  assert [row.devices for row in figures.rows(made)] == [1, 1, 2, 4]
  assert "| MFU (as PaLM counts) |" in sections.details("mine", made)
  assert "not scaling" not in sections.summary("mine", made)
  assert "scales" not in tables.parts({"mine": made})["message"]
  row, (needed, palm) = figures.row(made, "fsdp/4"), figures.flops(made)
  assert (row.flops_share, row.palm_share) == pytest.approx((needed / 989e12 / 4, palm / 989e12 / 4))


@pytest.mark.parametrize("experts", [0, 8])
def test_strategies_that_share_experts_have_rows_if_there_are_experts(experts: int):
  made = measured("--rows=fsdp,expert", "--devices=8")
  made["config"]["model"]["experts"] = experts
  assert {"single/1", "fsdp/8", "expert/8"} <= made["cells"].keys()
  assert [row.row for row in figures.rows(made)] == (["single", "expert", "fsdp"] if experts else ["single", "fsdp"])


@pytest.mark.parametrize("name", tables.read())
def test_no_recorded_row_does_more_arithmetic_than_the_machine_can(name: str):
  record = tables.read()[name]
  shares = [row.flops_share for row in figures.rows(record) if not row.error]
  assert 0 < min(shares) <= max(shares) <= 1


def test_every_strategy_has_a_row_at_every_number_of_devices():
  asked = cells.select(base.get_config("lm", "single"), cells.rows(), cells.DEVICES, "python", "cpu", "float32")
  names = [cell.name for cell in asked]
  expected = {f"{name}/{n}" for name in strategies.names() for n in (1, 2, 4, 8)} - {f"single/{n}" for n in (2, 4, 8)}
  assert set(names) == expected | {"peer/eager", "peer/sdpa", "peer/sdpa-compiled", "peaks"}
  assert names[0] == "single/1"
  assert {cell.spec["config"]["data"]["name"] for cell in asked if cell.compiled} == {"synthetic"}


def test_cells_take_turns_and_the_reference_is_timed_often(tmp_path: Path):
  run = Machine()
  asked = cells.select(base.get_config("throughput", "single"), cells.rows(), cells.DEVICES, "python", "cpu", "float32")
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
  """Slower by another factor in each round. In addition, one in five runs of the reference hits a slow moment."""

  def __call__(self, command: Sequence[str], spec: dict[str, Any]) -> dict[str, Any]:
    result = super().__call__(command, spec)
    runs = self.asked.count(("steps", "single/1")) - 1
    if spec.get("task") == "steps":
      moment = 3.0 if self.asked[-1][1] == "single/1" and runs % 5 == 2 else 1.0
      result["seconds"] = [(1, 2, 3, 5, 7)[runs // 5] * moment * s for s in result["seconds"]]
    return result


def test_a_cell_is_compared_with_the_reference_of_its_round():
  """A machine that is slow for a round slows both. One that is slow for a moment affects neither median."""
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


def test_a_nan_loss_counts_as_a_difference():
  made = measured("--rows=fsdp,two_d", "--devices=8")
  assert figures.loss_spread(made) == 0
  made["cells"]["fsdp/8"]["rounds"][1]["loss"] = math.nan
  assert not figures.loss_spread(made) < PARITY


def test_a_stopped_run_keeps_its_complete_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  class Stopped(Machine):
    def __call__(self, command: Sequence[str], spec: dict[str, Any]) -> dict[str, Any]:
      if spec.get("devices") == 8 and spec["task"] == "steps" and self.asked.count(("steps", "fsdp/8")) == self.at:
        raise KeyboardInterrupt
      return super().__call__(command, spec)

  Stopped.at = 2  # in the third round
  made = measured("--rows=fsdp", "--devices=8", "--rounds=5", run=Stopped())
  assert made["rounds"] == 2
  assert {turn["turn"] for cell in made["cells"].values() for turn in cell["rounds"]} == {0, 1}
  assert len(made["cells"]["fsdp/8"]["rounds"]) == 2
  Stopped.at = 0
  with pytest.raises(KeyboardInterrupt):
    measured("--rows=fsdp", "--devices=8", run=Stopped())
  monkeypatch.setattr(throughput, "measure", lambda *_: made)
  monkeypatch.setattr(throughput, "ROOT", tmp_path)
  options, _ = throughput.parse([])
  throughput.keep(base.get_config("throughput", "single"), "throughput", options, FOUND)  # a partial record
  assert [file.name for file in (tmp_path / "runs").iterdir()] == ["2-cores-of-made-up-throughput.json"]


def test_a_row_that_fails_shows_why_and_the_others_continue():
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
  assert "not measured: out of memory" in sections.summary("mine", made)
  assert "not measured: out of memory" in sections.details("mine", made)
  assert "0.5" not in tables.headline(made)


def test_the_records_of_several_machines_stand_side_by_side():
  mine = measured("--rows=fsdp,two_d,peer", "--devices=2,8", run=Machine({"two_d/8": 1.25, "single/None": 0.8}))
  yours = measured("--rows=fsdp", "--devices=8", run=Machine({"fsdp/8": 0.8}))
  yours["hardware"] = yours["hardware"] | {"cpu": "another"}
  table = tables.machines({"mine": mine | {"date": "2030-01-31", "load": 0.25}, "yours": yours | {"load": None}})
  rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| ")]
  assert rows[0] == [
    "Throughput, single = 1", "2 cores of made up, 3.5 M parameters", "2 cores of another, 3.5 M parameters",
  ]  # fmt: skip
  assert rows[1:-1] == [
    ["devices", "8", "8"],
    ["single", "8,192 tokens/s", "8,192 tokens/s"],
    ["fsdp", "1.00", "1.25"],
    ["two_d", "0.80, aim 0.85", "–"],
    ["single, transformers' Llama = 1", "0.80", "–"],
  ]
  assert rows[-1][:2] == ["date, load", "2030-01-31, 0.2"]
  alike = tables.machines({"mine": mine, "ours": mine}).splitlines()[0]  # two machines of one kind have two columns
  assert alike.count("2 cores of made up") == 2
  assert rows[-1][2].endswith(", unknown")
