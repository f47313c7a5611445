"""Look at a sharding: of an array, inside a jitted function, of a gradient, and of a whole compiled program.

The first lesson of docs/debugging.md. lab/lessons/__init__.py says how to write a lesson. Next: gathers.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lab.lessons.sent import print_sent


def of_an_array():
  """Of an array

  Outside of jit every array knows where it is. `x.sharding` has the mesh and the spec, `x.addressable_shards` the
  pieces of this process, and `jax.debug.visualize_array_sharding` draws them (with the package `rich`). Without an
  array, `lab.views.pictures.picture(sharding, shape)` draws a sharding of any number of dimensions.

  `jax.typeof(x)` shows the sharding only if the mesh axes are `Explicit`, as those of `jax.make_mesh` are by default.
  With `Auto` axes, as in this repository, the type says nothing about the sharding. That does not mean that the array
  is whole.
  """
  result = {}
  for kind in (AxisType.Explicit, AxisType.Auto):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
    x = jax.device_put(np.zeros((8, 16), np.float32), NamedSharding(mesh, P("data", "model")))
    print(f"{kind.name}: typeof {jax.typeof(x)}; spec {x.sharding.spec}; a piece {x.addressable_shards[0].data.shape}")
    result[kind.name] = x
  jax.debug.visualize_array_sharding(x, use_color=False)
  return result


def inside_jit():
  """Inside a jitted function

  In a traced function there is no array yet, and with `Auto` axes `x.sharding` has no answer: the compiler has not
  chosen. `jax.debug.inspect_array_sharding` asks it. The callback runs when the function is *compiled*, once, not when
  it is called. So it also works on a program that you only lower and compile, without memory for its arrays.

  Below, nobody said how to split `hidden`. The compiler propagated both inputs' shardings to it.
  """
  mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
  x = jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=NamedSharding(mesh, P("data")))
  w = jax.ShapeDtypeStruct((32, 64), jnp.float32, sharding=NamedSharding(mesh, P(None, "model")))
  result = []

  def layer(x, w):
    hidden = jax.nn.relu(x @ w)
    jax.debug.inspect_array_sharding(hidden, callback=lambda sharding: result.append(sharding))
    return jnp.sum(hidden)

  jax.jit(layer).lower(x, w).compile()
  print("hidden:", *[sharding.spec for sharding in result])
  return result


def of_a_gradient():
  """Of a gradient

  The gradient of a value may be sharded unlike the value. To look at both, put a function into the program that changes
  nothing, and whose backward pass inspects what arrives. `jax.custom_vjp` makes one.

  Below, `hidden` is pinned: it is split over both axes. In the first program, so is its gradient. In the second,
  `hidden` is then gathered along `model`, by another constraint. Now its gradient arrives whole, and each device
  computes all of it. The reason is easy to forget: differentiating a `with_sharding_constraint` gives a second one,
  which constrains the gradient in the same way. If the gradient should stay split, write the backward pass yourself, as
  `strategies.execution.constraints.Constraints.split_sequence` does.
  """
  mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
  x = jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=NamedSharding(mesh, P("data")))
  w = jax.ShapeDtypeStruct((32, 64), jnp.float32, sharding=NamedSharding(mesh, P(None, "model")))
  result = {}

  def watched(x, name):
    def look(what, x):
      jax.debug.inspect_array_sharding(x, callback=lambda sharding: result.update({f"{name}, {what}": sharding}))
      return x

    same = jax.custom_vjp(lambda x: x)
    same.defvjp(lambda x: (look("value", x), None), lambda _, gradient: (look("gradient", gradient),))
    return same(x)

  constrain = lambda x, *spec: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

  def split(w, x):
    return jnp.sum(jnp.tanh(watched(constrain(x @ w, "data", "model"), "split")))

  def gathered(w, x):
    hidden = watched(constrain(x @ w, "data", "model"), "gathered")
    return jnp.sum(jnp.tanh(constrain(hidden, "data", None)))

  for loss in (split, gathered):
    jax.jit(jax.grad(loss)).lower(w, x).compile()
  for name, sharding in sorted(result.items(), reverse=True):
    print(f"{name}: {sharding.spec}")
  return result


def of_a_program():
  """Of a whole program

  `.lower(...).compile()` gives the program that jit would run. It has the shardings of all inputs and outputs, and its
  text, in XLA's language HLO. Shapes there are those of *one device*. The text is long, but what matters is short: the
  collectives. This prints their lines as they are, cut short.

  `print_sent`, `tools.explain` and the tests read the same text: `lab/analysis/hlo.py` parses it, and
  `lab/analysis/communication.py` finds the mesh axes and the bytes.
  """
  mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
  x = jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=NamedSharding(mesh, P("data")))
  w = jax.ShapeDtypeStruct((32, 64), jnp.float32, sharding=NamedSharding(mesh, P(None, "model")))
  program = jax.jit(lambda x, w: jnp.sum(jax.nn.relu(x @ w), axis=1)).lower(x, w).compile()
  print("inputs:", *[sharding.spec for sharding in program.input_shardings[0]])
  print("output:", program.output_shardings.spec)
  for line in program.as_text().splitlines():
    if "all-reduce(" in line:
      print(line.strip().partition(", channel_id")[0], "...")
  return {"program": program, "sent": print_sent(program, mesh)}


STEPS = (of_an_array, inside_jit, of_a_gradient, of_a_program)
IN_FILE = (of_a_gradient,)
