"""A state that is sharded from the start: weights and the optimizer's state, made on the devices that hold them.

The sixth lesson of docs/debugging.md. Next: recompiling.py.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lab.lessons.sent import held


class Model(nnx.Module):
  def __init__(self, rngs):
    self.up, self.down = nnx.Linear(64, 256, rngs=rngs), nnx.Linear(256, 64, rngs=rngs)

  def __call__(self, x):
    return self.down(jax.nn.relu(self.up(x)))


def init(seed):
  """Weights and the optimizer's state, as pure data."""
  weights = nnx.to_pure_dict(nnx.state(Model(nnx.Rngs(jax.random.key(seed))), nnx.Param))
  return weights, optax.adam(1e-3).init(weights)


def sharded(tree, mesh):
  """A sharding for each array: the first dimension that the devices divide is split."""

  def place(x):
    split = [size % mesh.size == 0 for size in x.shape]
    return NamedSharding(mesh, P(*[None] * split.index(True), "data") if any(split) else P())

  return jax.tree.map(place, tree)


def from_the_start():
  """With flax nnx and optax

  `jax.eval_shape` runs `init` without memory and gives the shapes. A rule gives each a sharding. With `out_shardings`,
  `jax.jit` makes each device create only its own pieces. Name those of the optimizer's state, too: **where nothing says
  where a result is, jit puts it on one device**. Adam's moments are zeros in the weights' shapes and do not depend on
  the weights. So `jax.jit(adam.init)` of split weights puts them whole on one device. Without jit they keep the
  weights' places.
  """
  mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
  adam = optax.adam(1e-3)
  shardings = sharded(jax.eval_shape(init, 0), mesh)
  weights, state = jax.jit(init, out_shardings=shardings)(0)
  whole, _ = init(0)
  result = {
    "weights": weights,
    "state": state,
    "jax.jit(adam.init)(weights)": jax.jit(adam.init)(weights),
    "adam.init(weights)": adam.init(weights),
    "weights of init(0)": whole,
  }
  for name, tree in result.items():
    print(f"{name}: {held(tree)}")
  return result


def other_pieces():
  """Moments in other pieces than weights (ZeRO-1)

  Weights are whole on all devices, and the moments are split. Constrain the gradients to the moments' pieces, and give
  the step `out_shardings`. Each device then updates its piece, and the new weights are gathered.
  """
  mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
  shapes = jax.eval_shape(init, 0)
  pieces, state_pieces = sharded(shapes, mesh)
  whole = jax.tree.map(lambda _: NamedSharding(mesh, P()), pieces)
  weights, state = jax.jit(init, out_shardings=(whole, state_pieces))(0)
  graph = nnx.graphdef(nnx.eval_shape(lambda: Model(nnx.Rngs(0))))

  def update(weights, state, x):
    loss = lambda weights: jnp.mean(nnx.merge(graph, nnx.State(weights))(x) ** 2)
    gradients = jax.lax.with_sharding_constraint(jax.grad(loss)(weights), pieces)
    updates, state = optax.adam(1e-3).update(gradients, state, weights)
    return optax.apply_updates(weights, updates), state

  x = jax.device_put(jnp.ones((16, 64)), NamedSharding(mesh, P("data")))
  step = jax.jit(update, out_shardings=(whole, state_pieces), donate_argnums=(0, 1))
  weights, state = step(weights, state, x)
  print(f"weights: {held(weights)}\nstate: {held(state)}")
  return {"weights": weights, "state": state}


STEPS = (from_the_start, other_pieces)
