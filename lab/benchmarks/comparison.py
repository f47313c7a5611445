"""Compares a new measurement with a record: `python -m tools.benchmark throughput --check=RECORD`."""

from lab.benchmarks import cells, figures
from lab.benchmarks.figures import Record, Result
from lab.benchmarks.rounds import NO_TIME
from lab.benchmarks.sections import megabytes

SAME_BYTES = 0.01  # how far planned memory may differ from the record's, with the same versions
SAME_SPEED = 0.05  # how far a median may be outside the recorded range; five rounds do not show the full range
STEADY = 0.1  # how much runs of the single device may differ; if they do more, no speed is judged


def compare(old: Record, new: Record) -> tuple[list[str], bool | None]:
  """A line for each row of `new`, and whether all rows are reproduced; None: no verdict.

  A row is reproduced if the median of its throughput relative to the single device is in the range of the recorded
  rounds, give or take SAME_SPEED. With the same versions on simulated devices, the compiler must also plan the recorded
  bytes. Absolute speed is only reported, because a shared machine is not equally fast every day.

  There is no verdict on speed where the runs of the single device itself differ by over STEADY, or where it ran only
  once: then a ratio to it says nothing. Rows for which there was no time are not judged. If no row but the single
  device could be compared, the result is False.
  """
  same_machine, varies = old["machine"] == new["machine"], figures.spread(new)
  steady = varies is not None and varies <= STEADY
  same_plan = old["versions"] == new["versions"] and old["hardware"]["simulated"]
  lines, good, compared = [], True, 0
  for name in new["cells"]:
    if name == cells.PEAKS or name not in old["cells"]:
      continue
    then, now = figures.row(old, name), figures.row(new, name)
    if then.error or now.error:
      judged = None if bool(then.error) or name.startswith(cells.PEER) or now.error == NO_TIME else False
      text = f"{'not compared' if judged is None else 'NOT reproduced'}: {now.error or 'the record has no figures'}"
    else:
      judged = _judge(then, now, steady, same_plan)
      compared += name != f"{cells.REFERENCE}/1"
      text = {True: "reproduced", False: "NOT reproduced", None: "no verdict"}[judged]
      text += f": {now.relative.show('.3f')} of the single device, recorded {then.relative.show('.3f')}"
      if same_plan and _plans_differ(then, now):
        text += f"; memory {megabytes(now.bytes)}, recorded {megabytes(then.bytes)}"
      text += f"; {then.seconds.median / now.seconds.median:.2f} of the recorded speed" if same_machine else ""
    lines.append(f"{name:<20} {text}")
    good = good and judged is not False
  for name in old["cells"]:
    if name.partition("/")[0] not in (*cells.rows(), cells.PEAKS):
      lines.append(f"{name:<20} NOT reproduced: this row no longer exists")
      good = False
  lines.append(_conditions(old, new))
  if not compared:
    lines.append("nothing was compared: none of the measured rows has figures in the record")
  elif not steady:
    why = "ran only once" if varies is None else f"varies by {varies:.0%} itself, over {STEADY:.0%}"
    lines.append(f"no verdict on speed: the single device {why}. Try again when nothing else runs")
  if not same_machine:
    lines.append(f"speeds are not compared: the record was made on {old['machine']}, this machine is {new['machine']}")
  return lines, (None if good and not steady else good) if compared else False


def _judge(then: Result, now: Result, steady: bool, same_plan: bool) -> bool | None:
  """Whether a row is reproduced; None if its speed cannot be judged. Planned memory can be, on a busy machine too."""
  assert then.relative
  assert now.relative
  if same_plan and _plans_differ(then, now):
    return False
  within = then.relative.low - SAME_SPEED <= now.relative.median <= then.relative.high + SAME_SPEED
  return within if steady else None


def _plans_differ(then: Result, now: Result) -> bool:
  return bool(then.bytes and now.bytes and abs(now.bytes / then.bytes - 1) > SAME_BYTES)


def _conditions(old: Record, new: Record) -> str:
  """The load of the machine and how much the single device varied, now and then."""
  shown = []
  for when, record in (("now", new), ("recorded", old)):
    varies = figures.spread(record)
    load = "unknown" if record["load"] is None else f"{record['load']:.1f}"
    shown.append(f"{when} load {load}, spread of single {'unknown' if varies is None else f'{varies:.0%}'}")
  return "; ".join(shown)
