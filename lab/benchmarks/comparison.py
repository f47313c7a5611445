"""Compares a new measurement with a record: `python -m tools.benchmark throughput --check=RECORD`."""

from lab.benchmarks import cells, figures
from lab.benchmarks.figures import Record
from lab.benchmarks.sections import megabytes

SAME_BYTES = 0.01  # how far planned memory may differ from the record's, with the same versions
SAME_SPEED = 0.05  # how far a median may be outside the recorded range; five rounds do not show the full range


def compare(old: Record, new: Record) -> tuple[list[str], bool]:
  """A line for each row of `new`, and whether all rows are reproduced.

  A row is reproduced if the median of its throughput relative to the single device is in the range of the recorded
  rounds, give or take SAME_SPEED. With the same versions on simulated devices, the compiler must also plan the recorded
  bytes. Absolute speed is only reported, because a shared machine is not equally fast every day. If no row but the
  single device could be compared, the result is False.
  """
  same_machine = old["machine"] == new["machine"]
  same_plan = old["versions"] == new["versions"] and old["hardware"]["simulated"]
  lines, good, compared = [], True, 0
  for name in new["cells"]:
    if name == cells.PEAKS or name not in old["cells"]:
      continue
    then, now = figures.row(old, name), figures.row(new, name)
    if then.error or now.error:
      reproduced = bool(then.error) or name.startswith(cells.PEER)
      text = (
        f"not compared: {now.error or 'the record has no figures'}" if reproduced else f"NOT reproduced: {now.error}"
      )
    else:
      within = then.relative.low - SAME_SPEED <= now.relative.median <= then.relative.high + SAME_SPEED
      differs = same_plan and then.bytes and now.bytes and abs(now.bytes / then.bytes - 1) > SAME_BYTES
      reproduced = within and not differs
      compared += name != f"{cells.REFERENCE}/1"
      text = f"{'reproduced' if reproduced else 'NOT reproduced'}: {now.relative.median:.3f} of the single device"
      text += f", recorded {then.relative.show('.3f')}"
      text += f"; memory {megabytes(now.bytes)}, recorded {megabytes(then.bytes)}" if differs else ""
      text += f"; {then.seconds.median / now.seconds.median:.2f} of the recorded speed" if same_machine else ""
    lines.append(f"{name:<20} {text}")
    good = good and reproduced
  for name in old["cells"]:
    if name.partition("/")[0] not in (*cells.rows(), cells.PEAKS):
      lines.append(f"{name:<20} NOT reproduced: this row no longer exists")
      good = False
  if not compared:
    lines.append("nothing was compared: none of the measured rows has figures in the record")
  if not same_machine:
    lines.append(f"speeds are not compared: the record was made on {old['machine']}, this machine is {new['machine']}")
  return lines, good and compared > 0
