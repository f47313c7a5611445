"""One step, three ways: a step of gradient descent on eight devices, with pmap, with jit and with shard_map.

The first lesson of docs/pmap.md. lab/lessons/__init__.py says how to write a lesson. Next: migrating.py.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from lab.lessons.sent import print_sent


def examples():
  """Inputs x [32, 4] and what to predict from them, y [32]."""
  x = jax.random.normal(jax.random.key(0), (32, 4))
  return x, x @ jnp.arange(1.0, 5.0)


def loss(w, x, y):
  """The mean squared error of a linear model w [4]."""
  return jnp.mean((x @ w - y) ** 2)


def train(step, w, *batch):
  """Takes three steps. Prints what is where and what a step sends. Returns the weights, the losses and what is sent."""
  mesh, losses = jax.make_mesh((8,), ("data",)), []
  sent = print_sent(step.lower(w, *batch).compile(), mesh)
  for name, given in zip(("w", "x", "y"), (w, *batch), strict=True):
    print(f"{name} {given.shape}, {given.sharding.spec}: each device has {given.addressable_shards[0].data.shape}")
  for _ in range(3):
    w, value = step(w, *batch)
    losses.append(value)
  print(f"loss {value.shape}, new w {w.shape}, {w.sharding.spec}: each device has {w.addressable_shards[0].data.shape}")
  print("losses", *[f"{jnp.max(value):.4f}" for value in losses])
  return {"w": w, "losses": losses, "sent": sent}


def with_pmap():
  """1. With pmap

  You write what one device does with its own examples, here x [4, 4] and w [4]. You choose a name for the devices,
  "data", and average over it by hand: `pmean` is a psum divided by the number of devices. Outside of the function every
  array gets a leading dimension of devices. So the batch [32, 4] must be reshaped to [8, 4, 4]. The weights are stacked
  eight times, once for each device, and the loss comes back eight times.
  """
  x, y = examples()

  @functools.partial(jax.pmap, axis_name="data")
  def step(w, x, y):
    value, gradient = jax.value_and_grad(loss)(w, x, y)
    value, gradient = jax.lax.pmean((value, gradient), "data")
    return w - 0.1 * gradient, value

  x, y = x.reshape(8, 4, 4), y.reshape(8, 4)
  w = jnp.zeros((8, 4))
  over_devices = jax.pmap(lambda x: x, axis_name="data")  # places each piece on its device
  return train(step, over_devices(w), over_devices(x), over_devices(y))


def with_jit():
  """2. With jit and shardings

  You write what a single device would do with the whole batch. The shardings of the inputs say which device has which
  part. The loss is a mean over all examples, so its gradient is one too, and the compiler inserts the sum over devices.
  The arrays keep their shapes: x is [32, 4], w is [4], and the loss is one number. This is how `data_parallel` and most
  of this repository is written.
  """
  x, y = examples()
  mesh = jax.make_mesh((8,), ("data",))
  split, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

  @jax.jit
  def step(w, x, y):
    value, gradient = jax.value_and_grad(loss)(w, x, y)
    return w - 0.1 * gradient, value

  return train(step, jax.device_put(jnp.zeros(4), whole), jax.device_put(x, split), jax.device_put(y, split))


def with_shard_map():
  """3. With shard_map

  As with pmap, you write what one device does. But the arrays outside keep their shapes, as with jit. `in_specs` say
  how they are split, and `out_specs=P()` says that the results are the same on all devices. shard_map is the closest to
  pmap: use it where you want to write the communication yourself.

  One thing differs from the function for pmap: the mean over devices is now *inside* what is differentiated. The next
  lesson shows why.
  """
  x, y = examples()
  mesh = jax.make_mesh((8,), ("data",))
  split, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

  @jax.jit
  @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P())
  def step(w, x, y):
    mean = lambda w: jax.lax.pmean(loss(w, x, y), "data")
    value, gradient = jax.value_and_grad(mean)(w)
    return w - 0.1 * gradient, value

  return train(step, jax.device_put(jnp.zeros(4), whole), jax.device_put(x, split), jax.device_put(y, split))


STEPS = (with_pmap, with_jit, with_shard_map)
