"""A job that dies or hangs is started again, says so in one line, and gives up when that makes no sense.

The processes here are small programs that do what a list says. tests/tools/test_healing.py does it with train.py.
"""

import argparse
import json
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
from helpers import ROOT, one_sentence

from reporting import heartbeat
from tools import attempt, chaos, launch, slurm, smaller, supervisor
from tools.supervisor import Policy, supervise

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
  monkeypatch.setattr(supervisor, "SILENT", 0.7)
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


@pytest.mark.parametrize("who", [0, 1])
def test_a_process_that_hangs_is_found(who: int, job: Callable[..., int], capfd: Any):
  """All processes are late then, since they wait for it. The one that is silent is named."""
  hangs = {"end": FOREVER, "step": 4, str(who): {"kill": signal.SIGSTOP, "after": 0.0}, str(1 - who): {"waits": True}}
  began = time.monotonic()
  assert job([hangs, {}]) == 0
  assert time.monotonic() - began < FOREVER / 2
  assert re.search(
    rf"restart   process {who} of 2 on \S+ made no progress for \d+ s \(train\) after step 4", capfd.readouterr().out
  )


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


def test_it_gives_up_where_nothing_is_saved_any_more(job: Callable[..., int], capfd: Any):
  """Two starts fail, a checkpoint is written, three more fail. Steps differ, so no batch is to blame."""
  fails = [
    {"end": FOREVER, "step": step, "saves": saves, "1": DIES}
    for step, saves in ((1, []), (2, []), (9, [8]), (10, []), (11, []))
  ]
  assert job(fails, restarts=2) == 128 + signal.SIGKILL
  last = capfd.readouterr().out.splitlines()[-1]
  assert "gave up   3 starts in a row failed without getting past checkpoint 8: process 1 of 2" in last
  assert "SIGKILL after step 11" in last


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
  code = "import sys; from pathlib import Path; from tools import supervisor as s; s.HELD = s.LONGEST_WAIT = 0.2;"
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
    ([{"end": FOREVER, "0": {"early": True}}], 128 + signal.SIGTERM),
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


@pytest.mark.parametrize(
  "flag, words",
  [
    ("--restarts=0", "restarts=0 must be at least 1"),
    ("--patience=0", "patience=0.0 must be a finite number above 0"),
    ("--lost-for=-1", "lost-for=-1.0 must not be negative"),
  ],
)
def test_bad_numbers_are_named(flag: str, words: str, monkeypatch: pytest.MonkeyPatch, capfd: Any):
  monkeypatch.setattr(sys, "argv", ["launch", "--restart", flag, "--", "--config=configs/fsdp.py"])
  with pytest.raises(SystemExit, match="2"):
    launch.main()
  assert words in capfd.readouterr().err


def test_without_such_flags_plan_chooses_some_once(
  job: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
):
  """Only where the given ones cannot run. tests/tools/test_smaller.py says what plan chooses."""
  asked = []
  chosen = ("--config.strategy=other",), "other on mesh data=3 is the best of 5 plans"
  monkeypatch.setattr(smaller, "choose", lambda *given: asked.append(given[2:]) or chosen)
  lost = {"end": FOREVER, "step": 2, "saves": [1], "3": DIES}
  cannot = {"end": 0.2, **{str(rank): {"refuse": True} for rank in range(3)}}
  assert job([lost, cannot, cannot | {"0": {"after": 0.1}}], 4, lost_for=FOREVER) == 0
  assert starts(tmp_path) == ["4", "3", "3"]
  assert asked == [(3, 1)]
  assert capfd.readouterr().out.count("smaller   3 processes: other on mesh data=3 is the best of 5 plans\n") == 1


def test_what_plan_needs_is_imported_only_then():
  code = "import sys; from tools import launch; sys.exit('analysis' in sys.modules or 'tools.plan' in sys.modules)"
  assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


SLURM = {  # stands in for SLURM's commands: two nodes of two tasks, of which one is gone after the first start
  "srun": 'node=none; for word; do case "$word" in --nodelist=*) node="${word#*=}" ;; esac; done\n'
  'while [ "${1#--}" != "$1" ]; do shift; done; echo "on $node with ${JAX_LOCAL_DEVICE_IDS-no} GPUs"; exec "$@"',
  "squeue": 'case "$*" in *%T*) cat "$FOLDER/state" 2>/dev/null || echo RUNNING; exit ;; esac\n'
  'if [ -e "$FOLDER/run/attempts/1.log" ]; then echo n1; else echo "n1,n2"; fi',
  "scontrol": 'case "$*" in *hostnames*) echo "$3" | tr , "\\n" ;; *) echo "NodeName=$4 NodeAddr=127.0.0.1 x" ;; esac',
  "scancel": 'echo "$@" >>"$FOLDER/cancelled"',
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


def test_on_slurm_the_node_that_is_gone_is_named(
  on_slurm: Path, job: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capfd: Any
):
  """SLURM has not noticed it yet. A process on another node fails because of it, and srun cannot end this one."""
  monkeypatch.setattr(attempt, "SECONDS_TO_END", 0.5)
  stops = {"kill": signal.SIGSTOP, "after": 0.0}
  dies = {"end": FOREVER, "step": 5, "saves": [3], "0": {"status": 1, "after": 0.3}, "2": stops}
  assert job([dies, {}], 4, where=slurm.Nodes()) == 0
  assert re.search("restart   process 2 of 4 on n2 gave no sign of life when others failed", capfd.readouterr().out)


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


def test_slurm_is_needed_for_its_flag(monkeypatch: pytest.MonkeyPatch):
  monkeypatch.delenv("SLURM_JOB_ID", raising=False)
  with one_sentence("--slurm works in a job of SLURM only", "sbatch launch/slurm.sh"):
    slurm.Nodes()


def test_chaos_needs_a_folder_of_this_machine():
  with one_sentence("--workdir=gs://bucket/run is a bucket", "name a folder"):
    chaos.run(argparse.Namespace(), ["--config=configs/fsdp.py:tiny", "--workdir=gs://bucket/run"])
