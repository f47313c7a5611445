"""Four ways to write a sharded layer: the same numbers, and the same message, with more and more of it said by you.

The third lesson of the tour. Next: train_step.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tools.lessons.sent import print_sent


def arrays():
  """A batch x [16, 32] and the weights of an MLP, w1 [32, 64] and w2 [64, 32]."""
  keys = jax.random.split(jax.random.key(0), 3)
  return [jax.random.normal(key, shape) for key, shape in zip(keys, ((16, 32), (32, 64), (64, 32)), strict=True)]


def plain(x, w1, w2):
  """A layer for one device, which the sharded ones must equal."""
  return jax.nn.relu(x @ w1) @ w2


def compared(y, program, mesh):
  """Prints what a way sends, and whether its result is that of one device, to 1e-5 of the largest entry."""
  expected = plain(*arrays())
  difference = float(np.abs(y - expected).max() / np.abs(expected).max())
  sent = print_sent(program, mesh)
  print("equal to one device:", difference < 1e-5)
  return {"y": y, "expected": expected, "sent": sent}


def by_the_compiler():
  """1. The compiler chooses

  The layer is two matrix products with a relu between. Its batch lies over `data`, its hidden units over `model`: each
  device has a quarter of the examples, half of w1's columns and the half of w2's rows that goes with them. So the first
  product and the relu need nothing from other devices. The second adds up over the hidden units, of which a device has
  half. What it gets is a partial sum, and the two devices along `model` must add up theirs. This is tensor parallelism.

  The first way is to place the inputs and say nothing else. Mesh axes of type `Auto` leave everything to the compiler:
  it carries the shardings of the inputs through the program and finds that one all-reduce is needed.

  `.lower(...).compile()` is what `jit` does at its first call; done by hand, the compiled program can be read.
  """
  mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
  specs = P("data"), P(None, "model"), P("model")
  x, w1, w2 = (jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(arrays(), specs, strict=True))
  program = jax.jit(plain).lower(x, w1, w2).compile()
  y = program(x, w1, w2)
  print("result:", y.sharding.spec, "chosen by the compiler")
  return compared(y, program, mesh)


def with_constraints():
  """2. With constraints

  `with_sharding_constraint` is a fixed point in the middle of the program: here this array lies so. Between the fixed
  points the compiler still chooses. In a large model one pins what matters, the activations at the borders of a layer,
  and so the whole follows one plan instead of a guess. This repository is written in this way; WORKSPACE.md says why.

  Here the constraints say what the compiler had found, so nothing changes. A later step shows where they differ.
  """
  mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
  specs = P("data"), P(None, "model"), P("model")
  x, w1, w2 = (jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(arrays(), specs, strict=True))

  def layer(x, w1, w2):
    hidden = jax.lax.with_sharding_constraint(jax.nn.relu(x @ w1), P("data", "model"))
    return jax.lax.with_sharding_constraint(hidden @ w2, P("data", None))

  with jax.set_mesh(mesh):  # which the specs above are about
    program = jax.jit(layer).lower(x, w1, w2).compile()
  y = program(x, w1, w2)
  print("result:", y.sharding.spec, "as the constraint says")
  return compared(y, program, mesh)


def in_types():
  """3. Sharding in types

  Mesh axes of type `Explicit`, which `jax.make_mesh` makes by default, put the sharding into the type of every value.
  `float32[16@data,64@model]` is a matrix whose rows lie over `data` and columns over `model`. The type of each result
  follows from the types of the operands by rules, when Python traces the function and before anything is compiled.
  `jax.typeof` shows it, in the middle of a function as well.

  Where the rules leave a choice, it is yours to make. The second product adds up over a split dimension, so its result
  may be whole, or split in one way or another: JAX raises an error until `out_sharding` says which.
  """
  mesh = jax.make_mesh((4, 2), ("data", "model"))

  def layer(x, w1, w2):
    hidden = jax.nn.relu(x @ w1)
    print("hidden:", jax.typeof(hidden))
    try:
      hidden @ w2
    except Exception as error:
      print("hidden @ w2:", type(error).__name__)
    return jnp.matmul(hidden, w2, out_sharding=P("data", None))

  with jax.set_mesh(mesh):
    specs = P("data"), P(None, "model"), P("model")
    x, w1, w2 = (jax.device_put(a, spec) for a, spec in zip(arrays(), specs, strict=True))
    print("x, w1, w2:", *map(jax.typeof, (x, w1, w2)))
    program = jax.jit(layer).lower(x, w1, w2).compile()
    y = program(x, w1, w2)
  print("result:", jax.typeof(y))
  return compared(y, program, mesh)


def by_hand():
  """4. By hand, with shard_map

  Inside `jax.shard_map` there is no global array any more. The function is what one device does, with its own pieces:
  x is [4, 32] there, w1 is [32, 32]. Nothing is sent unless you say so. The partial sums are added up by `psum`, over
  the axis `model`; without it each device would go on with its own half of the sum.

  The types help here too. `{V:(data,model)}` says that a value *varies* along both axes: devices hold different ones.
  After the psum it varies along `data` alone. `out_specs=P("data")` promises that it is the same along `model`, and
  JAX checks that from the types: leave the psum out and it is an error, not a wrong number.
  """
  mesh = jax.make_mesh((4, 2), ("data", "model"))
  specs = P("data"), P(None, "model"), P("model")
  x, w1, w2 = (jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(arrays(), specs, strict=True))

  def on_one_device(x, w1, w2):
    partial = jax.nn.relu(x @ w1) @ w2
    total = jax.lax.psum(partial, "model")
    print("x, w1, w2:", *map(jax.typeof, (x, w1, w2)))
    print("partial:", jax.typeof(partial))
    print("total:", jax.typeof(total))
    return total

  layer = jax.shard_map(on_one_device, mesh=mesh, in_specs=specs, out_specs=P("data"))
  program = jax.jit(layer).lower(x, w1, w2).compile()
  y = program(x, w1, w2)
  print("result:", jax.typeof(y))
  return compared(y, program, mesh)


def where_they_differ():
  """5. Where they differ

  Now fully sharded data parallelism (FSDP): one axis, the batch over it, and the weights over it too, w1 by rows and w2
  by columns. Meant is that each weight is gathered just before its use, and that examples stay where they are. But
  nothing in the inputs says so. In `hidden @ w2` both operands lie over `data`, and one of them must be gathered. The
  compiler takes the smaller one. With 256 examples that is the weight. With 16 it is the *hidden units*: cheaper for
  this one product, but its result is split by columns, every device has all examples, and what follows goes on from
  there. So the plan of the whole program depends on the size of the batch.

  Two constraints, "here this weight is whole", make the plan yours; `Layout.gather` is this repository's. In types the
  product does not get past tracing, since no array can be split over one axis in two dimensions. So the four ways
  differ in who decides, and in how a mistake shows:

  | | Decides | A mistake shows |
  |---|---|---|
  | by the compiler | the compiler, from the inputs | as a slower program |
  | with constraints | you at the fixed points, the compiler between them | as a slower program |
  | in types | you, by rules that ask where they are in doubt | as an error while tracing |
  | by hand | you, message by message | as an error while tracing; with the checks off, as a wrong number |
  """
  few, w1, w2 = arrays()
  many = jnp.tile(few, (16, 1))
  specs = P("data"), P("data"), P(None, "data")
  whole = lambda w: jax.lax.with_sharding_constraint(w, P())
  gathering = lambda x, w1, w2: plain(x, whole(w1), whole(w2))
  result = {}
  for name, layer, x in (
    ("by the compiler, 256 examples", plain, many),
    ("by the compiler, 16 examples", plain, few),
    ("with constraints, 16 examples", gathering, few),
  ):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
      placed = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip((x, w1, w2), specs, strict=True)]
      program = jax.jit(layer).lower(*placed).compile()
    y = program(*placed)
    print(f"{name}: each device has {y.sharding.shard_shape(y.shape)} of the result {y.shape}")
    result[name] = {"y": y, "expected": plain(x, w1, w2), "sent": print_sent(program, mesh)}

  with jax.set_mesh(jax.make_mesh((8,), ("data",))):
    placed = [jax.device_put(a, spec) for a, spec in zip((few, w1, w2), specs, strict=True)]
    try:
      plain(*placed)
    except Exception as error:
      print("in types:", type(error).__name__)
      result["in types"] = error
  return result


STEPS = (by_the_compiler, with_constraints, in_types, by_hand, where_they_differ)
