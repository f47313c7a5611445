"""What an upgrade of jax costs: what counts as worse, what a note allows, and what the record says."""

import json
from pathlib import Path
from typing import Any

import pytest

from lab.benchmarks import pages, upgrade
from lab.benchmarks.upgrade import STEPS

STEP = "fsdp of 7B on h100:32x8"
RECORD = upgrade.read()


def stack(jax: str, **figures: float) -> dict[str, Any]:
  return {"versions": {"jax": jax}, "figures": {STEP: figures}}


def record(*stacks: dict[str, Any], **notes: str) -> dict[str, Any]:
  return {"kind": "upgrade", "stacks": list(stacks), "notes": {STEP: notes} if notes else {}}


OLD = stack("0.10.2", memory=100e9, exposed=0.0029)


def test_eleven_percent_more_without_a_note_is_named():
  (found,) = upgrade.judged(record(OLD), [stack("0.12.0", memory=111e9, exposed=0.0030)])
  for part in (STEP, "memory was 100 GB and is 111 GB", STEPS[STEP].command, "`notes` of lab/benchmarks/results/"):
    assert part in str(found)


@pytest.mark.parametrize("memory", [1e9, 100e9, 109e9])
def test_less_and_nine_percent_more_pass(memory: float):
  assert upgrade.judged(record(OLD), [stack("0.12.0", memory=memory)]) == []


def test_a_note_allows_what_the_record_has_and_no_more():
  known = record(OLD, stack("0.12.0", memory=100e9, exposed=0.0205), exposed="starts a gather late")
  found = lambda exposed: [one.figure for one in upgrade.judged(known, [stack("0.13.0", exposed=exposed)])]
  assert found(0.0220) == []
  assert found(0.0230) == ["exposed"]
  assert [one.figure for one in upgrade.worse(known | {"notes": {}}, {STEP: {"exposed": 0.0220}})] == ["exposed"]


def test_what_a_newer_stack_has_won_must_stay():
  won = record(OLD, stack("0.12.0", memory=50e9))
  assert [one.old for one in upgrade.judged(won, [stack("0.12.1", memory=60e9)])] == [pytest.approx(50e9)]


def test_a_few_microseconds_of_waiting_do_not_count():
  known = record(stack("0.10.2", exposed=0.0))
  assert upgrade.judged(known, [stack("0.12.0", exposed=9e-6)]) == []
  assert len(upgrade.judged(known, [stack("0.12.0", exposed=11e-6)])) == 1


def test_a_stack_older_than_the_record_is_not_judged():
  assert upgrade.judged(record(OLD, stack("0.12.0", memory=50e9)), [stack("0.10.2", memory=100e9)]) == []


def test_writing_keeps_notes_that_are_needed_and_still_hold():
  before = record(OLD, stack("0.12.0", memory=120e9, exposed=0.0205), memory="a copy", exposed="starts a gather late")
  kept = lambda **figures: upgrade.written(before, [stack("0.13.0", **figures), OLD])["notes"].get(STEP, {}).keys()
  assert kept(memory=120e9, exposed=0.0205) == {"memory", "exposed"}
  assert kept(memory=101e9, exposed=0.0205) == {"exposed"}  # not needed any more
  assert kept(memory=120e9, exposed=0.1) == {"memory"}  # another one must be written


def test_figures_stand_side_by_side():
  known = record(OLD, exposed="starts a gather late")
  printed = upgrade.side_by_side(known, [stack("0.12.0", memory=111e9, exposed=0.0205)]).splitlines()
  assert " ".join(printed[0].split()) == "record, jax 0.10.2 now, jax 0.12.0"
  assert " ".join(printed[1].split()) == f"{STEP} memory 100 GB 111 GB"
  assert " ".join(printed[2].split()) == f"{STEP} exposed 2.9 ms 20.5 ms starts a gather late"


def test_the_record_has_every_step_with_both_stacks_and_a_note_for_all_that_is_worse():
  assert [upgrade.version(stack)[:2] for stack in RECORD["stacks"]] == [(0, 10), (0, 12)]
  for stack in RECORD["stacks"]:
    assert stack["figures"].keys() == STEPS.keys()
    assert all(stack[name] for name in ("versions", "machine", "commit", "date", "seconds"))
  assert upgrade.judged(RECORD, RECORD["stacks"]) == []
  assert upgrade.written(RECORD, RECORD["stacks"])["notes"] == RECORD["notes"]


def test_the_page_shows_the_record():
  page = upgrade.PAGE.read_text()
  assert pages.fill(page, upgrade.tables(RECORD)) == page


@pytest.mark.parametrize("stack", RECORD["stacks"], ids=lambda stack: stack["versions"]["jax"])
def test_on_gpus_unrolled_blocks_send_the_same_with_less_traffic_and_memory(stack: dict[str, Any]):
  """lm_1b on eight GPUs. Weights are still gathered a block at a time: whole, they would take more than is saved."""
  loop, plain = (stack["figures"][f"fsdp of lm_1b on h100:1x8{how}"] for how in ("", ", unrolled"))
  assert plain["sent"] == pytest.approx(loop["sent"], rel=1e-3)
  assert plain["flops"] == pytest.approx(loop["flops"], rel=0.01)
  assert plain["traffic"] < 0.85 * loop["traffic"]
  assert plain["memory"] < loop["memory"]


def test_a_step_needs_its_compiler(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
  monkeypatch.setattr(upgrade, "has_compiler", lambda machine: False)
  monkeypatch.setattr(upgrade.jax.config, "update", lambda *_: None)
  assert json.dumps(upgrade.stack({STEP: STEPS[STEP]})["figures"]) == "{}"
  assert capsys.readouterr().err == f"left out, because its compiler is not installed: {STEP}\n"


def test_each_python_takes_its_own_tpu_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  """JAX names its own in a variable, which a child would take before that of its own packages."""
  monkeypatch.setenv("TPU_LIBRARY_PATH", "/another/libtpu.so")
  python = tmp_path / "python"
  python.write_text('#!/bin/sh\necho "{\\"path\\": \\"$TPU_LIBRARY_PATH\\"}"\n')
  python.chmod(0o755)
  assert upgrade.of([str(python)]) == [{"path": ""}]
