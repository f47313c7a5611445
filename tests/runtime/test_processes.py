"""Jobs of several processes on this machine: they equal one process, resume on any number, and fail together."""

import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import pytest
from helpers import config, measured, one_sentence, program, strategy

import train
from checkpointing.save import Checkpoints
from errors import ConfigError, JobConfigError
from runtime import command_line, processes, signals
from tools import launch
from training.loop import LoopState

ROOT = Path(__file__).parents[2]
TINY = {
  "model__depth": 1, "model__width": 32, "model__heads": 8, "model__kv_heads": 8, "model__seq_len": 8,
  "data__name": "synthetic", "log_every": 1, "eval_every": 4, "eval_examples": 32, "sample_length": 0,
  "model__dropout": 0.1, "steps": 14, "compilation_cache_dir": "~/.cache/meshwright/tests",
}  # fmt: skip


def flags(name: str, workdir: Path, **fields: object) -> list[str]:
  """The flags of train.py for a tiny run."""
  given = [f"--config.{field.replace('__', '.')}={value}" for field, value in (TINY | fields).items()]
  return [f"--config={ROOT}/configs/{name}.py:tiny", f"--workdir={workdir}", *given]


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


SIGNALLED = f"""
import os, runpy, signal, sys, threading, time
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})

def later():
  metrics = Path(next(a for a in sys.argv if a.startswith("--workdir="))[10:]) / "metrics.jsonl"
  while not metrics.exists() or metrics.read_text().count("train") < 2:
    time.sleep(0.01)
  os.kill(os.getpid(), signal.SIGTERM)

if "--config.distributed.process=1" in sys.argv:
  threading.Thread(target=later, daemon=True).start()
runpy.run_path({str(ROOT / "train.py")!r}, run_name="__main__")
"""


@pytest.mark.full
def test_a_job_resumes_with_other_processes_and_strategies(tmp_path: Path, capfd: pytest.CaptureFixture):
  """2 × 4 → 1 × 8 → 4 × 2 devices, compared with an uninterrupted process: the same lines, with numbers to 1e-5.

  A signal reaches one of the first two processes, and both stop after the same step.
  """
  program, workdir = tmp_path / "program.py", tmp_path / "run"
  program.write_text(SIGNALLED)
  train.train(config("fsdp", **TINY), tmp_path / "whole")
  capfd.readouterr()
  assert launch.launch(2, 4, flags("pmap_ddp", workdir), program) == 0
  output = capfd.readouterr().out
  assert "[0] devices   8 × CPU device, simulated in 2 processes" in output
  assert not re.search(r"\[1\] (train|validation|devices)", output), "only process 0 may report"
  assert "[1] SIGTERM: will save and end" in output
  assert "[0] SIGTERM" not in output
  stopped = int(re.search(r"stopped   by a signal after step (\d+)", output)[1])
  assert f"checkpoint {stopped} saved" in output
  assert stopped < TINY["steps"] - 2

  train.train(config("hsdp", **TINY, stop_after=stopped + 1), workdir)
  assert f"resumed   at step {stopped}, saved by pmap_ddp" in capfd.readouterr().out
  assert launch.launch(4, 2, flags("fsdp", workdir)) == 0
  output = capfd.readouterr().out
  assert f"[0] resumed   at step {stopped + 1}, saved by hsdp" in output
  assert "processes was 1 and is now 4" in output
  parts = (workdir / "checkpoints" / str(TINY["steps"]) / "params").glob("ocdbt.process_*")
  assert len(list(parts)) == 4, "every process must write its part"

  reference = measured(tmp_path / "whole")
  ours = [line for line in measured(workdir) if line["split"] == "train" or line["step"] != stopped + 1]
  reference = [line for line in reference if line["split"] == "train" or line["step"] != stopped + 1]
  assert len(ours) == len(reference)
  for mine, expected in zip(ours, reference, strict=True):
    assert mine.pop("split") == expected.pop("split")
    assert mine == pytest.approx(expected, rel=1e-5)


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


def test_a_mistake_ends_all_processes_with_its_sentence(tmp_path: Path):
  """Runs the command as a user does. Each process prints the sentence."""
  command = ["-m", "tools.launch", "--processes=2", "--devices-per-process=4", "--"]
  done = subprocess.run(
    [sys.executable, *command, *flags("fsdp", tmp_path, batch_size=12)],
    cwd=ROOT, capture_output=True, text=True, check=False,
  )  # fmt: skip
  assert done.returncode == 2
  for rank in range(2):
    assert f"[{rank}] error: batch_size=12 is not a multiple" in done.stdout
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
  launch.SECONDS_TO_END, before = 0.1, launch.SECONDS_TO_END
  try:
    assert launch.launch(3, 1, [], program) == 7
  finally:
    launch.SECONDS_TO_END = before
  assert sorted(capfd.readouterr().out.splitlines()) == [f"[{rank}] this is {rank}" for rank in range(3)]


FAILING = f"""
import runpy, sys
sys.path.insert(0, {str(ROOT)!r})
import data
from checkpointing import restore
from errors import ConfigError

def begin(*_):
  raise RuntimeError("something broke here")

def read(batches, step, rows, before=data.Batches.read):
  if step == 3:
    raise ERROR("example 7 broke here")
  return before(batches, step, rows)

if "--config.distributed.process=1" in sys.argv:
  PATCH
runpy.run_path({str(ROOT / "train.py")!r}, run_name="__main__")
"""


@pytest.mark.full
@pytest.mark.parametrize(
  "patch, error, status, says",
  [
    ("restore.begin = begin", "", 1, "RuntimeError: something broke here"),
    ("data.Batches.read = read", "OSError", 1, "OSError: example 7 broke here"),
    ("data.Batches.read = read", "ConfigError", 2, "error: example 7 broke here"),
  ],
)
def test_a_process_that_fails_alone_ends_the_job(
  patch: str, error: str, status: int, says: str, tmp_path: Path, capfd: pytest.CaptureFixture
):
  """Even though the other waits for it in a collective, both for a checkpoint, and jax, on exit, for the other."""
  program = tmp_path / "program.py"
  program.write_text(FAILING.replace("PATCH", patch).replace("ERROR", error))
  start = time.monotonic()
  assert launch.launch(2, 1, flags("fsdp", tmp_path / "run", checkpoint__every=1), program) == status
  assert time.monotonic() - start < 100  # on exit, jax would wait 300 s
  assert f"[1] {says}" in capfd.readouterr().out.splitlines()


def test_an_error_of_one_process_ends_it_at_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
  """One that all processes raise together ends them in the orderly way."""
  ended: list[int] = []
  monkeypatch.setattr(processes.os, "_exit", ended.append)
  for joined, error, expected in [
    (True, ConfigError("alone"), [2]),
    (True, JobConfigError("together"), []),
    (False, ConfigError("the only process"), []),
  ]:
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda joined=joined: joined)
    ended.clear()
    with pytest.raises(SystemExit) as orderly:
      command_line.fail(error, status=2)
    assert (ended, orderly.value.code) == (expected, 2)
    assert capsys.readouterr().err == f"error: {error}\n"


def test_processes_with_different_configs_are_refused(monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(processes, "all_gather", lambda fields: [fields, fields | {"steps": 7}])
  with one_sentence("steps is 5 for process 0, but 7 for process 1"):
    processes.require_equal({"seed": 0, "steps": 5})


def test_a_process_that_finds_no_coordinator_names_it(tmp_path: Path):
  where = {"coordinator": "127.0.0.1:1", "processes": 2, "process": 1, "timeout": 1}
  asked = flags("fsdp", tmp_path, **{f"distributed.{field}": value for field, value in where.items()})
  done = subprocess.run([sys.executable, "train.py", *asked], cwd=ROOT, capture_output=True, text=True, check=False)
  assert done.returncode == 2
  last = done.stderr.strip().splitlines()[-1]
  for part in ("error: ", "127.0.0.1:1", "distributed.timeout=1 s"):
    assert part in last


@pytest.mark.parametrize(
  "fields, parts",
  [
    ({"coordinator": "a:1"}, ["distributed.coordinator='a:1'", "distributed.processes=0", "all three"]),
    ({"processes": 2, "process": 0}, ["distributed.coordinator=''", "all three"]),
    ({"coordinator": "a:1", "processes": 2, "process": 2}, ["distributed.process=2", "0 to 1"]),
    ({"coordinator": "a", "processes": 2, "process": 0}, ["distributed.coordinator='a'", "HOST:PORT"]),
    ({"coordinator": "a:99999", "processes": 2, "process": 0}, ["distributed.coordinator='a:99999'", "HOST:PORT"]),
  ],
)
def test_distributed_fields_that_do_not_fit_together_are_refused(fields: dict, parts: list[str]):
  with one_sentence(*parts):
    start(**fields)


def test_a_port_in_use_is_refused():
  with socket.create_server(("", 0)) as server:
    port = server.getsockname()[1]
    with one_sentence(f"distributed.coordinator='localhost:{port}'", "in use"):
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
  """A save answers all requests until then, so that the timer does not ask for a second one a step later."""
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
