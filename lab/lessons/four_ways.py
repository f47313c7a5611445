"""Four ways to write a sharded layer: same result and same communication, but each way leaves less to the compiler.

The third lesson of the tour. Next: train_step.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lab.lessons.sent import print_sent


def arrays():
  """A batch x [16, 32] and the weights of an MLP, w1 [32, 64] and w2 [64, 32]."""
  keys = jax.random.split(jax.random.key(0), 3)
  return [jax.random.normal(key, shape) for key, shape in zip(keys, ((16, 32), (32, 64), (64, 32)), strict=True)]


def plain(x, w1, w2):
  """The layer on one device. The sharded layers must equal it."""
  return jax.nn.relu(x @ w1) @ w2


def compared(y, program, mesh):
  """Prints what the program sends, and whether the result equals one device's, to 1e-5 of the largest entry."""
  expected = plain(*arrays())
  difference = float(np.abs(y - expected).max() / np.abs(expected).max())
  sent = print_sent(program, mesh)
  print("equal to one device:", difference < 1e-5)
  return {"y": y, "expected": expected, "sent": sent}


def by_the_compiler():
  """1. The compiler chooses

  The layer is two matrix products with a relu between them. The batch is split over `data` and the hidden units over
  `model`. So each device has a quarter of the examples, half of w1's columns and the matching half of w2's rows. The
  first product and the relu need nothing from other devices. The second product adds up over the hidden units, and each
  device has only half of them. So each device gets a partial sum, and the two devices along `model` must add theirs up.
  This is tensor parallelism.

  The first way is to place the inputs and say nothing more. Mesh axes of type `Auto` leave everything to the compiler.
  It propagates the shardings of the inputs through the program and finds that one all-reduce is needed.

  `jit` runs `.lower(...).compile()` at its first call. We call it ourselves here to read the compiled program.
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

  `with_sharding_constraint` fixes the sharding of an array in the middle of a program. Between these fixed points the
  compiler still chooses. In a large model you fix the arrays that matter, such as the activations between layers. The
  whole program then follows your plan and not the compiler's guess. This repository works this way: the model calls
  `Constraints` (in `strategies/execution/constraints.py`), which sets the constraints. `docs/why.md` gives the reasons,
  under "Automatic sharding mode".

  Here the constraints equal what the compiler chose before, so nothing changes. A later step shows where they differ.
  """
  mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
  specs = P("data"), P(None, "model"), P("model")
  x, w1, w2 = (jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(arrays(), specs, strict=True))

  def layer(x, w1, w2):
    hidden = jax.lax.with_sharding_constraint(jax.nn.relu(x @ w1), P("data", "model"))
    return jax.lax.with_sharding_constraint(hidden @ w2, P("data", None))

  with jax.set_mesh(mesh):  # the mesh that the specs above refer to
    program = jax.jit(layer).lower(x, w1, w2).compile()
  y = program(x, w1, w2)
  print("result:", y.sharding.spec, "as the constraint says")
  return compared(y, program, mesh)


def in_types():
  """3. Sharding in types

  Mesh axes of type `Explicit` put the sharding into the type of every value. This is the default of `jax.make_mesh`.
  The type `float32[16@data,64@model]` is a matrix with its rows split over `data` and its columns over `model`. Rules
  derive the type of each result from the types of the operands. This happens while Python traces the function, before
  anything is compiled. `jax.typeof` shows the type, even in the middle of a function.

  If the rules leave a choice, you must make it. The second product adds up over a split dimension, so its result could
  be whole or split in several ways. JAX raises an error unless `out_sharding` says which.
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

  Inside `jax.shard_map` there are no global arrays. The function describes what one device does with its own pieces: x
  is [4, 32] there, and w1 is [32, 32]. Nothing is sent unless you write it. `psum` adds up the partial sums over the
  axis `model`. Without it, each device would continue with its own half of the sum.

  The types help here too. `{V:(data,model)}` says that a value *varies* along both axes: the devices hold different
  values. After the psum it varies only along `data`. `out_specs=P("data")` promises that the value is the same along
  `model`, and JAX checks this promise with the types. If you forget the psum, you get an error and not a wrong number.
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

  The next example is fully sharded data parallelism (FSDP). There is one axis. It splits the batch and also the
  weights: w1 by rows and w2 by columns. We want each weight to be gathered just before its use, and each example to
  stay on its device. But the shardings of the inputs do not say that. In `hidden @ w2` both operands are split over
  `data`, so one of them must be gathered, and the compiler gathers the smaller one. With 256 examples that is the
  weight. With 16 examples it is the *hidden units*. This is cheaper for this product. But its result is split by
  columns, so every device has all examples, and the rest of the program continues from there. So the batch size decides
  how the whole program is sharded.

  Two constraints that make each weight whole before its use prevent this. In this repository, `Constraints.gather` (in
  `strategies/execution/constraints.py`) sets them. With sharding in types, the product fails while tracing, because one
  axis cannot split two dimensions of the result. So the four ways differ in who decides and in what a mistake does:

  | Way | Who decides | What a mistake does |
  |---|---|---|
  | by the compiler | the compiler, from the inputs | a slower program |
  | with constraints | you at the fixed points, the compiler between them | a slower program |
  | in types | you, whenever the rules leave a choice | an error while tracing |
  | by hand | you, for every message | an error while tracing, or a wrong number if the checks are off |
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
