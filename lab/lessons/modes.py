"""Explicit and Auto axes: what each function does in either mode, by running it.

The fifth lesson of docs/debugging.md. Next: state.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import with_sharding_constraint
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

NAMES = {
  "jax": jax,
  "jnp": jnp,
  "P": P,
  "with_sharding_constraint": with_sharding_constraint,
  "COLUMNS": P(None, "data"),
}
CASES = (
  "jax.reshard(x, P())",
  "with_sharding_constraint(x, P())",
  "jnp.dot(x, x, out_sharding=P())",
  "jnp.dot(x, x, out_sharding=COLUMNS)",
  "jnp.dot(x.T, x)",
  "x + x.T",
  "x[jnp.array([0, 1])]",
  "x[:7]",
  "jnp.zeros((8, 8))",
)


def piece(text, x):
  """The shape of a device's piece of what the code makes of x in jit, or the error."""
  try:
    y = jax.jit(lambda x: eval(text, NAMES | {"x": x}))(x)
    return f"{y.sharding.shard_shape(y.shape)}"
  except Exception as error:
    return type(error).__name__


def in_each_mode():
  """What each function does

  With `Explicit` axes, as `jax.make_mesh` makes them, a sharding is a part of an array's type, and JAX raises an error
  where it would have to guess. With `Auto` axes, as in this repository, the compiler chooses, and constraints help it.
  (`Manual` axes are those inside `jax.shard_map`.) Each has its own functions. **In the other mode they do nothing, or
  raise an error**: `jax.reshard` and `out_sharding` are for `Explicit` axes, `with_sharding_constraint` is for `Auto`.
  `jax.set_mesh` means the same in both: a `P(...)` alone is enough, and new arrays are whole on all devices.

  Below, x [8, 8] is split by rows over 8 devices. Each line is a function in jit, under `jax.set_mesh`, with the shape
  of a device's piece of its result: (1, 8) is split by rows, (8, 1) by columns, (8, 8) whole.
  """
  result = {}
  for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    x = jax.device_put(np.ones((8, 8), np.float32), NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
      result[kind.name] = {"jax.typeof(x)": str(jax.typeof(x))} | {text: piece(text, x) for text in CASES}
  print(f"{'':42}{'Auto':16}Explicit")
  for text, found in result["Auto"].items():
    print(f"{text:42}{found:16}{result['Explicit'][text]}")
  return result


STEPS = IN_FILE = (in_each_mode,)
