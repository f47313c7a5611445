"""Weights & Biases and MLflow: one curve over all starts, without a network, and never the failure of a run."""

import importlib.util
import math
import sys
import threading
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
from helpers import config, measured, one_sentence
from jobs import TINY

import train
from reporting import trackers
from reporting.metrics import Writer
from training.loop import LoopState

FIELDS = {"reporting__wandb": "mine", "reporting__mlflow": "mine"}


class Service:
  """Stands in for both libraries, and keeps what is sent to them: by the id of a run, (step, names and values)."""

  def __init__(self) -> None:
    self.lines: dict[str, list[tuple[int, dict[str, float]]]] = {}
    self.began: list[dict[str, Any]] = []
    self.ended: list[str] = []
    self.params: dict[str, str] = {}

  def init(self, **given: Any) -> types.SimpleNamespace:
    name, lines = given["id"], self.lines.setdefault(given["id"], [])
    self.began.append(given)
    finish = lambda: self.ended.append(name)
    return types.SimpleNamespace(log=lambda values, step: lines.append((step, values)), finish=finish)

  def MlflowClient(self, tracking_uri: str) -> "Service":
    self.began.append({"uri": tracking_uri})
    return self

  def get_experiment_by_name(self, name: str) -> None:
    return None

  def create_experiment(self, name: str) -> str:
    return name

  def create_run(self, experiment: str, run_name: str) -> types.SimpleNamespace:
    assert experiment == "mine"
    name = f"{run_name}-{len(self.lines)}"
    self.lines[name] = []
    return types.SimpleNamespace(info=types.SimpleNamespace(run_id=name))

  def update_run(self, name: str, status: str) -> None:
    assert name in self.lines
    assert status == "RUNNING"

  def log_batch(self, name: str, metrics: Any = (), params: Any = ()) -> None:
    assert len(params) <= 100
    self.params |= dict(params)
    if metrics:
      ((step,),) = [{metric[3] for metric in metrics}]
      self.lines[name].append((step, {metric[0]: metric[1] for metric in metrics}))

  def set_terminated(self, name: str) -> None:
    self.ended.append(name)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
  """Takes the place of both libraries."""
  found = Service()
  parts = {
    "wandb": {"init": found.init, "Settings": dict},
    "mlflow": {"MlflowClient": found.MlflowClient},
    "mlflow.entities": {"Metric": lambda *given: given, "Param": lambda *given: given},
  }
  for name, given in parts.items():
    module = types.ModuleType(name)
    module.__spec__ = ModuleSpec(name, None, origin="here")
    vars(module).update(given)
    monkeypatch.setitem(sys.modules, name, module)
  for name in ("WANDB_MODE", "MLFLOW_TRACKING_URI"):
    monkeypatch.delenv(name, raising=False)
  return found


def writer(workdir: Path, start: LoopState, *names: str) -> Writer:
  made = trackers.trackers(config(**{f"reporting__{name}": "mine" for name in names}), workdir)
  return Writer(workdir, start, 9, trackers=made)


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
@pytest.mark.parametrize("settles", [0.0, math.inf])
def test_a_resumed_run_continues_its_curve(
  name: str, settles: float, tmp_path: Path, service: Service, monkeypatch: pytest.MonkeyPatch
):
  """The first start is killed. What was sent until then is known only if it has settled, and is sent again if not."""
  sender: Any = trackers.SENDERS[name]
  monkeypatch.setattr(sender, "settles", settles)
  killed = writer(tmp_path, LoopState(), name)
  for step in (1, 2, 3):
    killed.write(step, "train", {"loss": 1.0 * step})
  board: Any = killed.boards[-1]
  while not [lines for lines in list(service.lines.values()) if len(lines) == 3]:
    assert board.thread.is_alive()
  (run,), known = service.lines, (tmp_path / name / trackers.RUN).read_text()
  assert known == run
  while settles == 0 and '"train": 3' not in (tmp_path / name / trackers.SENT).read_text():
    assert board.thread.is_alive()
  with writer(tmp_path, LoopState(step=2), name) as again:
    for step in (3, 4):
      again.write(step, "train", {"loss": 1.0 * step})
  assert list(service.lines) == [run]
  before = [1, 2, 3] if settles == 0 else [1, 2, 3, 1, 2, 3]
  assert service.lines[run] == [(step, {"train/loss": 1.0 * step}) for step in [*before, 4]]
  assert service.ended == [run]
  if name == "wandb":
    assert [given["mode"] for given in service.began] == ["offline", "offline"]
    assert {given["dir"] for given in service.began} == {tmp_path}
  else:
    assert {given["uri"] for given in service.began} == {f"sqlite:///{tmp_path}/mlflow/mlflow.db"}
    assert service.params["optimizer.name"] == "adamw"
  with writer(tmp_path, LoopState(), name) as new:  # a new run in this workdir
    new.write(1, "train", {"loss": 5.0})
  assert [len(lines) for lines in service.lines.values()] == [len(before) + 1, 1]
  assert (tmp_path / "previous-1" / name / trackers.RUN).read_text() == run


def test_what_one_start_has_not_sent_the_next_one_sends(tmp_path: Path, service: Service):
  with writer(tmp_path, LoopState()) as first:
    for step in (1, 2, 3):
      first.write(step, "train", {"loss": math.nan if step == 2 else 1.0})
  with writer(tmp_path, LoopState(step=2), "mlflow") as again:
    again.write(3, "train", {"loss": 1.0})
  ((_, lines),) = service.lines.items()
  assert [step for step, _ in lines] == [1, 2, 3]
  assert math.isnan(lines[1][1]["train/loss"])


@pytest.mark.parametrize("where", ["connect", "send", "close"])
def test_a_failure_is_one_warning(where: str, tmp_path: Path, service: Service, capsys: pytest.CaptureFixture):
  def fails(*_: object, **__: object) -> None:
    raise ConnectionError("no route to host\nand more")

  if where == "connect":
    service.create_run = fails
  else:
    at = "set_terminated" if where == "close" else "log_batch"
    before = getattr(service, at)
    setattr(service, at, lambda *given, **more: before(*given, **more) if "params" in more else fails())
  with writer(tmp_path, LoopState(), "mlflow", "wandb") as both:
    for step in (1, 2, 3):
      both.write(step, "train", {"loss": 1.0})
  assert [line["step"] for line in measured(tmp_path)] == [1, 2, 3]
  (warning,) = capsys.readouterr().err.splitlines()
  assert warning == "error: reporting.mlflow='mine' is left out (no route to host); the run is not affected"
  (other,) = [lines for lines in service.lines.values() if lines and "train/loss" in lines[0][1]][-1:]
  assert [step for step, _ in other] == [1, 2, 3]


def test_a_server_that_does_not_answer_is_not_waited_for(
  tmp_path: Path, service: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
  answers = threading.Event()
  service.create_experiment = lambda name: answers.wait() and name
  monkeypatch.setattr(trackers, "SECONDS_TO_END", 0.01)
  with writer(tmp_path, LoopState(), "mlflow") as waiting:
    waiting.write(1, "train", {"loss": 1.0})
  answers.set()
  (warning,) = capsys.readouterr().err.splitlines()
  assert warning.startswith("error: reporting.mlflow='mine': the last measurements were not sent within")
  assert len(measured(tmp_path)) == 1


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
@pytest.mark.parametrize("spec", [None, ModuleSpec("a folder of that name", None)])
def test_a_package_that_is_not_installed_is_named(name: str, spec: Any, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)
  trackers.check(config())
  with one_sentence(f"reporting.{name}='mine'", "not installed", f"pip install '.[{name}]'", "empty"):
    trackers.check(config(**{f"reporting__{name}": "mine"}))


def test_names_are_as_mlflow_takes_them():
  assert trackers._plain("validation/loss/my texts+more.txt") == "validation/loss/my texts_more.txt"
  assert trackers._plain("/a//b/é") == "a/b/_"


@pytest.mark.full
def test_a_run_reports_what_its_metrics_have(tmp_path: Path, service: Service):
  for stop in (6, 0):
    train.train(config("fsdp", **TINY | FIELDS | {"steps": 12, "stop_after": stop}), tmp_path)
  assert len(service.lines) == 2
  for lines in service.lines.values():
    losses = {step: values["train/loss"] for step, values in lines if "train/loss" in values}
    assert losses == {line["step"]: line["loss"] for line in measured(tmp_path) if line["split"] == "train"}


def offline_wandb(workdir: Path) -> set[str]:
  return {file.name.rpartition("-")[2] for file in (workdir / "wandb").glob("offline-run-*")}


def stored_mlflow(workdir: Path) -> dict[str, list[int]]:
  """The steps of the training loss of each run in a workdir's database."""
  from mlflow import MlflowClient

  client = MlflowClient(tracking_uri=f"sqlite:///{workdir}/mlflow/mlflow.db")
  experiment = client.get_experiment_by_name("mine")
  runs = [run.info.run_id for run in client.search_runs([experiment.experiment_id])]
  return {run: [metric.step for metric in client.get_metric_history(run, "train/loss")] for run in runs}


@pytest.mark.full
@pytest.mark.parametrize("name, found", [("wandb", offline_wandb), ("mlflow", stored_mlflow)])
def test_the_library_itself_keeps_one_run(
  name: str, found: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
):
  pytest.importorskip(name, reason=f"{name} is not installed; pip install '.[{name}]'")
  for variable in ("WANDB_MODE", "MLFLOW_TRACKING_URI"):
    monkeypatch.delenv(variable, raising=False)
  monkeypatch.setattr(trackers, "SECONDS_TO_END", 60.0)
  for start in (0, 2):
    with writer(tmp_path, LoopState(step=start), name) as both:
      for step in range(start + 1, 4):
        both.write(step, "train", {"loss": math.nan if step == 2 else 1.0, "of/a part+": 2.0})
  assert "left out" not in capfd.readouterr().err
  run = (tmp_path / name / trackers.RUN).read_text()
  assert found(tmp_path) == ({run: [1, 2, 3]} if name == "mlflow" else {run})
