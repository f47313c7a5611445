"""The processes of a job on the nodes of a SLURM job: each is a step, started with srun. docs/launch/slurm.sh uses it.

    python -m tools.launch --slurm --restart -- --config=configs/fsdp.py --workdir=runs/a

The job's nodes and tasks say how many processes there are, and which GPUs each of them has. With sbatch's option
--no-kill, a node that fails leaves the job, and the next start uses the other nodes.
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence

from errors import ConfigError, Unavailable
from job.attempt import Here

STEP = "meshwright"  # the name of the step of a process
SECONDS_TO_KILL = 10.0  # how long to wait for steps that SLURM kills; on a node that is gone, they take minutes
SECONDS_TO_ANSWER = 30.0  # that a command of SLURM has, before it counts as failed


class Nodes(Here):
  """The nodes of the SLURM job in which this program runs.

  Raises ConfigError outside of a SLURM job, and Unavailable if SLURM does not name them.
  """

  ends = signal.SIGTERM  # srun then kills its tasks
  sees_ends = False  # if a node fails, SLURM first waits for it

  def __init__(self) -> None:
    environment = os.environ
    if "SLURM_JOB_ID" not in environment:
      raise ConfigError("--slurm works in a job of SLURM only; start it with sbatch docs/launch/slurm.sh")
    self.job, self.nodes = environment["SLURM_JOB_ID"], _hosts(environment["SLURM_JOB_NODELIST"])
    if not self.nodes:
      raise Unavailable(
        f"--slurm: `scontrol show hostnames {environment['SLURM_JOB_NODELIST']}` names no node; run it by hand"
      )
    self.unit = int(environment.get("SLURM_NTASKS_PER_NODE", 1))
    self.gpus = int(environment.get("SLURM_GPUS_ON_NODE") or 0)
    super().__init__(len(self.nodes) * self.unit, self.gpus // self.unit)

  def places(self) -> list[int]:
    left = _hosts(self._squeue("%N"))
    up = [place for place in range(self.processes) if self.host(place) in left]
    return up or list(range(self.processes))  # SLURM does not answer: the start will show which nodes work

  def ending(self) -> bool:
    return self._squeue("%T") not in ("", "RUNNING")

  def _squeue(self, form: str) -> str:
    """What SLURM says of the job; "" if it does not answer."""
    return _answer("squeue", "--noheader", f"--jobs={self.job}", f"--format={form}").strip()

  def name(self, place: int) -> str:
    return self.host(place)

  def host(self, place: int) -> str:
    return self.nodes[place // self.unit]

  def address(self, place: int) -> str:
    if len(self.nodes) == 1:
      return super().address(place)  # the address for one machine
    node = self.host(place)
    found = re.search(r"\bNodeAddr=(\S+)", _answer("scontrol", "--oneliner", "show", "node", node))
    return found[1] if found else node

  def flags(self) -> list[str]:
    return []

  def flags_of(self, place: int) -> list[str]:
    return []

  def command(self, place: int) -> list[str]:
    step = ["srun", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", f"--nodelist={self.host(place)}"]
    return [*super().command(place), *step, "--overlap", "--input=none", f"--job-name={STEP}"]  # steps share resources

  def environment(self, place: int) -> dict[str, str]:
    """Each task of a node has an equal part of its GPUs. Without this, JAX would give each step the first GPU."""
    first = place % self.unit * self.devices
    ids = ",".join(str(number) for number in range(first, first + self.devices))
    return {"PYTHONUNBUFFERED": "1"} | ({"JAX_LOCAL_DEVICE_IDS": ids} if ids else {})

  def end(self, job: subprocess.Popen) -> None:
    if job.poll() is None:
      job.send_signal(self.ends)

  def end_rest(self) -> None:
    """Ends the steps, and waits until SLURM has seen their ends.

    A task that waits for a disk may end after srun has. Until then it has its GPUs and the lock of the workdir.
    """
    until = time.monotonic() + SECONDS_TO_KILL
    while (steps := self._steps()) and time.monotonic() < until:
      _answer("scancel", "--signal=KILL", *steps, errors=subprocess.DEVNULL)
      time.sleep(SECONDS_TO_KILL / 10)

  def _steps(self) -> list[str]:
    """The processes of this job that SLURM knows, as JOB.STEP."""
    known = _answer("squeue", "--noheader", "--steps", f"--jobs={self.job}", "--format=%i %j").splitlines()
    return [line.split()[0] for line in known if line.split()[1:] == [STEP]]

  def send(self, jobs: Sequence[subprocess.Popen], number: int) -> None:
    """Signals the steps, and not srun, which would kill its task."""
    _answer("scancel", f"--signal={signal.Signals(number).name.removeprefix('SIG')}", self.job)


def _hosts(names: str) -> list[str]:
  """The nodes of a list in SLURM's short form, such as "n[1-3]"."""
  return _answer("scontrol", "show", "hostnames", names).split() if names else []


def _answer(*command: str, errors: int | None = None) -> str:
  """What one of SLURM's commands prints; "" if it fails, or if SLURM does not answer it in time."""
  try:
    done = subprocess.run(
      command, stdout=subprocess.PIPE, stderr=errors, text=True, check=False, timeout=SECONDS_TO_ANSWER
    )
    return done.stdout
  except subprocess.TimeoutExpired:
    return ""
  except OSError as error:
    raise ConfigError(
      f"--slurm needs SLURM's command {command[0]} here ({error.strerror}); use a node that has it"
    ) from error
