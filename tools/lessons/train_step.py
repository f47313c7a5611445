"""A training step: where its communication comes from, and the same step by the old API and by the new.

The fourth lesson of the tour. Next: memory.py.
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import strategies
from configs import base
from data.batches import Batches
from data.synthetic import Synthetic
from tools.lessons.sent import print_sent
from training import settings


def gradient_of_a_split_batch():
  """The gradient of a split batch

  Each device has all of the weights and its part of the batch. The loss is a sum over all examples, so its gradient is
  a sum over all examples too, and therefore over devices. That is the whole of data parallelism, and no line has to
  say it: the weight w lies whole on every device, so its gradient must as well, and the compiler adds up the parts.

  In `shard_map` one device's function is differentiated for its own examples, and the sum is yours to write, as a
  `psum`. Here is a trap. The types know that w is one and the same on all devices, so JAX adds up its gradient by
  itself, and a psum after that counts it once for every device, with no error. Either leave the psum out, or say by
  `pcast` that each device differentiates with respect to a copy of its own.
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
  """The same training step by pmap and by jit

  `jax.pmap` is the old way, still met in much code: a function of one device's part, run on all of them. Batches get a
  leading axis of devices, and every sum over devices is a `psum` in the code. With `jit` and a sharded batch the
  step is written for one device, and the batch keeps its shape. Today pmap is itself a jit of a shard_map.

  Here is the real training step of this repository under both: a small Transformer, AdamW, gradient clipping. All that
  pmap needs is in `strategies/pmap_ddp.py`; `strategies/data_parallel.py` is one line, a layout. The losses are equal,
  and so is what is sent: each gradient once. Only when differs. By hand all gradients are added up at the end; the
  compiler adds up those of a block as soon as they are there, in each of the 4 rounds of the loop over blocks. (The
  tokens are noise, so there is nothing to learn and the loss does not fall.)
  """
  config = base.get_config("tiny", "data_parallel")
  program = settings.program(config, "cpu")
  batches = Batches(Synthetic(program.model, first=0, size=64), size=16)
  result = {}
  for name in ("pmap_ddp", "data_parallel"):
    strategy = strategies.create({"strategy": name, "mesh": {}}, program, jax.devices())
    train_step = strategy.lower_train_step(batch_size=16).compile()
    state, losses = strategy.init(seed=0), []
    for step in range(3):
      batch = strategy.shard(batches.train(step), batch_size=16)
      state, metrics = train_step(state, batch)
      losses.append(float(metrics["loss"]))
    print(f"{name}: tokens {batch['tokens'].shape}, losses", *[f"{loss:.4f}" for loss in losses])
    sent = print_sent(train_step, strategy.mesh)
    print(f"in all: {sum(one.sent_in_step for one in sent):,.0f} bytes sent by each device\n")
    result[name] = {"losses": losses, "params": jax.device_get(state.params), "batch": batch, "sent": sent}
  return result


STEPS = (gradient_of_a_split_batch, pmap_and_jit)
