"""Says in some seconds whether this machine is fit for a run, and what to do if it is not. Exit status 1: it is not.

    python -m tools.doctor [--workdir=DIR] [--coordinator=HOST:PORT]

Start it where the run will start, in the same container, job and user. Each line is ok, a warning (a run works, but
perhaps not as meant) or a problem (it would fail). runtime/checkup.py has the checks; the last trains a tiny model.
"""

import argparse
import math
import sys
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import strategies
from configs import base
from data.batches import id_words
from errors import ConfigError
from runtime import checkup, command_line, devices
from runtime.checkup import Check
from tools import sbom
from training import settings

TINY = {
  "depth": 1, "width": 32, "heads": 2, "kv_heads": 2, "mlp_width": 32, "seq_len": 8, "vocab_size": 256,
}  # fmt: skip


def packages() -> str:
  """The versions of what is installed, compared with requirements.lock."""
  project = tomllib.loads((sbom.ROOT / "pyproject.toml").read_text())["project"]
  return checkup.packages([*project["dependencies"], "jaxlib"], project["requires-python"], locked())


def locked(lock: Path = sbom.ROOT / "requirements.lock") -> dict[str, str]:
  """The version of each package in a locked file, for this Python."""
  found = {}
  for package in sbom.packages(lock.read_text(), str(lock)):
    markers = [own["value"] for own in package.get("properties", [])]
    if checkup.applies(markers):
      found[package["name"].lower()] = package["version"]
  return found


def step() -> str:
  """Adds up a number of each device, then trains a tiny model for a step on the first one."""
  here = jax.local_devices()
  ones = jax.device_put(np.ones(len(here), np.float32), NamedSharding(jax.make_mesh((len(here),), ("all",)), P("all")))
  if (total := float(jnp.sum(ones))) != len(here):
    raise ConfigError(f"{len(here)} devices add their ones up to {total:g}; do not train here before that is repaired")
  config = base.get_config("lm", "single")
  config.model.update(TINY)
  strategy = strategies.create(config, settings.program(config, here[0].platform), here[:1])
  batch = {name: np.zeros((2, *field.shape), field.dtype) for name, field in strategy.program.fields().items()}
  batch |= {"id": id_words(np.arange(2)), "mask": np.ones(2, np.bool_)}
  # Not strategy.init, which is one more program. With zeros for weights, every token is equally likely.
  shapes = strategy.abstract_state()
  state = jax.device_put(jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes), strategy.state_sharding)
  _, metrics = strategy.train_step(state, strategy.shard(batch, 2))
  loss, expected = float(metrics["loss"]), math.log(TINY["vocab_size"])
  if not math.isclose(loss, expected, rel_tol=1e-2):
    raise ConfigError(
      f"the first step of a tiny model has the loss {loss:.4f}, not {expected:.4f}; do not train here before that is "
      "repaired"
    )
  return f"a tiny model has the loss {loss:.3f} in its first step, as it should"


def checks(workdir: str, coordinator: str) -> list[Check]:
  """All that is looked at, in the order of the report."""
  config = base.get_config("lm", "single")
  programs = config.compilation_cache_dir
  return [
    Check("packages", packages),
    Check("cores", checkup.cores),
    Check("memory", checkup.memory),
    Check("shared", checkup.shared_memory),
    Check("limits", checkup.limits),
    Check("signals", checkup.signals),
    Check("temporary", checkup.temporary),
    Check("home", checkup.home),
    Check("data", lambda: checkup.cache(config.data.cache_dir, "data.cache_dir")),
    Check("programs", lambda: checkup.cache(*devices.cache_of_programs(programs))),
    Check("workdir", lambda: checkup.workdir(workdir)),
    Check("names", checkup.names),
    Check("ports", lambda: checkup.ports(coordinator)),
    Check("variables", checkup.variables),
    Check("devices", checkup.device_list, seconds=60.0),
    Check("step", step, seconds=120.0),
  ]


def main(arguments: list[str]) -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--workdir", default="runs", metavar="DIR", help="the folder for the results (default: runs)")
  parser.add_argument("--coordinator", default="", metavar="HOST:PORT", help="where the processes of a job will meet")
  options = parser.parse_args(arguments)
  fit = checkup.report(checks(options.workdir, options.coordinator), lambda line: print(line, flush=True))
  if not fit:
    sys.exit(command_line.FAILED)


if __name__ == "__main__":
  with command_line.bad_input_ends_the_program():
    main(sys.argv[1:])
