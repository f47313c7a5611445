"""Whether a run is finished: its last step is saved, and evaluated, or it has ended by `stop.patience`.

    python -m checkpointing.finished WORKDIR    # fails if it is not; for the files in docs/launch/

A run that was stopped early ends with the same exit status as a finished one, so a launcher asks this.
"""

import sys

from checkpointing import form
from checkpointing.reading import FOLDER, read_record, steps
from runtime import command_line
from runtime.storage.bucket import Location, location
from training.loop import LoopState


def is_finished(workdir: Location) -> bool:
  """Raises OSError if storage does not answer."""
  try:
    config = form.read(workdir / "config.json")
  except (FileNotFoundError, ValueError):
    return False
  if form.config_fault(config) or not all(form.whole()(config.get(name)) for name in ("steps", "stop_after")):
    return False
  last = min(config["steps"], config["stop_after"] or config["steps"])
  saved, patience = steps(workdir / FOLDER), config.get("stop", {}).get("patience", 0)
  step = last if last in saved else max(saved, default=0)
  found = read_record(workdir / FOLDER / str(step)) if saved else None
  loop = LoopState(**found["loop"]) if found else LoopState(evaluated=False)
  return loop.evaluated and (step == last or (form.whole(1)(patience) and loop.since_lowest >= patience))


if __name__ == "__main__":
  with command_line.bad_input_ends_the_program():
    sys.exit(not is_finished(location(sys.argv[1], "workdir")))
