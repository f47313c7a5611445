"""Writes measurements to the terminal, `metrics.jsonl`, TensorBoard and other boards, and reads them."""

import functools
import itertools
import json
import math
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from errors import JobError, visible
from reporting.appender import Appender, extra
from reporting.json_lines import backwards, lines_of, objects
from reporting.tensorboard import FOLDER, Board
from reporting.trackers import MLFLOW, WANDB, Make, Tracker
from runtime.stderr import print_if_read
from runtime.storage.owners import no_links
from training.loop import LoopState

# How each measurement is shown in the terminal. Other measurements go to the files only.
FORMATS = {
  "loss": "loss {:.4f}",
  "bits_per_byte": "{:.3f} bits/byte",
  "accuracy": "accuracy {:.2%}",
  "mean_absolute_error": "mean absolute error {:.4g}",
  "grad_norm": "grad norm {:.2f}",
  "load_max": "load ≤ {:.1f}",  # of an expert, relative to the mean
  "dropped": "{:.1%} dropped",  # of the choices of experts, if these have a capacity
  "learning_rate": "lr {:.2e}",
  "tokens_per_second": "{:,.0f} tokens/s",
  "images_per_second": "{:,.0f} images/s",
  "examples_per_second": "{:,.0f} examples/s",
  "step_ms": "{:.0f} ms/step",
  "data_wait": "data {:.1%}",
  "memory_gib": "{:.2f} GiB",
  "tflops_per_second": "{:.3g} TFLOP/s",
  "mfu": "MFU {:.1%}",
  "palm_mfu": "{:.1%} as PaLM counts",
  "skipped_updates": "{:.0f} skipped",  # since the last line
  "examples": "{:,.0f} examples",
}


PROMETHEUS, PICTURE = "metrics.prom", "loss.png"  # in a workdir
RESULTS = (
  "metrics.jsonl",
  PROMETHEUS,
  "journal.jsonl",
  "report.html",
  FOLDER,
  WANDB,
  MLFLOW,
  PICTURE,
  "config.json",
)  # the results in a workdir


class NotWritten(JobError):
  """A run has ended, but some of its measurements could not be written."""


class Writer:
  """Writes the measurements of a run into its workdir. `enabled` is true in one process of a job only.

  A run that starts at step 0 first moves the results of an earlier run to previous-1, previous-2, ... A resumed run
  keeps the lines up to `start.step` and writes later lines again. It also repeats the evaluation of `start.step` if the
  checkpoint was saved before it.

  Args:
    trackers: what makes other boards to write to, when earlier results were moved.
  """

  def __init__(
    self, workdir: Path, start: LoopState, last_step: int, enabled: bool = True,
    trackers: Iterable[Make] = (),
  ):  # fmt: skip
    self.enabled, self.path = enabled, workdir / "metrics.jsonl"
    self.last_step = last_step
    self.bar = None
    if not enabled:
      return
    earlier = [workdir / name for name in RESULTS if (workdir / name).exists()]
    again = list[dict[str, Any]]()
    if start.step > 0:
      again = _cut(self.path, start)
    elif earlier:
      number = next(n for n in itertools.count(1) if not (workdir / f"previous-{n}").exists())
      (workdir / f"previous-{number}").mkdir()
      for result in earlier:
        result.rename(workdir / f"previous-{number}" / result.name)
    self.file = Appender(self.path)
    self.boards: list[Board | Tracker] = []
    with extra(str(folder := workdir / FOLDER)):
      self.boards.append(Board(folder, start, [(line.pop("split"), _numbers(line)) for line in again]))
    before = lambda: ((line["step"], line.pop("split"), _numbers(line)) for line in read(self.path))
    self.boards += [make(before if start.step else list) for make in trackers]
    if sys.stderr.isatty():
      self.bar = tqdm(initial=start.step, total=last_step, unit="step", dynamic_ncols=True)

  def __enter__(self) -> "Writer":
    return self

  def __exit__(self, kind: type | None, *_: object) -> None:
    """Raises NotWritten if measurements could not be written, unless the run has failed anyway."""
    if self.enabled:
      self.file.close()
      for board in self.boards:
        board.close()
      if self.bar is not None:
        self.bar.close()
      if self.file.waiting and kind is None:
        raise NotWritten(f"the last measurements could not be written to {self.path}")

  def write(self, step: int, split: str, values: dict[str, float]) -> None:
    """Writes the values of a step; `split` is "train", "validation" or "job", which the terminal does not show."""
    if not self.enabled:
      return
    # JSON has no NaN or infinity; null keeps the line readable by every parser.
    finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
    self.file.write(json.dumps({"step": step, "split": split, **finite}).encode() + b"\n")
    for board in self.boards:
      board.write(step, split, values)
    if shown := [form.format(values[name]) for name, form in FORMATS.items() if name in values]:
      self.say(f"{split:<10} {step:>{len(str(self.last_step))}}/{self.last_step}  " + "  ".join(shown))

  def sync(self) -> None:
    """Flushes the measurements to disk, so that they survive a power failure."""
    if self.enabled:
      self.file.sync()

  def progress(self, step: int) -> None:
    """Moves the progress bar, if there is one."""
    if self.bar is not None:
      self.bar.update(step - self.bar.n)

  def say(self, text: str) -> None:
    """Prints text without breaking the progress bar. Output that nobody takes any more does not end the run."""
    if not self.enabled:
      return
    write = functools.partial(print, flush=True) if self.bar is None else tqdm.write
    print_if_read(lambda: write(visible(text, "\n\t")), f"training continues, and writes to {self.path} only")


def _numbers(line: dict[str, Any]) -> dict[str, float]:
  """The values of a line; what was not finite is null there."""
  return {name: math.nan if value is None else value for name, value in line.items() if name != "step"}


def _cut(path: Path, start: LoopState) -> list[dict[str, Any]]:
  """Drops lines after the start, and the start's evaluation unless it was made before the checkpoint.

  An evaluation is followed by a line of the job. Lines are in the order of their steps, so only the end of the file is
  read, and changed. What is broken there is dropped, too. Returns the lines of the start that stay.
  """
  cut, kept = 0, list[dict[str, Any]]()
  if not path.is_file():
    return kept
  with open(path, "r+b", opener=no_links) as file:
    for position, text in backwards(path):
      for line in _measurements([text]):
        if line["step"] < start.step:
          cut = position + len(text) + 1
        elif line["step"] == start.step and (start.evaluated or line["split"] == "train"):
          kept.insert(0, line)
      if cut:
        break
    if cut < os.fstat(file.fileno()).st_size:
      file.seek(cut)
      file.write("".join(json.dumps(line) + "\n" for line in kept).encode())
      file.truncate()
  return kept


def read(path: Path) -> list[dict]:
  """The lines of a metrics.jsonl, without incomplete ones (from a kill or a full disk). Empty if there is no file."""
  return _measurements(lines_of(path))


def last(path: Path, split: str) -> dict[str, Any]:
  """The last line of a split; {} if there is none."""
  found = (line for _, text in backwards(path) for line in _measurements([text]) if line["split"] == split)
  return next(found, {})


def _measurements(lines: list[bytes]) -> list[dict[str, Any]]:
  return [line for line in objects(lines) if "step" in line and "split" in line]
