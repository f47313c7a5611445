"""Sends the measurements of a run to Weights & Biases or to MLflow, beside TensorBoard's event files (tensorboard.py).

A thread of its own talks to them, so training waits for no network and no server. What fails there is one warning. A
resumed run continues the curve of the run whose name is in its workdir.
"""

import collections
import contextlib
import importlib.util
import itertools
import json
import logging
import os
import posixpath
import queue
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from checkpointing.record import flat
from errors import ConfigError
from reporting.appender import extra, warn
from runtime import folders

WANDB, MLFLOW = "wandb", "mlflow"  # the names of the fields, extras, packages, and folders in a workdir
RUN, SENT = "run-id", "sent.json"  # in such a folder: the run's name there, and the last step of each split
SECONDS_TO_END = 10.0  # how long the end of a run waits for what is still to be sent
Line = tuple[int, str, dict[str, float]]  # (step, split, values)


class Run(NamedTuple):
  """The run that a tracker shows.

  Attributes:
    project: the field's value: what runs are grouped by.
    folder: the tracker's folder in the workdir.
    name: that of the workdir.
    fields: the config's, by their dotted names.
  """

  project: str
  folder: Path
  name: str
  fields: dict[str, Any]

  @property
  def known(self) -> str:
    """The id of the run that is to be continued; "" if there is none."""
    file = self.folder / RUN
    return file.read_text().strip() if file.exists() else ""

  def keep(self, name: str) -> str:
    folders.write(self.folder / RUN, name)
    return name


class Sender(Protocol):
  """Talks to a tracker, in one thread. Any method may raise whatever a library raises.

  Attributes:
    settles: the seconds after which a kill of the program loses nothing of what was sent.
  """

  settles: float

  def send(self, step: int, split: str, values: dict[str, float]) -> None: ...

  def close(self) -> None: ...


class Tracker:
  """Hands measurements to a thread that sends them. Has the methods of `tensorboard.Board`, which never wait.

  The last steps that were sent are in the workdir. So the next start sends what a killed one has not sent, and does not
  send again what a resumed run measures again.

  Args:
    before: the measurements of earlier starts that stay: (step, split, values).
  """

  def __init__(self, name: str, run: Run, connect: Callable[[Run], Sender], before: Callable[[], Iterable[Line]]):
    self.name, self.run, self.connect, self.before = name, run, connect, before
    self.waiting: queue.SimpleQueue[Line | None] = queue.SimpleQueue()
    self.thread = threading.Thread(target=self._work, name=name, daemon=True)
    self.thread.start()

  def write(self, step: int, split: str, values: dict[str, float]) -> None:
    if self.thread.is_alive():
      self.waiting.put((step, split, values))

  def close(self) -> None:
    """Sends the rest, as far as that takes little time."""
    self.waiting.put(None)
    self.thread.join(SECONDS_TO_END)
    if self.thread.is_alive():
      late = f"the last measurements were not sent within {SECONDS_TO_END:.0f} s; the same command sends them"
      warn(f"reporting.{self.name}={self.run.project!r}: {late}")

  def _work(self) -> None:
    with extra(f"reporting.{self.name}={self.run.project!r}"):
      self.run.folder.mkdir(exist_ok=True)
      sender, file = self.connect(self.run), self.run.folder / SENT
      sent: dict[str, int] = json.loads(file.read_text()) if file.exists() else {}
      settling = collections.deque[tuple[float, dict[str, int]]]()
      for step, split, values in itertools.chain(self.before(), iter(self.waiting.get, None)):
        if step > sent.get(split, -1):
          sender.send(step, split, values)
          sent = sent | {split: step}
          settling.append((time.monotonic() + sender.settles, sent))
        settled = None
        while settling and settling[0][0] <= time.monotonic():
          settled = settling.popleft()[1]
        if settled:
          folders.write(file, json.dumps(settled))
      sender.close()
      folders.write(file, json.dumps(sent))


class Wandb:
  """Weights & Biases. It writes files, which `wandb sync` sends; with WANDB_MODE=online it sends them at once."""

  settles = 30.0  # it writes its file every 15 s

  def __init__(self, run: Run):
    import wandb

    name = run.known or run.keep(secrets.token_hex(4))
    self.run = wandb.init(
      project=run.project,
      id=name,
      name=run.name,
      dir=run.folder.parent,
      config=run.fields,
      resume="allow",
      mode=os.environ.get("WANDB_MODE") or "offline",  # type: ignore[arg-type]
      settings=wandb.Settings(console="off", silent=True),
    )

  def send(self, step: int, split: str, values: dict[str, float]) -> None:
    self.run.log({f"{split}/{name}": value for name, value in values.items()}, step=step)

  def close(self) -> None:
    self.run.finish()


class Mlflow:
  """MLflow: the server or database of MLFLOW_TRACKING_URI, else a database in the workdir."""

  settles = 0.0

  def __init__(self, run: Run):
    from mlflow import MlflowClient
    from mlflow.entities import Param

    logging.getLogger("mlflow").setLevel(logging.WARNING)
    place = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.folder.resolve() / 'mlflow.db'}"
    self.client = MlflowClient(tracking_uri=place)
    if name := run.known:
      self.client.update_run(name, status="RUNNING")
    else:
      found = self.client.get_experiment_by_name(run.project)
      experiment = found.experiment_id if found else self.client.create_experiment(run.project)
      name = run.keep(self.client.create_run(experiment, run_name=run.name).info.run_id)
      params = [Param(field, str(value)[:500]) for field, value in run.fields.items()]
      for start in range(0, len(params), 100):  # as many as MLflow takes at a time
        self.client.log_batch(name, params=params[start : start + 100])
    self.name = name

  def send(self, step: int, split: str, values: dict[str, float]) -> None:
    from mlflow.entities import Metric

    now = int(1000 * time.time())
    metrics = [Metric(_plain(f"{split}/{name}"), value, now, step) for name, value in values.items()]
    self.client.log_batch(self.name, metrics=metrics)

  def close(self) -> None:
    self.client.set_terminated(self.name)


def _plain(name: str) -> str:
  """A name that MLflow takes: letters, digits and a few signs, as a path."""
  return posixpath.normpath(re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII).lstrip("/"))


Make = Callable[[Callable[[], Iterable[Line]]], Tracker]
SENDERS: dict[str, Callable[[Run], Sender]] = {WANDB: Wandb, MLFLOW: Mlflow}


def check(config: Any) -> None:
  """Raises ConfigError if a field asks for a package that is not installed."""
  for name in (WANDB, MLFLOW):
    project, spec = config.reporting[name], None
    with contextlib.suppress(ValueError):  # of a module without a spec
      spec = importlib.util.find_spec(name)
    if project and (spec is None or not spec.origin):  # a folder of that name is no package
      raise ConfigError(
        f"reporting.{name}={project!r} needs the package {name}, which is not installed; run pip install '.[{name}]', "
        f"or leave reporting.{name} empty"
      )


def trackers(config: Any, workdir: Path) -> list[Make]:
  """What makes the trackers that a config asks for, from the measurements of earlier starts."""
  return [_make(name, config, workdir) for name in (WANDB, MLFLOW) if config.reporting[name]]


def _make(name: str, config: Any, workdir: Path) -> Make:
  run = Run(config.reporting[name], workdir / name, workdir.resolve().name, flat(config.to_dict()))
  return lambda before: Tracker(name, run, SENDERS[name], before)
