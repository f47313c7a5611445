"""A job of eight devices that loses one goes on with seven, whatever seven does not divide."""

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from helpers import config, measured
from jobs import TINY, flags

import train
from checkpointing.reading import FOLDER, steps
from job import supervisor
from job.supervisor import Policy, supervise


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["fsdp"])
def test_eight_processes_go_on_as_seven_and_as_eight_again(
  strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
):
  """A width of 32, a batch of 32 and an evaluation of 40 examples. Compared with a single process."""
  short = {"steps": 45, "eval_every": 15, "checkpoint__every": 5, "runtime__heartbeat": 0.2, "eval_examples": 40}
  short |= {"batch_size": 32}
  train.train(config("single", **TINY | short), tmp_path / "whole")
  run, killed = tmp_path / "run", list[int]()
  watch = supervisor.Supervisor._hung

  def hung(self: Any, attempt: Any, running: set[int], began: float) -> Any:
    beats, saved = self._beats(attempt), max(steps(run / FOLDER), default=0)
    if attempt.count == 8 and not killed and saved >= 10 and beats.get(3, {}).get("step"):
      killed.append(beats[3]["pid"])
      os.kill(killed[0], signal.SIGKILL)
    if attempt.count == 7 and saved >= 25:  # after an evaluation
      self.state.lost = {}  # it is back
    return watch(self, attempt, running, began)

  monkeypatch.setattr(supervisor.Supervisor, "_hung", hung)
  assert supervise(Policy(8, 1, lost_for=10_000.0), flags(strategy, run, **short)) == 0
  output = capfd.readouterr().out
  assert re.search(r"restart   process 3 of 8 on \S+ was killed by SIGKILL after step \d+; starts again from", output)
  assert "smaller" not in output, "the flags fit seven"
  assert "strategy  fsdp on mesh data=7; batch over data, embed over data; 35 rows for 32 examples" in output
  assert re.search(r"resumed .*\n(.*\n)*?.*devices was 8 and is now 7", output)
  assert re.search(r"restart   8 of 8 processes can run again\n(.*\n)*?.*processes was 7 and is now 8", output)
  ours, reference = (
    {(line["split"], line["step"]): line["loss"] for line in measured(tmp_path / name)} for name in ("run", "whole")
  )
  assert len(ours) == 45 + 3
  assert ours == pytest.approx(reference, rel=1e-5)
