"""Measures one part of a run that is very long: `python -m lab.benchmarks.growth_worker < SPEC`.

It follows the protocol of worker.py. growth.py starts it, also with an earlier version of the trainer. So it calls only
what these have, too. `spec["folder"]` is a folder for files, and `spec["size"]` says how long the run is.
"""

import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import data
from configs import base
from data.batches import Batches, Mixture
from lab.benchmarks import worker
from lab.benchmarks.preparation_worker import memory
from reporting import journal, metrics, recorded, report, reporter, status
from reporting.speed import Clock
from training.loop import LoopState

VALUES = ("grad_norm", "learning_rate", "tokens_per_second", "step_ms", "data_wait", "tflops_per_second")
STARTED = {"event": "start", "step": 1, "versions": {"jax": "0.0.0"}, "command": "python train.py"}
SOME = 1000  # lines of training that differ in more than their step
LAST = 1 << 40  # the last step of a run, which it does not reach


def write_run(folder: Path, size: int, evaluations: int, starts: int = 1) -> int:
  """Writes a run's metrics, its journal and its event file, in which the same events repeat. Returns its last step.

  Args:
    size: lines of metrics.
    evaluations: one in so many lines is an evaluation.
    starts: how often the job was started.
  """
  make, step = random.Random(0), 0
  train = [{name: make.random() for name in ("loss", *VALUES)} for _ in range(SOME)]
  with metrics.Writer(folder, LoopState(), LAST) as writer:
    writer.say = lambda text: None
    for number, values in enumerate(train):
      writer.write(number, "train", values)
  (events,) = (folder / "tensorboard").iterdir()
  events.write_bytes(max(1, size // SOME) * events.read_bytes())
  texts = [json.dumps(values)[1:] for values in train]
  with (folder / "metrics.jsonl").open("w") as out:
    for number in range(1, size + 1):
      is_evaluation = number % evaluations == 0
      step += not is_evaluation
      rest = f'"loss": {make.random()}}}' if is_evaluation else texts[number % SOME]
      out.write(f'{{"step": {step}, "split": "{"validation" if is_evaluation else "train"}", {rest}\n')
  with (folder / "journal.jsonl").open("w") as out:
    for number in range(starts):
      began = 1e9 + 100 * number
      for event in (STARTED, {"event": "evaluation", "step": 1}):
        out.write(json.dumps({**event, "time": began + 90, "began": began, "wall_time": {"train": 90.0}}) + "\n")
  return step


def measured(work: Callable[[], Any]) -> dict[str, Any]:
  """The seconds that it takes, the processor's seconds, and the bytes by which the most memory grows."""
  before, start, used = memory("VmHWM"), time.perf_counter(), time.process_time()
  work()
  seconds, used = time.perf_counter() - start, time.process_time() - used
  return {"seconds": seconds, "processor_seconds": used, "bytes": memory("VmHWM") - before}


def opened_journal(folder: Path) -> journal.Journal:
  return journal.Journal(folder, Clock(), True, print)


def time_restart(spec: dict[str, Any]) -> dict[str, Any]:
  """From the start of the writer until the page of the start is written, 100 lines before the end of the metrics.

  TensorBoard's messages are imported before.
  """
  from tensorboardX import record_writer  # noqa: F401
  from tensorboardX.proto import event_pb2, summary_pb2  # noqa: F401

  folder = Path(spec["folder"])
  step = int(spec["last"]) - 100

  def restart() -> None:
    with metrics.Writer(folder, LoopState(step=step), LAST), opened_journal(folder) as kept:
      kept.add("start", step)

  return measured(restart)


def time_picture(spec: dict[str, Any]) -> dict[str, Any]:
  """The picture of the losses. Matplotlib is imported before."""
  from matplotlib import pyplot  # noqa: F401

  folder = Path(spec["folder"])
  ours = reporter.Reporter.__new__(reporter.Reporter)
  ours.why_ended = lambda: ""  # type: ignore[method-assign]  # it made all its steps
  ours.workdir, ours.clock, ours.say = folder, Clock(), lambda text: None
  ours.writer = SimpleNamespace(enabled=True, path=folder / "metrics.jsonl")
  reader = recorded.Reader(folder) if hasattr(recorded, "Reader") else None
  ours.journal = SimpleNamespace(add=lambda *_, **__: None, reader=reader, events=[])
  ours.status = SimpleNamespace(write=lambda step: "")
  return measured(lambda: ours.ended(1, None, None, []))


def time_line(spec: dict[str, Any]) -> dict[str, Any]:
  """The median of 20 lines of the log."""
  folder, seconds = Path(spec["folder"]), []
  with metrics.Writer(folder, LoopState(step=1), LAST) as writer, opened_journal(folder) as kept:
    writer.say = lambda text: None
    shown = status.Status(folder, writer, kept, lambda: 0)
    for step in range(2, 22):
      start = time.perf_counter()
      writer.write(step, "train", {"loss": 1.0})
      shown.update(step, {"loss": 1.0})
      seconds.append(time.perf_counter() - start)
  return {"seconds": statistics.median(seconds)}


def time_page(spec: dict[str, Any]) -> dict[str, Any]:
  """The page of a run, read from its files, and its size."""
  pages: list[str] = []
  found = measured(lambda: pages.append(report.page([recorded.load(Path(spec["folder"]))])))
  return found | {"page_bytes": len(pages[0].encode())}


def time_evaluation(spec: dict[str, Any]) -> dict[str, Any]:
  """What the journal does after an evaluation, 100 lines after the last page."""
  folder = Path(spec["folder"])
  with metrics.Writer(folder, LoopState(step=int(spec["last"])), LAST) as writer, opened_journal(folder) as kept:
    writer.say = lambda text: None
    kept.add("start", int(spec["last"]))
    for number in range(100):
      writer.write(int(spec["last"]) + number, "train", {"loss": 1.0})
    kept.cost = 0.0  # so that the page is due
    return measured(lambda: kept.add("evaluation", int(spec["last"]) + 100))


class Numbers:
  """A source of examples that are their numbers."""

  def __init__(self, size: int):
    self.size = size

  def __len__(self) -> int:
    return self.size

  def read(self, ids: np.ndarray) -> dict[str, np.ndarray]:
    return {"number": ids}


def time_batch(spec: dict[str, Any]) -> dict[str, Any]:
  """The slowest of 1,500 batches of a mixture after the first, which makes the table of turns."""
  made, seconds = np.random.default_rng(0), []
  sizes = np.exp(made.uniform(np.log(50), np.log(1e6), spec["size"])).astype(int)
  weights = tuple(float(x) for x in made.integers(1, 1000, spec["size"]) / 1000)
  batches = Batches(Mixture([Numbers(int(size)) for size in sizes], weights), 32)
  for step in range(1501):
    start = time.perf_counter()
    batches.read(step)
    seconds.append(time.perf_counter() - start)
  return {"seconds": max(seconds[1:])}


def write_files(folder: Path, size: int) -> int:
  for number in range(size):
    file = folder / "data" / f"{number % 100}" / f"{number}.txt"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"text number {number}, some words here\n")
  time_second_start({"folder": str(folder)})
  return 0


def time_second_start(spec: dict[str, Any]) -> dict[str, Any]:
  """`data.load` of texts that are prepared, and how many of their files it opens."""
  config, opened = base.get_config("tiny", "single"), []
  config.data.path, config.data.cache_dir = f"{spec['folder']}/data", f"{spec['folder']}/cache"
  note = lambda event, values: event == "open" and opened.append(str(values[0]).startswith(config.data.path))
  sys.addaudithook(note)
  return measured(lambda: data.load(config)) | {"opened": sum(opened)}


def make(spec: dict[str, Any]) -> dict[str, Any]:
  """Writes the files of a part. Returns its last step."""
  part, folder, size = spec["part"], Path(spec["folder"]), spec["size"]
  if part == "batch":
    return {"last": 0}
  if part == "second_start":
    return {"last": write_files(folder, size)}
  evaluations, starts = {"page": (1, 1), "line": (10, size)}.get(part, (100, 1))
  return {"last": write_run(folder, 100 if part == "line" else size, evaluations, starts)}


TASKS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
  "make": make,
  "restart": time_restart,
  "picture": time_picture,
  "line": time_line,
  "page": time_page,
  "evaluation": time_evaluation,
  "batch": time_batch,
  "second_start": time_second_start,
}

if __name__ == "__main__":
  worker.main(TASKS)
