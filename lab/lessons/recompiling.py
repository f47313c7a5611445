"""Compiled again: what makes jit trace and compile a function a second time.

The seventh lesson of docs/debugging.md. Next: waiting.py.
"""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

TRACED, COMPILED = "/jax/core/compile/jaxpr_trace_duration", "/jax/core/compile/backend_compile_duration"
CASES = (  # a call, and another one
  ("step(x)", "step(x)"),
  ("step(x)", "step(shorter)"),
  ("step(x)", "step(half)"),
  ("step(x, 1.0)", "step(x, 2.0)"),
  ("step(x, 1.0)", "step(x, 1)"),
  ("step(x, 1.0)", "step(x, one)"),
  ("step(x, np.float32(1))", "step(x, one)"),
  ("step(x, 1.0)", "step(x, y=1.0)"),
  ("step({'a': x})", "step({'a': x, 'b': None})"),
  ("fixed(x, 2)", "fixed(x, 3)"),
  ("fixed(x, Settings())", "fixed(x, Settings())"),
  ("jax.jit(scale)(x)", "jax.jit(scale)(x)"),
  ("jax.jit(lambda x: x * 2)(x)", "jax.jit(lambda x: x * 2)(x)"),
  ("jax.jit(partial(scale, y=2))(x)", "jax.jit(partial(scale, y=2))(x)"),
  ("jax.jit(jax.grad(loss))(x)", "jax.jit(jax.grad(loss))(x)"),
  ("step(x)", "step(on_device_0)"),
  ("step(whole)", "step(split)"),
  ("step(split)", "step(split_too)"),
  ("step(split)", "within(jax.set_mesh(mesh), step, split)"),
  ("step(x)", "within(jax.default_matmul_precision('highest'), step, x)"),
)


class Settings:
  """Without __eq__ and __hash__, which a frozen dataclass has."""

  def __rmul__(self, x):
    return 2 * x


def names():
  """What the calls use. `step` and `fixed` are new each time."""
  scale = lambda x, y=2.0: jax.tree.map(lambda x: x * y, x)
  mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
  x, place = np.ones((8, 4), np.float32), lambda *spec: NamedSharding(mesh, P(*spec))

  def within(context, function, x):
    with context:
      return function(x)

  return {
    "step": jax.jit(lambda x, y=2.0: scale(x, y)), "fixed": jax.jit(lambda x, y: x * y, static_argnums=1),
    "x": jnp.asarray(x), "shorter": jnp.asarray(x[:4]), "half": jnp.asarray(x, jnp.bfloat16), "one": jnp.float32(1),
    "on_device_0": jax.device_put(x, jax.devices()[0]), "whole": jax.device_put(x, place()),
    "split": jax.device_put(x, place("data")), "split_too": jax.device_put(x, place("data", None)),
    "scale": scale, "loss": lambda x: jnp.sum(x * x), "partial": functools.partial, "within": within, "mesh": mesh,
    "jax": jax, "np": np, "Settings": Settings,
  }  # fmt: skip


def again():
  """What compiles again

  A jitted function is compiled again for whatever its program depends on. Each line below is a call and a second one,
  and whether the second traced the function (ran its Python code) and compiled it. `shorter` and `half` have another
  shape or dtype than `x`, `one` is an array, and y of `fixed(x, y)` is a static argument.

  - A **Python number** is weakly typed; an array or a NumPy number is not. Pass one kind.
  - **Keywords, None, other keys** make another tree of arguments.
  - **Static arguments** are compared by value: give their class `__eq__` and `__hash__`.
  - **A function made anew** in a loop, as a lambda, a `partial` or by `jax.grad`, is another one. Jit it once, outside.
  - **Places**: an array put on a device (committed), another sharding, `jax.set_mesh`.
  - **Settings**, such as the precision of products.

  In your program, `JAX_LOG_COMPILES=1` prints each compilation, and `JAX_EXPLAIN_CACHE_MISSES=1` why. To fail instead,
  call what `.lower(...).compile()` returns: it refuses other arguments.
  """
  result, seen = {}, Counter()
  listen = lambda event, seconds, **_: seen.update([event])
  jax.monitoring.register_event_duration_secs_listener(listen)
  for first, second in CASES:
    known = names()
    eval(first, known)
    seen.clear()
    eval(second, known)
    result[first, second] = seen[TRACED], seen[COMPILED]
  jax.monitoring.unregister_event_duration_listener(listen)
  for (first, second), (traced, compiled) in result.items():
    said = " and ".join(["traced"] * bool(traced) + ["compiled"] * bool(compiled)) or "-"
    print(f"{first:33}{second:58}{said}")
  return result


STEPS = IN_FILE = (again,)
