"""A job that dies or hangs is started again, says so in one line, and gives up when that makes no sense.

The processes here are small programs that do what a list says. tests/job/test_healing.py does it with train.py.
"""

import argparse
import errno
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT, in_full, one_sentence

from errors import Unavailable
from job import attempt, slurm, supervisor
from job.supervisor import Policy, supervise
from reporting import heartbeat, pages
from reporting.appender import Appender
from runtime.storage.bucket import here
from tools import chaos, launch

PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path

flags = dict(flag.lstrip("-").partition("=")[::2] for flag in sys.argv[1:])
rank, count = int(flags["config.distributed.process"]), int(flags["config.distributed.processes"])
work = Path(flags["workdir"])
number = max(int(file.stem) for file in (work / "attempts").glob("*.log"))
acts = json.loads((work / "plan.json").read_text())
act = {"end": 0.0} | (acts[number - 1] if number <= len(acts) else {})
mine = act.get(str(rank), {})
if not mine.get("early"):
  signal.signal(signal.SIGTERM, lambda *_: (print("stopped", flush=True), sys.exit(0)))
print(f"start {number} with {count}", flush=True)
if mine.get("refuse") and flags.get("config.strategy") != "other":
  print("error: does not fit", flush=True)
  sys.exit(2)
(work / "heartbeats").mkdir(exist_ok=True)
for step in act.get("saves", []):
  (work / "checkpoints" / str(step)).mkdir(parents=True, exist_ok=True)
beat = {"number": number, "process": rank, "pid": os.getpid(), "since": time.time(), "step": act.get("step", 0),
        "doing": mine.get("doing", "train"), "slowest": 0.01,
        "began": 0, "host": "", "wall_time": {}, "furthest": 0}
part = work / "heartbeats" / f"{rank}.part"

def write():
  now = time.time()
  since = beat["since"] if mine.get("waits") or "doing" in mine else now
  beat.update(time=now, since=since)
  part.write_text(json.dumps(beat))
  part.replace(part.with_suffix(".json"))

write()
read = lambda file: json.loads(file.read_text()) if file.exists() else {}
while any(read(work / "heartbeats" / f"{other}.json").get("number") != number for other in range(count)):
  time.sleep(0.01)  # so that they do the rest at the same time
time.sleep(mine.get("after", 0.0))
if "prints" in mine:
  print(mine["prints"], flush=True)
if "kill" in mine:
  os.kill(os.getpid(), mine["kill"])
if "status" in mine:
  sys.exit(mine["status"])
until = time.monotonic() + mine.get("end", act["end"])
while time.monotonic() < until:
  time.sleep(0.02)
  if not mine.get("silent"):
    write()
if "leaves" in act:
  (work / "heartbeats" / f"{rank}.json").unlink()
  time.sleep(act["leaves"])
"""
FOREVER = 60.0
DIES = {"kill": signal.SIGKILL, "after": 0.2}


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
  """Runs a job whose starts do what is given: `end`, when processes end; `saves`; `step`; and by rank what it does."""
  (tmp_path / "program.py").write_text(PROGRAM)
  monkeypatch.setattr(heartbeat, "SILENT", 0.7)
  monkeypatch.setattr(supervisor, "HELD", 0.5)
  monkeypatch.setattr(supervisor, "POLL", 0.05)
  monkeypatch.setattr(supervisor, "LONGEST_WAIT", 0.2)

  def run(plan: list[dict[str, Any]], processes: int = 2, where: Any = None, **policy: Any) -> int:
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / "plan.json").write_text(json.dumps(plan))
    asked = Policy(processes, 1, **{"patience": 5.0, "shortest": 1.5} | policy)
    return supervise(asked, [f"--workdir={tmp_path / 'run'}"], tmp_path / "program.py", where)

  return run


def starts(tmp_path: Path) -> list[str]:
  """How many processes each start had."""
  logs = sorted((tmp_path / "run" / "attempts").iterdir(), key=lambda log: int(log.stem))
  return [found for log in logs for found in re.findall(r"\[0\] start \d+ with (\d+)", log.read_text())]


def test_a_killed_process_is_one_line_and_a_new_start(job: Callable[..., int], tmp_path: Path, capfd: Any):
  """The others fail because of it, a moment before or after. What they print is in the log only."""
  dies = {"end": FOREVER, "saves": [3], "step": 5, "2": DIES}
  for after in (0.15, 0.25):
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    assert job([dies | {"0": {"status": 1, "after": after, "prints": "Traceback: lost a peer"}}, {}], 3) == 0
    output = capfd.readouterr().out
    (line,) = re.findall("^restart .*", output, re.MULTILINE)
    assert re.search(r"process 2 of 3 on \S+ was killed by SIGKILL after step 5; starts again from checkpoint 3", line)
    log = Path(line.partition("log: ")[2])
    assert "[0] Traceback: lost a peer" in log.read_text()
    assert "Traceback" not in output
    assert "[0] start 2 with 3" in output


def test_a_status_that_is_no_signal_is_shown(job: Callable[..., int], capfd: Any):
  """srun ends with 233 if it cannot reach a node, and 105 is no signal."""
  assert job([{"end": FOREVER, "1": {"status": 233, "after": 0.1, "prints": "srun: error: no node"}}, {}]) == 0
  assert re.search(r"process 1 of 2 on \S+ failed with status 233 \(srun: error: no node\)", capfd.readouterr().out)


@pytest.mark.parametrize("who", in_full([0, 1], 1))
def test_a_process_that_hangs_is_found(who: int, job: Callable[..., int], capfd: Any):
  """All processes are late then, since they wait for it. The one that is silent is named."""
  hangs = {"end": FOREVER, "step": 4, str(who): {"kill": signal.SIGSTOP, "after": 0.0}, str(1 - who): {"waits": True}}
  began = time.monotonic()
  assert job([hangs, {}]) == 0
  assert time.monotonic() - began < FOREVER / 2
  assert re.search(
    rf"restart   process {who} of 2 on \S+ made no progress for \d+ s \(train\) after step 4", capfd.readouterr().out
  )


@pytest.mark.full
def test_what_is_no_step_may_take_longer(job: Callable[..., int], capfd: Any):
  """Compiling for 2 s is no hang, where a step of 2 s would be one. It is a hang when the patience is over."""
  compiles = {"end": 2.0, **{str(rank): {"doing": "compile"} for rank in range(2)}}
  assert job([compiles]) == 0
  assert "restart" not in capfd.readouterr().out
  assert job([{}, compiles | {"end": FOREVER}, {}], patience=1.0) == 0
  assert "(compile)" in capfd.readouterr().out


@pytest.mark.full
def test_a_process_that_ends_in_order_does_not_hang(job: Callable[..., int], capfd: Any):
  """It has no heartbeat any more, like one that starts. The job has run for longer than the patience then."""
  assert job([{"end": 3.0, "leaves": 1.0}], patience=3.0) == 0
  assert "restart" not in capfd.readouterr().out


@pytest.mark.full
def test_a_full_disk_does_not_end_a_job_that_trains(
  job: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
):
  """No sign of life can be written, nor what processes print, nor what the supervisor must know."""

  def full(path: Path, text: str) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(pages, "write", full)
  monkeypatch.setattr(attempt, "Appender", lambda path: path.touch() or Appender(Path("/dev/full")))
  trains = {"silent": True, "prints": "training " * 20_000}
  assert job([{"end": 3.0, "0": trains, "1": trains}]) == 0
  printed = capfd.readouterr()
  assert "restart" not in printed.out
  assert printed.out.count("[0] training") == 1
  assert "supervisor.json cannot be written (No space left on device)" in printed.out
  assert printed.err.count("cannot be written (No space left on device)") == 1


@pytest.mark.full
def test_storage_that_does_not_answer_ends_no_job(job: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capfd: Any):
  def read(folder: Path) -> list[int]:
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

  monkeypatch.setattr(supervisor, "steps", read)
  assert job([{"end": FOREVER, "step": 4, "1": DIES}, {}]) == 0
  assert "SIGKILL after step 4; starts again from the beginning" in capfd.readouterr().out


@pytest.mark.parametrize("workdir, source", [("run", "the beginning"), ("s3://bucket/run", "what the bucket has")])
def test_a_start_that_fails_before_any_checkpoint_is_known_says_from_where_the_next_goes_on(
  workdir: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
):
  """A new machine does not know yet what is in the bucket."""
  monkeypatch.chdir(tmp_path)
  flags, where = [f"--workdir={workdir}"], attempt.Here(2, 1)
  folder = here(attempt.workdir_of(flags))
  (folder / "attempts").mkdir(parents=True)
  with attempt.Forwarded() as signals:
    job = supervisor.Supervisor(Policy(2, 1), flags, folder, tmp_path / "program.py", signals, where)
    assert job._fail("process 1 of 2", supervisor.Failure(1, 0, "was killed by SIGKILL", 137)) is None
  assert f"was killed by SIGKILL after step 0; starts again from {source}; log" in capfd.readouterr().out


def test_output_that_fits_on_no_disk_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any):
  output = attempt.Output(tmp_path / "removed")
  output.open(1)  # there is no such folder
  output.take(0, "first\n")
  output.close()
  (tmp_path / "removed").mkdir()
  monkeypatch.setattr(attempt, "Appender", lambda path: Appender(Path("/dev/full")))
  output.open(2)
  output.take(0, "second\n")
  output.take(0, "third\n")
  output.close()
  output.release()
  printed = capfd.readouterr()
  assert printed.out.splitlines() == ["[0] first", "[0] second", "[0] third"]
  assert output.last(0) == "third"
  assert [line.rpartition("(")[2] for line in printed.err.splitlines()] == [
    "No such file or directory); the job goes on without it",
    "No space left on device); training continues, and the next write retries",
  ]


def test_it_gives_up_where_nothing_is_saved_any_more(job: Callable[..., int], capfd: Any):
  """A start fails, a checkpoint is written, two more fail. Steps differ, so no batch is to blame."""
  fails = [{"end": FOREVER, "step": step, "saves": saves, "1": DIES} for step, saves in ((1, []), (9, [8]), (10, []))]
  assert job(fails, restarts=1) == 128 + signal.SIGKILL
  last = capfd.readouterr().out.splitlines()[-1]
  assert "gave up   2 starts in a row failed without getting past checkpoint 8: process 1 of 2" in last
  assert "SIGKILL after step 10" in last


def test_a_batch_that_makes_every_start_fail_is_named(job: Callable[..., int], capfd: Any):
  fails = {"end": FOREVER, "step": 7, "saves": [4], "0": {"status": 1, "after": 0.2, "prints": "ValueError: odd"}}
  assert job([fails] * 9, restarts=9) == 1
  last = capfd.readouterr().out.splitlines()[-1]
  assert "the last 3 starts failed after step 7, so look at batch 8: process 0 of 2" in last
  assert "failed with status 1 (ValueError: odd)" in last


@pytest.mark.parametrize("status", [2, 3])
def test_what_would_fail_again_is_not_started_again(status: int, job: Callable[..., int], tmp_path: Path, capfd: Any):
  """Bad input, and a run that diverged."""
  assert job([{"end": FOREVER, "0": {"prints": "error: bad", "status": status}}]) == status
  output = capfd.readouterr().out
  assert "[0] error: bad" in output
  assert starts(tmp_path) == ["2"]


@pytest.mark.full
def test_a_job_that_another_run_has_replaced_is_not_started_again_with_fewer(
  job: Callable[..., int], tmp_path: Path, capfd: Any
):
  """It ends with the status of bad input, but after a step. So the number of processes is not to blame."""
  lost = {"end": FOREVER, "step": 2, "saves": [1], "3": DIES}
  replaced = {"end": FOREVER, "step": 4, "1": {"prints": "error: taken over", "status": 2, "after": 0.2}}
  assert job([lost, replaced], 4, lost_for=FOREVER) == 2
  output = capfd.readouterr().out
  assert output.count("[1] error: taken over") == 1
  assert "cannot run" not in output
  assert starts(tmp_path) == ["4", "3"]


def test_fewer_processes_go_on_until_the_lost_one_is_back(job: Callable[..., int], tmp_path: Path, capfd: Any):
  """4 → 3, which cannot run → 2, and 4 again when the place of the lost process has returned."""
  lost = {"end": FOREVER, "step": 2, "saves": [1], "3": DIES}
  cannot = {"end": FOREVER, **{str(rank): {"refuse": True} for rank in range(3)}}
  began = time.monotonic()
  assert job([lost, cannot, {"end": FOREVER, "step": 3}, {}], 4, lost_for=2.0) == 0
  assert time.monotonic() - began < FOREVER  # it was stopped
  output = capfd.readouterr().out
  assert "smaller   3 processes cannot run: does not fit" in output
  assert "restart   4 of 4 processes can run again" in output
  assert starts(tmp_path) == ["4", "3", "2", "4"]


@pytest.mark.full
def test_flags_for_fewer_processes_are_tried_before_still_fewer(job: Callable[..., int], tmp_path: Path):
  lost = {"end": FOREVER, "step": 2, "saves": [1], "3": DIES}
  cannot = {"end": 0.2, **{str(rank): {"refuse": True} for rank in range(3)}}
  assert job([lost, cannot, cannot], 4, lost_for=FOREVER, smaller=("--config.strategy=other",)) == 0
  assert starts(tmp_path) == ["4", "3", "3"]


def alive(pids: list[int]) -> list[int]:
  found = []
  for pid in pids:
    try:
      state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
      continue
    found += [pid] if state != "Z" else []
  return found


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends processes with their parent")
def test_a_killed_supervisor_takes_its_processes_along_and_goes_on(job: Callable[..., int], tmp_path: Path, capfd: Any):
  """Its second start counts the failures of the first one."""
  dies, stays = {"end": FOREVER, "step": 1, "1": DIES}, {"end": FOREVER, "step": 2}
  job([{}])
  run = tmp_path / "run"
  shutil.rmtree(run)
  run.mkdir()
  (run / "plan.json").write_text(json.dumps([dies, stays, dies | {"step": 3}]))
  code = "import sys; from pathlib import Path; from job import supervisor as s; s.HELD = s.LONGEST_WAIT = 0.2;"
  code += "sys.exit(s.supervise(s.Policy(2, 1, restarts=1), [sys.argv[1]], Path(sys.argv[2])))"
  command = [sys.executable, "-c", code, f"--workdir={run}", str(tmp_path / "program.py")]
  process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
  while len(beats := heartbeat.of_job(run)) < 2 or any(beat["step"] != 2 for beat in beats.values()):
    assert process.poll() is None
    time.sleep(0.02)
  pids = [beat["pid"] for beat in beats.values()]
  assert len(alive(pids)) == 2
  process.kill()
  process.wait()
  until = time.monotonic() + 5
  while alive(pids) and time.monotonic() < until:
    time.sleep(0.02)
  assert not alive(pids)
  again = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
  assert "gave up   2 starts in a row failed without getting past the beginning" in again.stdout
  assert again.returncode == 128 + signal.SIGKILL


@pytest.mark.parametrize(
  "plan, status",
  [
    ([{"end": FOREVER}], 0),
    pytest.param([{"end": FOREVER, "0": {"early": True}}], 128 + signal.SIGTERM, marks=pytest.mark.full),
    ([{"end": FOREVER, "step": 1, "1": DIES}] * 3, 0),
  ],
  ids=["run", "start", "wait"],
)
def test_a_signal_ends_the_job_and_not_only_its_processes(
  plan: list[dict], status: int, job: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
  """While processes run, while one starts and has no handler of signals yet, and while the job waits for a start."""
  monkeypatch.setattr(supervisor, "LONGEST_WAIT", FOREVER)
  if len(plan) > 1:
    monkeypatch.setattr(supervisor.Supervisor, "_sleep", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
  else:
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
  assert job(plan) == status
  assert len(starts(tmp_path)) == 1


def test_a_job_without_a_workdir_is_refused():
  with one_sentence("--workdir is missing", "name one"):
    supervise(Policy(2, 1), ["--config=configs/fsdp.py"])
  with one_sentence("--workdir has no value here", "write --workdir=DIR"):
    supervise(Policy(2, 1), ["--config=configs/fsdp.py", "--workdir", "runs/a"])


@pytest.mark.parametrize("value", ["0", "0.0", "00.", ".0"])
def test_a_job_that_gives_no_signs_of_life_is_refused(value: str, tmp_path: Path):
  """It would seem to hang after --patience, every time."""
  with one_sentence("--config.runtime.heartbeat=0", "leave it out"):
    supervise(Policy(2, 1), [f"--workdir={tmp_path}", f"--config.runtime.heartbeat={value}"])
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
  "flag, words",
  [
    ("--restarts=0", "restarts=0 must be at least 1"),
    ("--patience=0", "patience=0.0 must be a finite number above 0"),
    ("--lost-for=-1", "lost-for=-1.0 must not be negative"),
    ("--smaller=--x='a", '--smaller="--x=\'a" cannot be read (No closing quotation); close each quote'),
  ],
)
def test_bad_values_are_named(flag: str, words: str, monkeypatch: pytest.MonkeyPatch, capfd: Any):
  monkeypatch.setattr(sys, "argv", ["launch", "--restart", flag, "--", "--config=configs/fsdp.py"])
  with pytest.raises(SystemExit, match="2"):
    launch.main()
  assert words in capfd.readouterr().err


def test_without_such_flags_plan_chooses_some_once(job: Callable[..., int], tmp_path: Path, capfd: Any):
  """Only where the given ones cannot run. tests/lab/test_smaller.py says what plan chooses."""
  asked = []
  chosen = ("--config.strategy=other",), "other on mesh data=3 is the best of 5 plans"
  choose = lambda *given: asked.append(given[2:]) or chosen
  lost = {"end": FOREVER, "step": 2, "saves": [1], "3": DIES}
  cannot = {"end": 0.2, **{str(rank): {"refuse": True} for rank in range(3)}}
  assert job([lost, cannot, cannot | {"0": {"after": 0.1}}], 4, lost_for=FOREVER, choose=choose) == 0
  assert starts(tmp_path) == ["4", "3", "3"]
  assert asked == [(3, 1)]
  assert capfd.readouterr().out.count("smaller   3 processes: other on mesh data=3 is the best of 5 plans\n") == 1


@pytest.mark.full
def test_what_plan_needs_is_imported_only_then():
  code = "import sys; from tools import launch; sys.exit('lab' in sys.modules)"
  assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


SLURM = {  # stands in for SLURM's commands: two nodes of two tasks, of which one is gone after the first start
  "srun": 'node=none; for word; do case "$word" in --nodelist=*) node="${word#*=}" ;; esac; done\n'
  'while [ "${1#--}" != "$1" ]; do shift; done; echo "on $node with ${JAX_LOCAL_DEVICE_IDS-no} GPUs"; exec "$@"',
  "squeue": 'case "$*" in *--steps*) cat "$FOLDER/steps" 2>/dev/null; exit ;;'
  ' *%T*) cat "$FOLDER/state" 2>/dev/null || echo RUNNING; exit ;; esac\n'
  'if [ -e "$FOLDER/run/attempts/1.log" ]; then echo n1; else echo "n1,n2"; fi',
  "scontrol": 'case "$*" in *hostnames*) echo "$3" | tr , "\\n" ;; *) echo "NodeName=$4 NodeAddr=127.0.0.1 x" ;; esac',
  "scancel": 'echo "$@" >>"$FOLDER/cancelled"; case "$1" in *KILL) rm "$FOLDER/steps" ;; esac',
}


@pytest.fixture
def on_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
  """Makes this process believe that it runs in a SLURM job of two nodes."""
  (tmp_path / "bin").mkdir()
  for name, script in SLURM.items():
    (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "bin" / name).chmod(0o755)
  given = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1,n2", "SLURM_NTASKS_PER_NODE": "2", "FOLDER": str(tmp_path)}
  for name, value in (given | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}).items():
    monkeypatch.setenv(name, value)
  monkeypatch.delenv("SLURM_GPUS_ON_NODE", raising=False)
  return tmp_path


def test_on_slurm_a_node_that_is_gone_is_done_without(on_slurm: Path, job: Callable[..., int], capfd: Any):
  """Both its tasks are left out, without --lost-for. The line names the node."""
  dies = {"end": FOREVER, "step": 5, "saves": [3], "3": DIES}
  assert job([dies, {}], 4, where=slurm.Nodes()) == 0
  output = capfd.readouterr().out
  assert re.search("restart   process 3 of 4 on n2 was killed by SIGKILL after step 5; starts again from", output)
  assert starts(on_slurm) == ["4", "2"]
  nodes = [re.findall(r"\[\d\] on (n\d)", (on_slurm / f"run/attempts/{n}.log").read_text()) for n in (1, 2)]
  assert [sorted(found) for found in nodes] == [["n1", "n1", "n2", "n2"], ["n1", "n1"]]


@pytest.mark.full
@pytest.mark.parametrize("full", [False, True])
def test_on_slurm_the_node_that_is_gone_is_named(
  full: bool, on_slurm: Path, job: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capfd: Any
):
  """SLURM has not noticed it yet. A process on another node fails because of it, and srun cannot end this one.

  If the disk is full, no process gives signs of life, so none is blamed for that.
  """
  monkeypatch.setattr(heartbeat, "can_be_written", lambda workdir: not full)
  monkeypatch.setattr(attempt, "SECONDS_TO_END", 0.5)
  monkeypatch.setattr(slurm, "SECONDS_TO_KILL", 0.5)
  (on_slurm / "steps").write_text("7.0 bash\n7.1 meshwright\n7.3 meshwright\n7.batch batch\n")
  stops = {"kill": signal.SIGSTOP, "after": 0.0}
  dies = {"end": FOREVER, "step": 5, "saves": [3], "0": {"status": 1, "after": 0.3}, "2": stops}
  assert job([dies, {}], 4, where=slurm.Nodes()) == 0
  blamed = "0 of 4 on n1 failed with status 1" if full else "2 of 4 on n2 gave no sign of life when others failed"
  assert re.search(f"restart   process {blamed}", capfd.readouterr().out)
  assert (on_slurm / "cancelled").read_text() == "--signal=KILL 7.1 7.3\n"  # before srun is killed


@pytest.mark.full
def test_on_slurm_a_job_that_slurm_ends_is_not_started_again(on_slurm: Path, job: Callable[..., int], capfd: Any):
  """Its steps then fail. What they print is shown: they may have saved."""
  (on_slurm / "state").write_text("COMPLETING\n")
  assert job([{"end": FOREVER, "1": {"status": 7, "prints": "saved"}}], 4, where=slurm.Nodes()) == 7
  assert "[1] saved" in capfd.readouterr().out
  assert starts(on_slurm) == ["4"]


def test_on_slurm_a_task_has_its_part_of_the_gpus(on_slurm: Path, monkeypatch: pytest.MonkeyPatch):
  """JAX would give each step the first GPU. A signal goes to the steps."""
  monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
  nodes = slurm.Nodes()
  assert (nodes.processes, nodes.devices) == (4, 4)
  ids = [nodes.environment(place)["JAX_LOCAL_DEVICE_IDS"] for place in nodes.places()]
  assert ids == ["0,1,2,3", "4,5,6,7"] * 2
  assert [nodes.host(place) for place in nodes.places()] == ["n1", "n1", "n2", "n2"]
  nodes.send([], signal.SIGTERM)
  assert (on_slurm / "cancelled").read_text() == "--signal=TERM 7\n"


def test_slurm_that_does_not_answer_is_not_waited_for(on_slurm: Path, monkeypatch: pytest.MonkeyPatch):
  """Without an answer all nodes may be there. At the start, their names are needed."""
  nodes = slurm.Nodes()
  monkeypatch.setattr(slurm, "SECONDS_TO_ANSWER", 0.05)
  for name in ("squeue", "scontrol", "scancel"):
    (on_slurm / "bin" / name).write_text("#!/bin/sh\nexec sleep 30\n")
  assert nodes.places() == [0, 1, 2, 3]
  assert not nodes.ending()
  assert nodes.address(2) == "n2"
  nodes.send([], signal.SIGTERM)
  with one_sentence("scontrol show hostnames n1,n2", "names no node", kind=Unavailable):
    slurm.Nodes()


def test_slurm_is_needed_for_its_flag(monkeypatch: pytest.MonkeyPatch):
  monkeypatch.delenv("SLURM_JOB_ID", raising=False)
  with one_sentence("--slurm works in a job of SLURM only", "sbatch docs/launch/slurm.sh"):
    slurm.Nodes()


def test_chaos_compares_losses_that_are_not_finite(tmp_path: Path):
  def run(name: str, *losses: float | None) -> Path:
    lines = [{"step": step, "split": "train", "loss": loss} for step, loss in enumerate(losses, 1)]
    (tmp_path / name).mkdir()
    (tmp_path / name / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return tmp_path / name

  undisturbed = run("undisturbed", 2.0, None)
  assert chaos.compared(undisturbed, run("same", 2.0, None)) == (set(), 0.0)
  assert chaos.compared(undisturbed, run("other", 2.0, 1.0)) == (set(), math.inf)


def test_chaos_needs_a_folder_of_this_machine():
  with one_sentence("--workdir=gs://bucket/run is a bucket", "name a folder"):
    chaos.run(argparse.Namespace(), ["--config=configs/fsdp.py:tiny", "--workdir=gs://bucket/run"])
