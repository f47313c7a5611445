"""A training step: where its communication comes from, and the same step with the old API and the new one.

The fourth lesson of the tour. Next: ring.py.
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import strategies
from configs import base
from data.batches import Batches, Mixture
from data.synthetic import Synthetic
from lab.lessons.sent import print_sent
from training import settings


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


def pmap_and_jit():
  """The same training step with pmap and with jit

  `jax.pmap` is the old API, and much code still uses it. You write a function of one device's part, and pmap runs it on
  all devices. Batches get a leading dimension of devices, and the code writes every sum over devices as a `psum`. With
  `jit` and a sharded batch you write the step for one device, and the batch keeps its shape. Today pmap itself is a jit
  of a shard_map ([more](pmap.md)).

  Here both run the real training step of this repository, with a small Transformer, AdamW and gradient clipping.
  `strategies/pmap_ddp.py` has what pmap needs. `strategies/data_parallel.py` needs one line, a layout. The losses are
  equal, and both send each gradient once. Only the moment differs. With pmap, the code adds all gradients up at the end
  of the step. With jit, the compiler adds up a block's gradients as soon as they exist, in each of the 4 iterations of
  the loop over blocks. (The tokens are noise, so there is nothing to learn and the loss does not fall.)
  """
  config = base.get_config("tiny", "data_parallel")
  program = settings.program(config, "cpu")
  batches = Batches(Mixture([Synthetic(program.sizes, first=0, size=64)]), size=16)
  result = {}
  for name in ("pmap_ddp", "data_parallel"):
    strategy = strategies.create(base.get_config("tiny", name), program, jax.devices())
    train_step = strategy.lower_train_step(batch_size=16).compile()
    state, losses = strategy.init(seed=0), []
    for step in range(3):
      batch = strategy.shard(batches.read(step), batch_size=16)
      state, metrics = train_step(state, batch)
      losses.append(float(metrics["loss"]))
    print(f"{name}: tokens {batch['tokens'].shape}, losses", *[f"{loss:.4f}" for loss in losses])
    sent = print_sent(train_step, strategy.mesh)
    print(f"in all: {sum(one.sent_in_step for one in sent):,.0f} bytes sent by each device\n")
    result[name] = {"losses": losses, "params": jax.device_get(state.params), "batch": batch, "sent": sent}
  return result


STEPS = (gradient_of_a_split_batch, pmap_and_jit)
