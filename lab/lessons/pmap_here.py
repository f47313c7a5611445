"""Both in this repository: a run that begins with pmap and goes on with jit.

The third lesson of docs/pmap.md.
"""

import jax
import numpy as np

import strategies
from configs import base
from data.batches import Batches, Mixture
from data.synthetic import Synthetic
from training import settings


def begin_and_go_on():
  """Begin with pmap_ddp, go on with data_parallel

  [`strategies/pmap_ddp.py`](../strategies/pmap_ddp.py) is the legacy API done well. The state goes in with
  `in_axes=None` and comes out with `out_axes=None`, after a psum. So it has the same tree and the same shapes as under
  every other strategy. Losses are summed and counted before the psum, and divided after it, so padding changes nothing.
  Only the batch has the leading dimension. [`strategies/data_parallel.py`](../strategies/data_parallel.py) is the same
  strategy in one line.

  Below, data_parallel takes over the state of pmap_ddp after two steps. The losses equal those of data_parallel alone,
  to 1e-5. So you can migrate a run in the middle.
  """
  config = base.get_config("tiny", "data_parallel")
  program = settings.program(config, "cpu")
  batches = Batches(Mixture([Synthetic(program.sizes, first=0, size=64)]), size=16)
  old, new = (
    strategies.create(base.get_config("tiny", name), program, jax.devices()) for name in ("pmap_ddp", "data_parallel")
  )
  result = {}
  for name, in_turn in (("pmap_ddp, then data_parallel", (old, old, new, new)), ("data_parallel", (new,) * 4)):
    state, losses, shapes = in_turn[0].init(seed=0), [], []
    for step, strategy in enumerate(in_turn):
      batch = strategy.shard(batches.read(step), batch_size=16)
      state, metrics = strategy.train_step(state, batch)
      losses.append(float(metrics["loss"]))
      shapes.append(batch["tokens"].shape)
    print(f"{name}: losses", *[f"{loss:.4f}" for loss in losses])
    print("  tokens", *shapes, " embedding", state.params["embedding"].shape, state.params["embedding"].sharding.spec)
    result[name] = {"losses": losses, "shapes": shapes}
  equal = np.allclose(*[one["losses"] for one in result.values()], rtol=1e-5)
  print("equal:", equal)
  return result


STEPS = IN_FILE = (begin_and_go_on,)
