"""Keeps a job going: when a process dies or hangs, ends the others and starts the job again from its newest checkpoint.

    python -m tools.launch --processes=4 --restart -- --config=configs/fsdp.py --workdir=runs/a

The job's processes are on this machine, or on the nodes of a SLURM job (slurm.py). What the supervisor needs to know
stands in WORKDIR/supervisor.json. So it may be killed, too: the processes end with it, and the same command goes on.
The output of each start is kept whole in WORKDIR/attempts.

If processes that fail count as lost, the next start has fewer, with another mesh or strategy if need be
(`Policy.choose`); when they are back, the job is stopped in order and started with more. Any number of processes
resumes any checkpoint, with the exact next batch.
"""

import dataclasses
import json
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from checkpointing import form
from checkpointing.memory import tier
from checkpointing.reading import FOLDER, steps
from errors import ConfigError
from job.attempt import TRAIN, Attempt, Forwarded, Here, Output, workdir_of
from reporting import heartbeat, pages
from runtime.command_line import BAD_INPUT, DIVERGED
from runtime.folders import writable
from runtime.storage.bucket import here
from runtime.workdir import check

STATE, LOGS = "supervisor.json", "attempts"  # in a workdir
POLL = 0.25  # seconds between two looks at the processes
HELD = 1.0  # seconds for which lines are held back: those of processes that fail because another one did are not shown
LONGEST_WAIT = 60.0  # seconds before a start; the first ones wait less
SAME = 3  # failures after the same step, without a new checkpoint, that are no accident


Choice = Callable[[Sequence[str], Path, int, int], tuple[tuple[str, ...], str] | None]


@dataclasses.dataclass(frozen=True)
class Policy:
  """How a job is kept going.

  Attributes:
    restarts: how many restarts in a row, without a new checkpoint, before it gives up.
    patience: seconds without progress after which a process hangs, outside of steps: while it compiles, for example.
    shortest: seconds that are never too long for a step.
    lost_for: seconds for which a process that failed counts as lost; 0: it is started again with the others.
    smaller: flags to add where fewer processes cannot run with the given flags; if empty, `choose` gives some.
    choose: called with the job's flags, its workdir, and how many processes and devices in each; returns flags to add,
      and why, or None.
  """

  processes: int
  devices_per_process: int
  restarts: int = 5
  patience: float = heartbeat.PATIENCE
  shortest: float = heartbeat.SHORTEST
  lost_for: float = 0.0
  smaller: tuple[str, ...] = ()
  choose: Choice = lambda *_: None


@dataclasses.dataclass
class State:
  """What a supervisor must know after it was killed.

  Attributes:
    starts: how often the job was started.
    saved: the newest checkpoint at the last failure; -1: none.
    failures: the last steps of starts that have failed since that checkpoint was written.
    lost: until when places for processes are lost, in seconds since 1970, by their names.
    refused: why numbers of processes cannot run, by their names.
  """

  starts: int = 0
  saved: int = -1
  failures: list[int] = dataclasses.field(default_factory=list)
  lost: dict[str, float] = dataclasses.field(default_factory=dict)
  refused: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Failure:
  """How a start ended: which process failed first, after which step, and why, as the end of a sentence."""

  rank: int
  step: int
  why: str
  status: int


def supervise(policy: Policy, arguments: Sequence[str], program: Path = TRAIN, where: Here | None = None) -> int:
  """Runs `program` with these arguments until it is finished. Returns the job's exit status.

  The job runs on this machine, unless `where` has other places.

  The status is 0 if the job is finished or was stopped by a signal; otherwise that of the last process that failed, if
  it makes no sense to start again. Raises ConfigError for no workdir, one that cannot be used, and no heartbeats.
  """
  if any(re.fullmatch(r"-?-config\.runtime\.heartbeat=0*\.?0*", flag) for flag in arguments):
    raise ConfigError("--config.runtime.heartbeat=0 hides whether processes hang; leave it out, or use 1")
  workdir = writable(check(here(workdir_of(arguments))), "workdir")
  with Forwarded() as signals:
    where = where or Here(policy.processes, policy.devices_per_process)
    return Supervisor(policy, arguments, workdir, program, signals, where).run()


class Supervisor:
  """One job, and what has happened to it."""

  def __init__(
    self, policy: Policy, arguments: Sequence[str], workdir: Path, program: Path, signals: Forwarded, where: Here
  ):
    self.policy, self.arguments, self.workdir, self.program, self.signals = policy, arguments, workdir, program, signals
    self.where, self.up = where, where.places()
    self._planned: dict[int, tuple[str, ...] | None] = {}
    self._watcher = heartbeat.Watcher(workdir)
    self.state = State(**form.fitting(heartbeat.read(workdir / STATE), form.STATE))
    self.output = Output(writable(workdir / LOGS, "workdir"))

  def run(self) -> int:
    """Starts the job until it has ended for good."""
    status = None
    while status is None:
      self.up = self.where.places()
      chosen = next(self._choices(), None)
      status = self._start(*chosen) if chosen else self._none_fits()
    return status

  def _choices(self) -> Iterator[tuple[int, tuple[str, ...]]]:
    """The numbers of processes that can be started now, the largest first, and flags to add."""
    for count in range(len(self._places()), 0, -self.where.unit):
      for extra in self._flags(count):
        if _name(count, extra) not in self.state.refused:
          yield count, extra

  def _flags(self, count: int) -> Iterator[tuple[str, ...]]:
    """Flags to add for so many processes: none; if that cannot run, the user's flags, or those that plan chooses."""
    yield ()
    if self.policy.smaller and count < self.policy.processes:
      yield self.policy.smaller
    elif count < self.policy.processes and (planned := self._plan(count)) is not None:
      yield planned

  def _plan(self, count: int) -> tuple[str, ...] | None:
    """The flags that plan chooses for so many processes."""
    if count not in self._planned:
      chosen = self.policy.choose(self.arguments, self.workdir, count, self.policy.devices_per_process)
      if chosen:
        self.output.say(f"smaller   {_name(count, ())}: {chosen[1]}")
      self._planned[count] = chosen and chosen[0]
    return self._planned[count]

  def _places(self) -> list[int]:
    """The places for processes that are up and not lost."""
    now = time.time()
    self.state.lost = {name: until for name, until in self.state.lost.items() if until > now}
    return [place for place in self.up if self.where.name(place) not in self.state.lost]

  def _none_fits(self) -> int | None:
    """Waits for the next place that returns. Returns the job's status if no place will return, or if it is stopped."""
    if not self.state.lost:
      why = next(iter(self.state.refused.values()), "there is no place for a process")
      self.output.say(f"gave up   no number of processes can run this: {why}")
      return self._end(BAD_INPUT)
    self._sleep(min(self.state.lost.values()) - time.time())
    return self._end(0) if self.signals.received else None

  def _start(self, count: int, extra: tuple[str, ...]) -> int | None:
    """Runs one start of the job to its end. Returns the job's status if it is over."""
    self.state.starts += 1
    self._save()
    places = self._places()[:count]
    self._seen: dict[int, float] = {}  # when a process last had a sign of life
    self._before = {heartbeat.process(beat) for beat in self._watcher.beats().values()}
    often = () if any("runtime.heartbeat" in flag for flag in self.arguments) else ("--config.runtime.heartbeat=1.0",)
    flags = [*self.arguments, *often, *extra]
    self.output.open(self.state.starts)
    try:
      with Attempt(self.where, places, flags, self.program, self.output.take, self.signals) as attempt:
        failure, grows = self._watch(attempt)
    finally:
      self.output.close()
    if self.signals.received or (failure is None and not grows) or self.where.ending():
      self.output.release()
      return self._end(0 if failure is None else failure.status)
    if failure is None:
      self.output.release()
      self.output.say(f"restart   {len(self._places())} of {self.policy.processes} processes can run again")
      return None
    if failure.status == BAD_INPUT and not self._has_trained(attempt):
      return self._refuse(count, extra, failure)
    if failure.status in (BAD_INPUT, DIVERGED):  # the next start would fail, too
      self.output.release()
      return self._end(failure.status)
    if self.policy.lost_for:
      self.state.lost[self.where.name(places[failure.rank])] = time.time() + self.policy.lost_for
    return self._fail(f"process {failure.rank} of {count} on {self.where.host(places[failure.rank])}", failure)

  def _refuse(self, count: int, extra: tuple[str, ...], failure: Failure) -> int | None:
    """Notes that so many processes cannot run. With all processes, the input is at fault, and the job is over."""
    if count == self.policy.processes:
      self.output.release()
      return self._end(failure.status)
    self.output.drop()
    self.state.refused[_name(count, extra)] = self.output.last(failure.rank)
    self.output.say(f"smaller   {_name(count, extra)} cannot run: {self.output.last(failure.rank)}")
    return None

  def _fail(self, where: str, failure: Failure) -> int | None:
    """Says what has failed and waits, or gives up."""
    self.output.drop()
    stored, kept = self._stored(), tier.newest(self.workdir)
    newest = max(stored, kept)
    if newest > self.state.saved:
      self.state.saved, self.state.failures = newest, []
    self.state.failures.append(failure.step)
    self._save()
    number = len(self.state.failures)
    # On a new machine, the first start copies what is in the bucket. It may have failed before that.
    unknown = "the beginning" if isinstance(workdir_of(self.arguments), Path) else "what the bucket has"
    saved = f"checkpoint {newest}" if newest >= 0 else unknown
    saved += " in memory" if kept > stored else ""
    log = f"log: {self.output.path}"
    same = self.state.failures[-SAME:]
    if len(same) == SAME and set(same) == {failure.step} and failure.step > max(newest, 0):
      self.output.say(
        f"gave up   the last {SAME} starts failed after step {failure.step}, so look at batch {failure.step + 1}: "
        f"{where} {failure.why}; {log}"
      )
      return self._end(failure.status)
    if number > self.policy.restarts:
      self.output.say(
        f"gave up   {number} starts in a row failed without getting past {saved}: {where} {failure.why} after step "
        f"{failure.step}; {log}"
      )
      return self._end(failure.status)
    self.output.say(f"restart   {where} {failure.why} after step {failure.step}; starts again from {saved}; {log}")
    self._sleep(min(LONGEST_WAIT, 2.0 ** (number - 1) - 1))
    return self._end(0) if self.signals.received else None

  def _watch(self, attempt: Attempt) -> tuple[Failure | None, bool]:
    """Waits until a start has ended. Returns the failure, if any, and whether it was stopped to start with more."""
    began, running, grows = time.time(), set(range(len(attempt.jobs))), False
    while running:
      rank = attempt.ended(POLL)
      self.output.release(HELD)
      if rank is not None:
        running.discard(rank)
        if attempt.status(rank):
          return self._culprit(attempt, rank), False
      elif hung := self._hung(attempt, running, began):
        return hung, False
      elif not grows and not self.signals.received and self._can_grow(attempt):
        grows = True
        attempt.send(signal.SIGTERM)
    return None, grows

  def _can_grow(self, attempt: Attempt) -> bool:
    """Whether more processes could run now. Those that run are stopped only after a first step, so that it is saved."""
    largest = next(self._choices(), (0, ()))[0]
    return largest > attempt.count and self._has_trained(attempt)

  def _has_trained(self, attempt: Attempt) -> bool:
    """Whether a step of an attempt is done."""
    return any(beat["step"] for beat in self._beats(attempt).values())

  def _culprit(self, attempt: Attempt, first: int) -> Failure:
    """What failed: the first process that ended, or one that a signal killed at the same time and that made it fail."""
    ended = [first]
    until = time.monotonic() + HELD
    while (rank := attempt.ended(until - time.monotonic())) is not None:
      ended += [rank] if attempt.status(rank) else []
    killed = [rank for rank in ended if attempt.ended_by(rank) not in ("", "SIGABRT")]
    if not killed and not self.where.sees_ends and (gone := self._gone(attempt, ended)) is not None:
      return Failure(gone, self._step(attempt), "gave no sign of life when others failed", attempt.status(first))
    rank = (killed or ended)[0]
    status = attempt.status(rank)
    if number := attempt.ended_by(rank):
      why = f"was killed by {number}"
    else:
      why = f"failed with status {status} ({self.output.last(rank)})"
    return Failure(rank, self._step(attempt), why, status)

  def _gone(self, attempt: Attempt, ended: list[int]) -> int | None:
    """A process that neither ends nor gives a sign of life for a while: its host is gone, and so others fail."""
    until = time.monotonic() + 1.5 * heartbeat.SILENT
    while (left := set(range(attempt.count)) - set(ended)) and time.monotonic() < until:
      if (rank := attempt.ended(POLL)) is not None:
        ended.append(rank)
    beats = self._beats(attempt) if self._watcher.takes_beats() else {}
    return next((rank for rank in left if rank in beats and time.time() - beats[rank]["time"] > heartbeat.SILENT), None)

  def _hung(self, attempt: Attempt, running: set[int], began: float) -> Failure | None:
    """The process that hangs, if one does."""
    found, now = self._beats(attempt), time.time()
    self._seen |= dict.fromkeys(found, now)
    beats = {  # a process that ends in order has no beat, either
      rank: found.get(rank) or heartbeat.starting(self._seen.get(rank, began)) for rank in running
    }
    rank = heartbeat.hanging(beats, now, self.policy.patience, self.policy.shortest, self._watcher.takes_beats)
    if rank is None:
      return None
    why = f"made no progress for {now - beats[rank]['since']:.0f} s ({beats[rank]['doing']})"
    return Failure(rank, self._step(attempt), why, 128 + signal.SIGKILL)

  def _beats(self, attempt: Attempt) -> dict[int, heartbeat.Beat]:
    """The last signs of life of an attempt's processes: those that were not there before the attempt."""
    beats = self._watcher.beats().items()
    mine = lambda rank, beat: rank < attempt.count and heartbeat.process(beat) not in self._before
    return {rank: beat for rank, beat in beats if mine(rank, beat)}

  def _step(self, attempt: Attempt) -> int:
    """The last step that an attempt is known to have done; the newest checkpoint's if it has done none."""
    done = [beat["step"] for beat in self._beats(attempt).values()]
    return max(*done, self._stored(), 0)

  def _stored(self) -> int:
    """The newest checkpoint in storage; -1: none. If storage cannot be read now, the newest that is known."""
    try:
      return max(steps(self.workdir / FOLDER), default=-1)
    except OSError:
      return self.state.saved

  def _sleep(self, seconds: float) -> None:
    """Waits, until a signal comes."""
    until = time.monotonic() + seconds
    while not self.signals.received and (left := until - time.monotonic()) > 0:
      time.sleep(min(POLL, left))

  def _save(self) -> None:
    try:
      pages.write(self.workdir / STATE, json.dumps(dataclasses.asdict(self.state)))
    except OSError as error:
      self.output.say(f"error: {self.workdir / STATE} cannot be written ({error.strerror}); the next start tries again")

  def _end(self, status: int) -> int:
    """The job is over: the next one begins without its failures."""
    self.state = State(starts=self.state.starts)
    self._save()
    return status


def _name(count: int, extra: Sequence[str]) -> str:
  processes = f"{count} process" + ("es" if count > 1 else "")
  return f"{processes} with {' '.join(extra)}" if extra else processes
