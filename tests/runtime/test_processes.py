"""Jobs of several processes on this machine: they equal one process, resume on any number, and fail together."""

import contextlib
import errno
import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import pytest
from helpers import ROOT, config, measured, one_sentence, program, strategy
from jobs import TINY, flags

import train
from checkpointing.save import Checkpoints
from errors import ConfigError, JobConfigError, JobUnavailable, Unavailable
from runtime import processes, signals
from runtime.storage.answers import StorageError
from tools import launch
from training.loop import LoopState


def test_two_processes_go_on_where_one_stopped(tmp_path: Path, capfd: pytest.CaptureFixture):
  """1 × 8 → 2 × 1 devices, under another strategy; compared with an uninterrupted process."""
  short = {"steps": 4, "eval_every": 0}
  train.train(config("hsdp", **TINY | short), tmp_path / "whole")
  train.train(config("hsdp", **TINY | short, stop_after=2), tmp_path / "run")
  capfd.readouterr()
  assert launch.launch(2, 1, flags("fsdp", tmp_path / "run", **short)) == 0
  output = capfd.readouterr().out
  assert "[0] resumed   at step 2, saved by hsdp" in output
  assert "processes was 1 and is now 2" in output
  assert not re.search(r"\[1\] (train|validation|devices)", output), "only process 0 may report"
  ours, reference = (
    {(line["split"], line["step"]): line["loss"] for line in measured(tmp_path / name)} for name in ("run", "whole")
  )
  assert ours.pop(("validation", 2)) > 0, "a run that stops evaluates first"
  assert len(ours) == 5
  assert ours == pytest.approx(reference, rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("way", ["exchange", "ring"])
def test_processes_share_the_positions_of_a_text(way: str, tmp_path: Path, capfd: pytest.CaptureFixture):
  """Two processes with two devices each, and each text is on all four; compared with a single device."""
  short = {"steps": 4, "eval_every": 2, "model.attention_context": way}
  train.train(config("single", **TINY | short), tmp_path / "alone")
  assert launch.launch(2, 2, flags("single", tmp_path / "run", strategy="context", **short)) == 0
  ours, alone = (
    {(line["split"], line["step"]): line["loss"] for line in measured(tmp_path / name)} for name in ("run", "alone")
  )
  assert len(ours) >= 6
  assert ours == pytest.approx(alone, rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("way", ["exchange"])
def test_processes_share_the_experts_of_a_mixture(way: str, tmp_path: Path, capfd: pytest.CaptureFixture):
  """Two processes with two devices each, and two experts on each device. They go on where a single device stopped."""
  fields = {"steps": 4, "eval_every": 2, "model.experts": 8, "model.router": "sigmoid_bias"}
  fields["model.expert_transport"] = way
  train.train(config("single", **TINY | fields), tmp_path / "alone")
  train.train(config("single", **TINY | fields, stop_after=2), tmp_path / "run")
  assert launch.launch(2, 2, flags("expert", tmp_path / "run", **fields)) == 0
  assert "expert on mesh expert=4" in capfd.readouterr().out
  ours, alone = (measured(tmp_path / name) for name in ("run", "alone"))
  assert len(ours) == 6
  for name in ("loss", "balance_loss", "load_max", "idle_experts"):
    found, wanted = (
      {(line["split"], line["step"]): line[name] for line in lines if name in line} for lines in (ours, alone)
    )
    assert found == pytest.approx(wanted, rel=1e-5), name


@pytest.mark.full
def test_no_process_ever_holds_the_whole_state(tmp_path: Path, capfd: pytest.CaptureFixture):
  """One device writes 253 MB and 2 processes × 4 devices read it. Each process needs its half and a little more."""
  shape = {"model.depth": 32, "model.width": 256, "model.heads": 8, "model.kv_heads": 8, "model.mlp_width": 512}
  runner = strategy("single", program(**{name.replace(".", "__"): size for name, size in shape.items()}), devices=1)
  state = runner.init(seed=0)
  whole = sum(x.nbytes for x in jax.tree.leaves(state))
  with Checkpoints(tmp_path, 1, 0, print, pytest.fail) as writer:
    run = {
      "config": {"model": {}},
      "data": {"fingerprints": [], "turns": []},
      "strategy": "",
      "devices": 1,
      "processes": 1,
    }
    writer.save(state, run, LoopState(1))
  del state
  reader = ROOT / "tests" / "runtime" / "restore_memory.py"

  arguments = [f"--config={ROOT}/configs/fsdp.py:tiny", f"--checkpoints={tmp_path}"]
  assert launch.launch(2, 4, arguments + [f"--config.{field}={size}" for field, size in shape.items()], reader) == 0
  needed = [int(found) / whole for found in re.findall(r"needed (\d+) bytes", capfd.readouterr().out)]
  assert len(needed) == 2
  assert min(needed) > 0.45, "the measured memory does not include the state"  # data_parallel, with 4 copies, needs 4.9
  assert max(needed) < 0.9


@pytest.mark.full
def test_a_mistake_ends_all_processes_with_its_sentence(tmp_path: Path):
  """Runs the command as a user does. Each process prints the sentence."""
  command = ["-m", "tools.launch", "--processes=2", "--devices-per-process=4", "--"]
  done = subprocess.run(
    [sys.executable, *command, *flags("fsdp", tmp_path, batch_size=3)],
    cwd=ROOT, capture_output=True, text=True, check=False,
  )  # fmt: skip
  assert done.returncode == 2
  for rank in range(2):
    assert f"[{rank}] error: batch_size=3 is less than half of the 8 rows" in done.stdout
  assert "Traceback" not in done.stdout


PROGRAM = """
import os, sys, time
rank = next(a for a in sys.argv if "distributed.process=" in a)[-1]
print("this is", rank, flush=True)
if rank == "1":
  time.sleep(0.5)
  sys.exit(7)
time.sleep(60)
"""


def test_one_failing_process_ends_the_rest_with_its_status(tmp_path: Path, capfd: pytest.CaptureFixture):
  program = tmp_path / "program.py"
  program.write_text(PROGRAM)
  launch.SECONDS_TO_FOLLOW, before = 0.1, launch.SECONDS_TO_FOLLOW
  try:
    assert launch.launch(3, 1, [], program) == 7
  finally:
    launch.SECONDS_TO_FOLLOW = before
  assert sorted(capfd.readouterr().out.splitlines()) == [f"[{rank}] this is {rank}" for rank in range(3)]


FOLLOWING = """
import os, sys, time
rank = next(a for a in sys.argv if "distributed.process=" in a)[-1]
if rank == "1":
  with open(sys.argv[1], "w"):
    os._exit(7)
with open(sys.argv[1]) as pipe:
  pipe.read()  # ends with process 1
time.sleep(0.03)
os._exit(5)
"""


def test_the_status_is_that_of_the_process_that_failed_first(tmp_path: Path):
  """Process 0 fails a moment after process 1 and because of it, as in a collective."""
  (program := tmp_path / "program.py").write_text(FOLLOWING)
  os.mkfifo(tmp_path / "pipe")
  for _ in range(5):
    assert launch.launch(2, 1, [str(tmp_path / "pipe")], program) == 7


def test_processes_with_different_configs_are_refused(monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(processes, "all_gather", lambda fields: [fields, fields | {"steps": 7}])
  with one_sentence("steps is 5 for process 0, but 7 for process 1"):
    processes.require_equal({"seed": 0, "steps": 5})


@pytest.mark.parametrize(
  "mine, others, kind, says",
  [
    (ConfigError("steps=0"), None, JobConfigError, "steps=0"),
    (FileNotFoundError(errno.ENOENT, "no such file"), None, JobConfigError, "no such file"),
    (PermissionError(errno.EACCES, "no permission"), None, JobConfigError, "no permission"),
    (Unavailable("in use"), None, JobUnavailable, "in use"),
    (OSError(errno.EIO, "storage is away"), None, JobUnavailable, "storage is away"),
    (OSError(errno.ESTALE, "stale file handle"), None, JobUnavailable, "stale"),
    (OSError(errno.ENOSPC, "no space left"), None, JobUnavailable, "no space left"),
    (StorageError(errno.ETIMEDOUT, "no answer"), None, JobUnavailable, "no answer"),
    (StorageError(errno.ENOENT, "no such bucket"), None, JobConfigError, "no such bucket"),
    (ConfigError("not the same folder"), [True, "stale"], JobUnavailable, r"stale \(process 1\)"),
    (None, [False, "steps=0"], JobConfigError, r"steps=0 \(process 1\)"),
  ],
)
def test_trouble_that_may_pass_is_not_bad_input(
  mine: Exception | None, others: Any, kind: type, says: str, monkeypatch: pytest.MonkeyPatch
):
  """The exit status of bad input ends a job for good."""

  def together() -> None:
    with processes.raise_together():
      if mine:
        raise mine

  monkeypatch.setattr(processes, "all_gather", lambda value: [value, others])
  with pytest.raises(kind, match=says):
    together()


@pytest.mark.full
def test_a_process_that_finds_no_coordinator_names_it(tmp_path: Path):
  where = {"coordinator": "127.0.0.1:1", "processes": 2, "process": 1, "timeout": 1}
  asked = flags("fsdp", tmp_path, **{f"distributed.{field}": value for field, value in where.items()})
  done = subprocess.run([sys.executable, "train.py", *asked], cwd=ROOT, capture_output=True, text=True, check=False)
  assert done.returncode == 1  # not 2: another start may find it
  last = done.stderr.strip().splitlines()[-1]
  for part in ("error: ", "127.0.0.1:1", "distributed.timeout=1 s"):
    assert part in last


@pytest.mark.parametrize("step, tasks", [("n1", "4"), ("n1", "1"), ("", "4")])
def test_a_time_out_in_a_slurm_step_says_how_many_tasks_were_asked_for(
  step: str, tasks: str, monkeypatch: pytest.MonkeyPatch
):
  """As in an interactive step, where one process is started by hand. Without a step SLURM's variables do not count."""
  said = []
  monkeypatch.setattr(processes, "_deadline", lambda seconds, message: said.append(message) or contextlib.nullcontext())
  monkeypatch.setattr(jax.distributed, "initialize", lambda **_: None)
  monkeypatch.setenv("SLURM_NTASKS", tasks)
  monkeypatch.setenv("SLURM_STEP_NODELIST", step) if step else monkeypatch.delenv("SLURM_STEP_NODELIST", raising=False)
  processes.join(config().distributed)
  asked = " (SLURM_NTASKS=4 asks for 4: start all of them with srun, or set SLURM_NTASKS=1 to run this alone)"
  late = "not all processes met at the cluster's coordinator within distributed.timeout=300 s"
  assert said == [late + (asked if step and tasks == "4" else "")]


@pytest.mark.parametrize(
  "fields, parts",
  [
    ({"coordinator": "a:1"}, ["distributed.coordinator='a:1'", "distributed.processes=0", "all three"]),
    ({"processes": 2, "process": 0}, ["distributed.coordinator=''", "all three"]),
    ({"coordinator": "a:1", "processes": 2, "process": 2}, ["distributed.process=2", "0 to 1"]),
    ({"coordinator": "a", "processes": 2, "process": 0}, ["distributed.coordinator='a'", "HOST:PORT"]),
    ({"coordinator": "a:99999", "processes": 2, "process": 0}, ["distributed.coordinator='a:99999'", "HOST:PORT"]),
    ({"timeout": -1}, ["distributed.timeout=-1", "at least 1"]),
  ],
)
def test_distributed_fields_that_do_not_fit_together_are_refused(fields: dict, parts: list[str]):
  with one_sentence(*parts):
    start(**fields)


def test_a_port_in_use_is_refused():
  with socket.create_server(("", 0)) as server:
    port = server.getsockname()[1]
    with one_sentence(f"distributed.coordinator='localhost:{port}'", "in use", kind=Unavailable):
      start(coordinator=f"localhost:{port}", processes=2, process=0)


def start(**fields: object) -> None:
  """Joins a job with these `distributed` fields."""
  given = config("fsdp").distributed
  given.update(fields)
  processes.join(given)


def test_a_timer_is_due_after_its_minutes(monkeypatch: pytest.MonkeyPatch):
  now = [0.0]
  monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
  timer, never = signals.Timer(minutes=2), signals.Timer(minutes=0)
  now[0] = 119.0
  assert not timer.due
  now[0] = 120.0
  assert timer.due
  assert not never.due
  timer.restart()
  assert not timer.due


def test_requests_of_several_processes_count_one_call_later(monkeypatch: pytest.MonkeyPatch):
  """A save answers all requests until then, so that the timer does not ask for a second one a step later.

  If another run has taken over, it also ends one call later.
  """
  monkeypatch.setattr(signals.jax, "process_count", lambda: 2)
  requests, due = signals.Requests(), [True]
  monkeypatch.setattr(signals.Timer, "due", property(lambda self: due[0]))
  nothing, save = signals.Decision(), signals.Decision(save=True)
  assert requests.decide() == nothing
  requests.saved()  # one that was scheduled
  assert requests.decide() == nothing
  assert requests.decide() == save
  due[0] = False
  requests.signal = "SIGTERM"
  requests.saved()
  assert requests.decide() == nothing
  requests.saved()
  assert requests.decide() == signals.Decision(stop=True)
  monkeypatch.setattr(processes, "all_gather", lambda mine: ["", mine])  # the other process knows nothing
  requests.lost = lambda: "another run writes here"
  assert requests.decide() == signals.Decision(stop=True)
  with pytest.raises(JobConfigError, match="another run writes here"):
    requests.decide()


def test_requests_work_in_another_thread():
  """Only the main thread can handle signals. A run in another thread works without handling them."""
  raised = []

  def use() -> None:
    try:
      with signals.Requests() as requests:
        assert requests.decide() == signals.Decision()
    except BaseException as error:
      raised.append(error)

  thread = threading.Thread(target=use)
  thread.start()
  thread.join()
  assert not raised
