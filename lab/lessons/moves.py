"""Involuntary full rematerialization: XLA's warning, the line that is meant, and what helps.

The fourth lesson of docs/debugging.md. Next: modes.py.
"""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lab.analysis.compiled import compile_quietly
from lab.lessons.sent import print_sent


def moved(between):
  """Squares [8, 16, 16], split over y and x, and then over both along another dimension."""
  mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
  constrain = lambda x, *spec: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

  def function(x):
    squares = x * x
    squares = constrain(squares, *between) if between else squares
    return constrain(squares, None, ("x", "y"), None) + 1

  placed = NamedSharding(mesh, P("y", None, "x"))
  return jax.jit(function).lower(jax.ShapeDtypeStruct((8, 16, 16), jnp.float32, sharding=placed)), mesh


def one_move():
  """The warning and its line

  If XLA finds no direct way from one sharding to another, each device gathers the whole array and cuts its piece out.
  That is right, but takes the memory and the time of the whole array. XLA warns of it on standard error, with Shardy
  too, and only while it compiles: not of a program from the compilation cache, and not with `TF_CPP_MIN_LOG_LEVEL=2`.

  `python -m tools.explain` prints the warning with its line, for a strategy of this repository and for a jitted
  function of your own:

  ```
  def step(devices):  # in my/module.py; makes a mesh of the devices
    return jax.jit(function).lower(*arguments)  # of jax.ShapeDtypeStruct(shape, dtype, sharding=...)

  JAX_NUM_CPU_DEVICES=8 JAX_PLATFORMS=cpu python -m tools.explain --program=my.module:step
  python -m tools.explain --program=my.module:step --topology=v5e:2x4
  ```

  It also prints memory, and what is sent because of which lines. The function never runs.

  Below, a constraint in between moves one mesh axis at a time. Then only pieces are sent.
  """
  result = {}
  for name, between in (("at once", None), ("x first", ("y", "x", None))):
    lowered, mesh = moved(between)
    program, _, warnings = compile_quietly(lowered, {})
    print(f"{name}:", *(one.replace(one.partition(":")[2].partition("\n")[0], " ...") for one in warnings))
    result[name] = {"warnings": warnings, "sent": print_sent(program, mesh)}
  return result


STEPS = (one_move,)
