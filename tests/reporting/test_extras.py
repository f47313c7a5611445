"""What a run can do without: if a picture, a sample or event files fail, that is one warning."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from helpers import config
from jobs import TINY

import train
from errors import JobError
from reporting import metrics, summary
from reporting.appender import extra
from reporting.evaluation.evaluator import Evaluator
from reporting.journal import Journal
from reporting.metrics import Writer
from reporting.speed import Clock
from runtime import folders
from training.loop import LoopState


def test_a_failure_is_one_warning_unless_it_ends_a_job(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
  with extra("loss.png"):
    raise OSError(28, "No space left on device")
  with extra("the sample", together=True):
    raise RuntimeError("out of memory\nand more")
  warnings = capsys.readouterr().err.splitlines()
  assert warnings == [
    "error: loss.png is left out (No space left on device); the run is not affected",
    "error: the sample is left out (out of memory); the run is not affected",
  ]
  with pytest.raises(JobError), extra("the sample"):
    raise JobError("all end")
  monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
  with pytest.raises(RuntimeError), extra("the sample", together=True):
    raise RuntimeError("the others wait for this process")


def test_a_full_disk_leaves_no_half_of_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  class Full:
    def __init__(self, path: Path, *_: object, **__: object):
      path.touch()

    def __enter__(self) -> "Full":
      return self

    def __exit__(self, *_: object) -> None:
      pass

    def write(self, content: bytes) -> None:
      raise OSError(28, "No space left on device")

  monkeypatch.setattr(folders, "open", Full, raising=False)
  with pytest.raises(OSError, match="No space"):
    summary.plot_loss(tmp_path / "loss.png", {})
  assert list(tmp_path.iterdir()) == []


def test_a_picture_of_very_many_losses_draws_few_and_the_extremes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  from matplotlib.axes import Axes

  losses = [(step, 2.0 + random.random()) for step in range(100_000)]
  losses[777], losses[77_777], losses[5] = (777, 9.5), (77_777, 0.5), (5, None)
  drawn, plot = [], Axes.plot
  monkeypatch.setattr(Axes, "plot", lambda axes, *args, **how: drawn.append(args) or plot(axes, *args, **how))
  summary.plot_loss(tmp_path / "loss.png", {"train": losses})
  ((steps, values),) = drawn
  assert len(steps) <= 4_010
  assert {(777, 9.5), (77_777, 0.5), losses[0], losses[-1]} <= set(zip(steps, values, strict=True))


def test_event_files_of_another_owner_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture):
  (tmp_path / "tensorboard").touch()  # not even root can write below a file
  with Writer(tmp_path, LoopState(step=1), 9) as writer:
    writer.write(2, "train", {"loss": 1.0})
  assert metrics.read(tmp_path / "metrics.jsonl") == [{"step": 2, "split": "train", "loss": 1.0}]
  (warning,) = capsys.readouterr().err.splitlines()
  assert warning.startswith(f"error: {tmp_path}/tensorboard is left out (File exists)")


def test_a_journal_knows_whether_the_end_was_shown(tmp_path: Path):
  for ended in ([], [3]):
    with Journal(tmp_path, Clock(), True, print) as kept:
      assert sorted(kept.ended) == ended
      kept.add("end", 3)


@pytest.mark.full
def test_a_run_without_extras_ends_well_and_is_not_ended_twice(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
  """An import of matplotlib fails if no folder can be written. Such a run once failed at its end for ever."""

  def fails(*_: object, **__: object) -> Any:
    raise FileNotFoundError(2, "No usable temporary directory found")

  with monkeypatch.context() as patch:
    patch.setitem(sys.modules, "matplotlib", None)
    patch.setattr(summary, "sample", fails)
    patch.setattr(Evaluator, "baseline", fails)
    first = train.train(config("fsdp", **TINY | {"steps": 4}), tmp_path)
  shown = capsys.readouterr().err
  assert shown.count("is left out") == 3
  assert "loss.png is left out (import of matplotlib halted" in shown
  (tmp_path / "loss.png").touch()  # as a full disk leaves it
  lines = (tmp_path / "journal.jsonl").read_text().splitlines(keepends=True)
  assert json.loads(lines[-1])["event"] == "end"
  again = train.train(config("fsdp", **TINY | {"steps": 4}), tmp_path)
  assert again["loss"] == first["loss"]
  assert "all 4 steps are done" in capsys.readouterr().out
  (tmp_path / "journal.jsonl").write_text("".join(lines[:-1]))  # killed before its end was shown
  train.train(config("fsdp", **TINY | {"steps": 4}), tmp_path)
  assert "all 4 steps are done" not in capsys.readouterr().out
  assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
