"""What waits for the device: what blocks async dispatch, and what does not.

The eighth lesson of docs/debugging.md. Next: rounding.py.
"""

import jax
import jax.numpy as jnp
import numpy as np

CASES = (
  "y + 1", "jnp.sum(y)", "step(y)", "y.shape, y.sharding", "y.copy_to_host_async()", "jax.device_put(host)",
  "jax.device_put(y, jax.devices()[1])",
  "jax.block_until_ready(y)", "float(y)", "y.item()", "bool(y > 0)", "np.asarray(y)", "jax.device_get(y)",
  "y.tolist()", "str(y)", "f'{y}'", "range(int(y))", "np.sin(y)", "logged(y)",
)  # fmt: skip


def what_waits():
  """What waits

  JAX returns before the device has computed a result (async dispatch), so Python can start the next steps meanwhile.
  It waits when something needs a *value*. Below, `y` takes a while. Each line ran meanwhile, and waited if y was ready
  afterwards. `step` donates y, `host` is a NumPy array, and `logged` has a `jax.debug.callback`.

  In a training loop, fetch the metrics of a step after starting the next one, with a single `jax.device_get`. For
  timings, call `jax.block_until_ready` after many steps. Dispatch also stops when too many steps are queued; on CPUs,
  when a program with a callback needs nothing that is still computed: it then runs within the call.
  """
  work = jax.jit(lambda x: jax.lax.fori_loop(0, 400, lambda _, x: jnp.tanh(x @ x), x)[0, :2])
  x, result = jnp.ones((384, 384)), {}
  step = jax.jit(lambda y: y * 2, donate_argnums=0)
  logged = jax.jit(lambda y: (jax.debug.callback(lambda y: None, y), y * 2)[1])
  known = {"jax": jax, "jnp": jnp, "np": np, "step": step, "host": np.ones(1 << 16), "logged": logged}
  for code in CASES:
    for _ in range(2):  # the first time compiles
      y, done = work(x)
      eval(code, known | {"y": y})
      result[code] = done.is_ready()
      done.block_until_ready()
  for code, waited in result.items():
    print(f"{'waits  ' if waited else 'returns'}  {code}")
  return result


STEPS = IN_FILE = (what_waits,)
