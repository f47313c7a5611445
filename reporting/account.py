"""The account of a job: every second of its wall time, over all restarts, belongs to one category.

It is made of the events of journal.jsonl (journal.py), which hold what each process's clock (speed.py) has measured.
Damaged events are left out.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

# The category of each activity of a clock. `category` gives those of all other activities.
OF_ACTIVITY = {
  "train": "training",
  "repeat": "repeating",
  "compile": "compiling",
  "checkpoint": "saving",
  "data": "waiting for data",
  "eval": "evaluating",
  "set-up": "starting",
}
CATEGORIES = (
  "training",  # new steps
  "repeating",  # steps that an earlier attempt had done, and lost
  "compiling",  # the first step, of which compiling is a part
  "restoring",  # the state, from a checkpoint
  "saving",  # checkpoints, as far as training waits for them
  "waiting for data",
  "evaluating",
  "starting",  # Python, devices, data, the initial state
  "reporting",  # logging, the sample, and the small rest between two activities, so that nothing is left out
  "down",  # from what is last known of an attempt until the next one begins
)
STEPS = ("train", "repeat")  # the activities of steps
LONGEST = 1e11  # seconds; a larger number is damaged
SHOWN = 0.05  # seconds; less is left out of a sentence


class Attempt(NamedTuple):
  """What one process 0 of a job did, from its start until it ended or was killed, as far as it is known.

  Attributes:
    began: when it began, in seconds since 1970.
    spent: seconds by activity of its clock.
    step: the step that it started from; None if it ended before it started to train.
    ended: whether it made the last step of its job.
    stuck: seconds of `spent` after its last step was done, in a step that never ended, by activity.
    stopped: whether a signal ended it, in order.
    source: what it resumed from: "checkpoint", or "memory" of the hosts; "": neither, or not known.
  """

  began: float
  spent: Mapping[str, float] = {}
  step: int | None = None
  ended: bool = False
  stuck: Mapping[str, float] = {}
  stopped: bool = False
  source: str = ""

  @property
  def total(self) -> float:
    return sum(self.spent.values())

  def categories(self) -> dict[str, float]:
    """Seconds by category. A step that never ended trained nothing: its time counts as "down"."""
    found = dict.fromkeys(CATEGORIES, 0.0)
    for activity, seconds in self.spent.items():
      lost = min(seconds, self.stuck.get(activity, 0.0))
      found[category(activity, resumed=bool(self.step))] += seconds - lost
      found["down"] += lost
    return found


class Account(NamedTuple):
  """Where the time of a job went.

  Attributes:
    seconds: by category, all of CATEGORIES in their order.
    restarts: how often the job was started again.
  """

  seconds: Mapping[str, float]
  restarts: int

  @property
  def wall_time(self) -> float:
    """Seconds from the start of the first attempt until what is last known of the last one."""
    return sum(self.seconds.values())

  @property
  def goodput(self) -> float:
    """The share of the wall time that trained new steps."""
    return self.seconds["training"] / self.wall_time if self.wall_time else 0.0


def category(activity: str, resumed: bool = False) -> str:
  """The category of an activity, in an attempt that resumed from a checkpoint or not."""
  if activity == "initial state":
    return "restoring" if resumed else "starting"
  return OF_ACTIVITY.get(activity, "reporting")


def attempts(events: Iterable[Mapping[str, Any]]) -> list[Attempt]:
  """The attempts of a job in their order.

  Args:
    events: the events of its journal. What a process that still runs, or was just killed, has done is an event, too.
  """
  found: dict[float, Attempt] = {}
  last = None
  for event in events:
    if (began := _began(event, last)) is None:
      continue
    known = found.get(began, Attempt(began))
    if event.get("event") == "start" and is_time(event.get("step")):
      known = known._replace(step=event["step"], source=str(event.get("source", "")))
    if sum((spent := seconds(event.get("wall_time"))).values()) >= known.total:
      known = known._replace(spent=spent, stuck=_stuck(event))
    known = known._replace(ended=known.ended or event.get("event") == "end", stopped=event.get("event") == "stop")
    last, found[began] = began, known
  return [found[began] for began in sorted(found)]


def _began(event: Mapping[str, Any], last: float | None) -> float | None:
  """When the attempt of an event began; None if that is not known. Journals of earlier versions do not say it."""
  if is_time(event.get("began")):
    return float(event["began"])
  if last is not None and event.get("event") != "start":
    return last
  return event["time"] - sum(seconds(event.get("wall_time")).values()) if is_time(event.get("time")) else None


def _stuck(event: Mapping[str, Any]) -> dict[str, float]:
  """Seconds since the last step was done, of an attempt that was killed or failed in a step."""
  doing, end, since = event.get("doing"), event.get("time"), event.get("since")
  if event.get("event") in ("killed", "failure") and doing in STEPS and is_time(end) and is_time(since):
    return {doing: max(0.0, end - since)}
  return {}


def account(found: Sequence[Attempt]) -> Account:
  """The account of a job's attempts, which must be in order."""
  total = Account(dict.fromkeys(CATEGORIES, 0.0), 0)
  for before, attempt in zip((None, *found), found, strict=False):
    total = followed(total, before, attempt)
  return total


def followed(total: Account, last: Attempt | None, attempt: Attempt) -> Account:
  """The account of a job with one more attempt, after its `last` one. After its last step a job is over, not down."""
  found = attempt.categories()
  if last and not last.ended:
    found["down"] += max(0.0, attempt.began - last.began - last.total)
  return Account(
    {name: seconds + found[name] for name, seconds in total.seconds.items()}, total.restarts + (last is not None)
  )


def sentence(found: Account) -> str:
  """The goodput, and the seconds of all categories but training, largest first."""
  others = sorted(((value, name) for name, value in found.seconds.items() if name != "training"), reverse=True)
  rest = ", ".join(f"{name} {value:,.1f} s" for value, name in others if value >= SHOWN)
  times = f", with {found.restarts} restart{'s' if found.restarts > 1 else ''}," if found.restarts else ""
  trained, whole = f"{found.seconds['training']:,.1f} s", f"{found.wall_time:,.1f} s"
  return f"goodput {found.goodput:.1%}: {trained} of {whole}{times} trained new steps" + (f"; {rest}" if rest else "")


def seconds(parts: object) -> dict[str, float]:
  """The parts of a wall time that are positive numbers, by activity."""
  if not isinstance(parts, dict):
    return {}
  return {name: float(value) for name, value in parts.items() if is_time(value) and value > 0}


def is_time(value: object) -> TypeGuard[float]:
  """Whether a value that was read from a file can be a number of seconds."""
  return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < LONGEST
