"""Normal differences: how far layouts may differ in bfloat16, and how to test code of your own.

The last lesson of docs/debugging.md.
"""

import jax
import numpy as np

import strategies
from configs import base
from training import settings

EQUAL = 1e-5  # of float32: more is a mistake


def gradients(name, dtype):
  """The gradients of a first batch under a strategy, as one vector."""
  config = base.get_config("tiny", name)
  config.model.dtype, config.model.depth = dtype, 2
  program = settings.program(config, "cpu")
  strategy = strategies.create(config, program, jax.devices()[: 1 if name == "single" else 8])
  draw = np.random.default_rng(0).integers
  batch = {field: draw(0, f.below, (16, *f.shape), f.dtype) for field, f in program.fields().items()}
  batch |= {"mask": np.ones(16, bool), "id": np.zeros((16, 2), np.uint32)}
  _, found = strategy.gradients(strategy.init(0), strategy.shard(batch, 16))
  return np.concatenate([np.ravel(x) for x in jax.tree.leaves(jax.device_get(found))])


def between_layouts():
  """Between layouts, and to float32

  Another layout adds the same numbers in another order, and each rounding differs: by 6e-8 of a number in float32, by
  0.4% in bfloat16. Where large numbers cancel, a small one may differ by any factor. So compare whole tensors: the norm
  of the difference over the norm of the reference.

  Below are the gradients of a small model's first step. In float32, layouts differ by a few in a million. In bfloat16
  they differ by about a hundredth, and **each is as far from float32 as the others**. So test code of your own twice:

  1. In float32 (or float64, with `jax_enable_x64`), your layout equals one device to 1e-5. This finds mistakes: a
     missing sum or a part counted twice is far above.
  2. In bfloat16, it is at most 1.5 times as far from *float32 on one device* as bfloat16 on one device is. This finds a
     sum that is kept in bfloat16.

  Compare first steps, because differences grow. Two runs of a program on the same CPUs give the same bits. On GPUs they
  may not, without `XLA_FLAGS=--xla_gpu_deterministic_ops=true`.
  """
  distance = lambda x, y: float(np.linalg.norm(x - y) / np.linalg.norm(y))
  exact, alone = gradients("single", "float32"), gradients("single", "bfloat16")
  below = lambda x: f"below {10.0 ** np.ceil(np.log10(x)):g}"
  own = distance(alone, exact)
  print(f"one device: bfloat16 is {below(own)} from float32")
  result = {"single": own}
  for name in ("fsdp", "tensor_parallel"):
    narrow, wide = gradients(name, "bfloat16"), gradients(name, "float32")
    result[name] = found = distance(wide, exact), distance(narrow, alone), distance(narrow, exact) / own
    print(f"{name}: {'within' if found[0] < EQUAL else 'beyond'} {EQUAL:g} of one device in float32,", end=" ")
    print(f"{below(found[1])} in bfloat16, and {found[2]:.0f} time as far from float32")
  return result


STEPS = IN_FILE = (between_layouts,)
