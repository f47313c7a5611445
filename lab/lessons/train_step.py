"""A training step: where its communication comes from.

The fourth lesson of the tour. Next: ring.py.
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from lab.lessons.sent import print_sent


def gradient_of_a_split_batch():
  """The gradient of a split batch

  Each device has all weights and its part of the batch. The loss is a sum over all examples. So its gradient is also a
  sum over all examples, and therefore over all devices. This is the idea of data parallelism. With `jit` you do not
  have to write the sum: the weight w is whole on every device, so its gradient must be whole too, and the compiler adds
  up the parts.

  In `shard_map` you differentiate one device's function for its own examples, and you would expect to write the sum
  yourself, as a `psum`. This is a trap. The types know that w is the same on all devices, so JAX already adds up its
  gradient. A psum after that counts the gradient once for every device, without an error. Either leave the psum out, or
  use `pcast` to differentiate with respect to each device's own copy of w.
  """
  mesh = jax.make_mesh((8,), ("data",))
  x = jax.device_put(jax.random.normal(jax.random.key(0), (16, 4)), NamedSharding(mesh, P("data")))
  w = jax.device_put(jnp.ones(4), NamedSharding(mesh, P()))
  loss = lambda w, x: jnp.sum(jnp.tanh(x @ w))
  gradient = jax.grad(loss)
  own = lambda w: jax.lax.pcast(w, "data", to="varying")
  on_each = lambda f: jax.shard_map(f, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
  expected = gradient(*jax.device_get((w, x)))
  result = {}
  for name, function in (
    ("gradient of the global loss", gradient),
    ("shard_map, pcast and psum", on_each(lambda w, x: jax.lax.psum(gradient(own(w), x), "data"))),
    ("shard_map, neither", on_each(gradient)),
    ("shard_map, psum alone", on_each(lambda w, x: jax.lax.psum(gradient(w, x), "data"))),
  ):
    program = jax.jit(function).lower(w, x).compile()
    y = jax.device_get(program(w, x))
    print(f"{name}: {jnp.mean(y / expected):.1f} × the gradient on one device")
    result[name] = {"y": y, "expected": expected, "sent": print_sent(program, mesh)}
  return result


STEPS = (gradient_of_a_split_batch,)
