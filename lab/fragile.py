"""train.py on a device that may compute wrongly: what tools.chaos runs, so that the trainer itself has no such code.

After SIGUSR1, one device of this process gets another bit in its copy of a weight, between two steps: just before the
run compares copies (runtime/replicas.py).
"""

import random
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # it is started as a file

import jax
import numpy as np

import train
from job import keeper
from runtime import command_line
from runtime.replicas import Replicas

SIGNAL = signal.SIGUSR1
received: list[int] = []


class Fragile(Replicas):
  """Replicas of a run, in which a bit flips after a signal."""

  def check(self, state: Any, step: int) -> Any:
    if received and self.copied:
      received.clear()
      leaves, tree = jax.tree.flatten(state)
      array = random.choice([array for array in self.copied if array.name.startswith("params/")] or self.copied)
      leaves[array.place], device = flipped(leaves[array.place])
      print(f"chaos     flipped a bit of {array.name} on device {device} after step {step}", flush=True)
      state = jax.tree.unflatten(tree, leaves)
    return super().check(state, step)


def flipped(x: jax.Array) -> tuple[jax.Array, int]:
  """The array with one bit flipped in what one device of this process holds, and the number of that device."""
  pieces = [shard.data for shard in x.addressable_shards]
  host, device = np.array(pieces[0]), x.addressable_shards[0].device
  host.reshape(-1).view(np.uint8)[random.randrange(host.nbytes)] ^= 1 << random.randrange(8)
  pieces[0] = jax.device_put(host, device)
  return jax.make_array_from_single_device_arrays(x.shape, x.sharding, pieces), device.id


if __name__ == "__main__":
  signal.signal(SIGNAL, lambda number, _: received.append(number))
  keeper.Replicas = Fragile  # type: ignore[misc]
  command_line.run(lambda config: train.main(config, train.WORKDIR.value))
