"""Lists the checkpoints of a run, and verifies their arrays.

    python -m tools.checkpoint WORKDIR                       step, size, loss, strategy and health of each checkpoint
    python -m tools.checkpoint WORKDIR --verify [--step=N]   reads every array and compares it with its saved digest

Needs no accelerator, and only as much memory as the largest array. The exit status is 1 if a checkpoint is damaged.
"""

import argparse
import contextlib
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

import jax

from checkpointing import reading
from checkpointing.storage_logs import shorten_storage_logs
from errors import ConfigError
from runtime import command_line
from runtime.storage.bucket import Location, location


@dataclasses.dataclass(frozen=True)
class Found:
  """A checkpoint's folder. `health` is "whole", "unfinished", "set aside" or "damaged: WHY"."""

  folder: Location
  bytes: int | None  # None in a bucket
  saved: dict[str, Any] | None  # its record
  health: str

  @property
  def step(self) -> int:
    return next(int(part) for part in self.folder.name.replace(".", "-").split("-") if part.isdigit())


def find(workdir: Location) -> list[Found]:
  """The checkpoints of a run, in order of their steps. Reads their records only, no arrays."""
  root = workdir / reading.FOLDER
  if not reading.names(root) and not root.is_dir():
    raise ConfigError(f"workdir={str(workdir)!r} has no folder {reading.FOLDER}; name the workdir of a run")
  folders = [f for f in root.iterdir() if f.is_dir() and f.name.removeprefix("damaged-")[:1].isdigit()]
  return sorted((_look(folder) for folder in folders), key=lambda found: (found.step, found.folder.name))


def _look(folder: Location) -> Found:
  size = 0 if isinstance(folder, Path) else None
  with contextlib.suppress(FileNotFoundError):  # a run may be writing or removing the folder
    if isinstance(folder, Path):
      size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
  saved = reading.read_record(folder)
  if folder.name.startswith("damaged-"):
    health = "set aside"
  elif not folder.name.isdigit() or int(folder.name) not in reading.steps(folder.parent):
    health = "unfinished"
  elif saved is None:
    why = reading.fault(folder)
    health = f"damaged: its record cannot be read{f' ({why})' if why else ''}"
  else:
    missing = [item for item in ("params", "optimizer") if not (folder / item).is_dir()]
    health = f"damaged: {missing[0]} is missing" if missing else "whole"
  return Found(folder, size, saved, health)


def verify(found: Found) -> Found:
  """Reads every array, and returns the checkpoint with its health after that. StorageError: storage did not answer."""
  if found.health != "whole" or found.saved is None:
    return found
  for name in found.saved["arrays"]:
    read, why = reading.read_array(found.folder, found.saved, name)
    if read is None:
      return dataclasses.replace(found, health=f"damaged: {why}")
  return dataclasses.replace(found, health=f"whole, all {len(found.saved['arrays'])} arrays verified")


def table(found: list[Found]) -> str:
  """The checkpoints as text, one in a line."""
  lines = [f"{'step':>8}  {'size':>10}  {'saved':<19}  {'loss':>7}  {'devices':>7}  strategy; health"]
  for one in found:
    saved = one.saved or {}
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(saved["time"])) if "time" in saved else "?"
    loss = f"{saved['loss']:.4f}" if saved.get("loss") is not None else "-"
    size = f"{one.bytes / 1e6:>7.1f} MB" if one.bytes is not None else f"{'-':>10}"
    lines.append(
      f"{one.step:>8}  {size}  {when:<19}  {loss:>7}  {str(saved.get('devices', '?'))[:7]:>7}  "
      f"{str(saved.get('strategy', '?'))[:200]}; {one.health}"
    )
  return "\n".join(lines)


def main(arguments: list[str]) -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("workdir")
  parser.add_argument("--verify", action="store_true", help="read every array and compare it with its digest")
  parser.add_argument("--step", type=int, help="only the checkpoint of this step")
  options = parser.parse_args(arguments)
  found = find(location(options.workdir, "workdir"))
  if options.step is not None:
    steps = [one.step for one in found]
    found = [one for one in found if one.step == options.step]
    if not found:
      raise ConfigError(f"step={options.step} has no checkpoint in {options.workdir!r}; use one of {steps}")
  if options.verify:
    shorten_storage_logs()
    jax.config.update("jax_platforms", "cpu")  # a run may be using the accelerators
    found = [verify(one) for one in found]
  print(table(found))
  return int(any(one.health.startswith("damaged") for one in found))


if __name__ == "__main__":
  with command_line.bad_input_ends_the_program():
    sys.exit(main(sys.argv[1:]))
