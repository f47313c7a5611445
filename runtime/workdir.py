"""What a run's folder holds, by name, as far as it is copied to a bucket or read by more than one part of a run.

And what is no workdir, because it has another kind: `check` refuses what lies within a run, and a model's folder.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from errors import ConfigError
from runtime.storage.bucket import Folder, Location
from runtime.storage.mirror import Holds

CHECKPOINTS = "checkpoints"  # and what begins like it: sent by checkpointing/shipping.py
BEATS = "heartbeats"  # the signs of life of processes (reporting/heartbeat.py)
MEMORY = "memory.json"  # names the run whose saves are in memory (checkpointing/memory/tier.py)
HOLDS = Holds(
  own=("lock", "home", "attempts", "supervisor.json"),
  sent=CHECKPOINTS,
  passing=(BEATS, MEMORY),
  beat=f"{BEATS}/0.json",
)


def of_process(rank: int) -> tuple[str, ...]:
  """Patterns of the files that a process writes, and not process 0 for all."""
  return f"{BEATS}/{rank}.json", f"profile/*/process-{rank}.*"


RECORD = Path("run", "metadata")  # in a checkpoint
RUNS = ("config.json", "journal.jsonl", "metrics.jsonl", "lock")  # a folder with one of these, and a part, is a run
# The folders that a run makes in its workdir, and may move or remove.
PARTS = re.compile(rf"{CHECKPOINTS}(-\d+)?|{BEATS}|tensorboard|wandb|mlflow|profile|tokenizer|attempts|previous-\d+")
MODEL = ("model.safetensors", "model.safetensors.index.json", "adapter_config.json")  # in a folder with a model
Kind = TypeVar("Kind", bound=Location)
IN_MEMORY = re.compile(r"/dev/shm/meshwright-\d+(/.*)?")  # checkpointing/memory/tier.py


def check(results: Kind) -> Kind:
  """Returns this path. Raises ConfigError if it cannot be a workdir, because a run or a model is there already.

  A run within another one's checkpoint would be removed with it. A link to such a place is the place.
  """
  place: Location = results if isinstance(results, Folder) else Path(os.path.realpath(results))
  given = f"workdir={str(results)!r}"
  inner: Location = place
  for outer in _above(place):
    if PARTS.fullmatch(inner.name) and any((outer / name).exists() for name in (*RUNS, CHECKPOINTS)):
      checkpoint = next((path for path in (place, *_above(place)) if (path / RECORD).exists()), outer)
      raise ConfigError(
        f"{given} lies within the run {str(outer)!r}; continue that one with --workdir={outer}, or begin another in a "
        f"folder of its own with --config.init_from={checkpoint}"
      )
    inner = outer
  if (place / RECORD).exists():
    raise ConfigError(f"{given} is a checkpoint; begin a run in a folder of its own with --config.init_from={place}")
  if isinstance(place, Path) and IN_MEMORY.fullmatch(str(place)):
    raise ConfigError(f"{given} lies where runs save in memory, which the next one removes; name another folder")
  if any((place / name).exists() for name in MODEL):
    raise ConfigError(f"{given} holds a model; begin a run in a folder of its own with --config.init_from={place}")
  return results


def _above(place: Location) -> Iterator[Location]:
  """The folders above a place, from the innermost on."""
  while place.parent != place:
    place = place.parent
    yield place
