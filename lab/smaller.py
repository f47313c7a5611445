"""What fewer processes run if they cannot run the given config: the best of `plan` for so many devices.

The config's own strategy comes first, on another mesh. If none of its meshes splits the model and the batch, the best
of all strategies is taken. lab/analysis/search.py searches with formulas, and needs no device.
tools.launch imports this file only when it needs it.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from checkpointing import form, pretrained
from errors import ConfigError
from lab.analysis.search import chosen_fields, search
from lab.analysis.topology import Cluster
from reporting import heartbeat, recorded
from runtime import command_line, hardware
from training import settings

# If the figures of the devices are not known, as those of CPUs, these GPUs stand in. They only order the plans.
STAND_IN = "NVIDIA H100"
BY_DATA = ("vocab_size", "classes", "image_size", "channels")  # sizes of a model that its data may have said


def choose(arguments: Sequence[str], workdir: Path, processes: int, devices: int) -> tuple[tuple[str, ...], str] | None:
  """Flags of train.py to add to these arguments, and the choice in words; None if no strategy fits so many devices.

  Args:
    workdir: what earlier starts wrote there says which devices they had, and sizes that only the data can say.
    devices: of each process; 0: as many as the config simulates.
  """
  try:
    config = config_of(arguments, workdir)
    where = _machine(workdir, processes, devices or config.simulated_devices)
    program = settings.program(config, where.platform)
  except (ConfigError, flags.Error):  # train.py says what is wrong
    return None
  for names in ((config.strategy,), ()):
    found = search(program.sizes, config.batch_size, where, names, config.sequence_parallel, program.optimizer)
    if not found:
      continue
    best = found[0]
    mesh = {f"mesh.{axis}": 1 for axis, size in config.mesh.items() if size is not None}  # all fit a size of 1
    fields = mesh | {"strategy": best.strategy, "accumulation": best.case.accumulation, "gather": best.case.gather}
    fields |= chosen_fields(best, config)
    why = "" if names else f"{config.strategy} splits this model and batch over no mesh of {where.count} devices, and "
    return (
      tuple(f"--config.{name}={value}" for name, value in fields.items()),
      f"{why}{best.strategy} on mesh {best.case.layout.mesh_in_words} is the best of {len(found)} plans",
    )
  return None


def config_of(arguments: Sequence[str], workdir: Path) -> Any:
  """The config that flags of train.py make, with the sizes that its data gave in an earlier start.

  Raises ConfigError or an error of the flags if they are wrong.
  """
  values = flags.FlagValues()
  command_line.define_config(values)
  flags.DEFINE_string("workdir", None, "", flag_values=values)
  before, sys.argv = sys.argv, ["train.py", *arguments]  # ml_collections looks for fields there
  try:
    values(sys.argv)
  finally:
    sys.argv = before
  if values.config is None:
    raise ConfigError("config is missing; name one with --config=configs/fsdp.py")
  config, found = pretrained.adopt(values.config), heartbeat.read(workdir / "config.json")
  given = {} if form.config_fault(found) else found.get("model", {})
  for name in BY_DATA:
    config.model[name] = config.model[name] or (given[name] if form.whole()(given.get(name)) else 0)
  return settings.with_sizes_made_up(config)


def _machine(workdir: Path, processes: int, devices: int) -> Cluster:
  """So many hosts with the GPUs that the job's last start had, or with those that stand in."""
  started = [event for event in recorded.events(workdir) if event["event"] == "start"]
  line = str(started[-1].get("devices", "")) if started else ""
  kind = re.fullmatch(r"\d+ × (.+?)(?: in \d+ processes)?", line)
  chip = hardware.chip(kind[1]) if kind else None
  if chip is None or chip.torus:
    chip = hardware.CHIPS[STAND_IN]
  assert chip is not None
  return Cluster("", chip, processes, devices, chip.network or chip.link)
