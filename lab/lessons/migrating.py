"""What changes when you migrate: what pmap code relies on, and what to write in its place.

The second lesson of docs/pmap.md. Next: pmap_here.py.
"""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from lab.lessons.sent import print_sent


def leading_dimension():
  """The leading dimension of devices

  In old code the state has a leading dimension of devices, and `state[0]` takes it off before saving or printing. Under
  today's pmap this is an ordinary slice of a sharded array: the first device sends its piece to all others. To read a
  value on the host without sending anything, use `addressable_data(0)`.

  `in_axes=None` and `out_axes=None` avoid the copies: the argument is replicated, and has its own shape. This is what
  `pmap_ddp` does, and it makes the migration easy, because jit wants the same arrays. A checkpoint that was written
  with the leading dimension needs one `x[0]` for each array, once.
  """
  mesh = jax.make_mesh((8,), ("data",))
  add = lambda w, x: w + jax.lax.psum(x, "data")
  stacked = jax.pmap(add, axis_name="data")(jnp.zeros((8, 4)), jnp.ones(8))
  print("stacked:", stacked.shape, "of which each device has", stacked.addressable_data(0).shape)
  sent = print_sent(jax.jit(lambda w: w[0]).lower(stacked).compile(), mesh)
  once = jax.pmap(add, axis_name="data", in_axes=(None, 0), out_axes=None)(jnp.zeros(4), jnp.ones(8))
  print("in_axes=None, out_axes=None:", once.shape, "of which each device has", once.addressable_data(0).shape)
  return {"stacked": stacked, "once": once, "sent": sent}


def unchecked_replication():
  """What pmap does not check

  `out_axes=None` promises that all devices have the same value. pmap believes it. Here the psum is missing, so the
  devices have eight different sums, and the result is nevertheless "fully replicated". Printing shows the first
  device's value; another computation goes on with all eight. In training, the weights of the devices drift apart
  without an error. shard_map checks this promise with types, and refuses.

  (pmap is a shard_map with `check_vma=False`. If you migrate with that option, you keep the trap.)
  """
  x = np.arange(16.0).reshape(8, 2)
  drifted = jax.pmap(jnp.sum, axis_name="data", out_axes=None)(x)
  print("pmap:", drifted, "fully replicated:", drifted.is_fully_replicated)
  print("on the devices:", *[float(shard.data) for shard in drifted.addressable_shards])
  mesh = jax.make_mesh((8,), ("data",))
  x = jax.device_put(x, NamedSharding(mesh, P("data")))
  try:
    jax.shard_map(jnp.sum, mesh=mesh, in_specs=P("data"), out_specs=P())(x)
  except ValueError as error:
    print("shard_map:", type(error).__name__)
    return {"drifted": drifted, "error": error}


def sums_and_gradients():
  """Names of axes, sums and gradients

  `axis_name` becomes the name of a mesh axis. In a shard_map, `psum`, `pmean`, `axis_index` and the others work as
  before. In a plain jit there is no device of one's own, so these names are unbound. Write the sum over all examples
  and leave out the psum.

  Gradients differ. In pmap a gradient is that of the device's own function, and you add the gradients up afterwards. In
  shard_map the types know that w is the same on all devices. So JAX adds up its gradient already, and a psum afterwards
  counts it eight times. Move the psum (or pmean) into the function that is differentiated, as in the last line.
  """
  mesh = jax.make_mesh((8,), ("data",))
  x = np.arange(8.0)
  w = np.float32(1)
  local = lambda w, x: jnp.sum(w * x)  # the gradient over all examples is 0 + 1 + ... + 7 = 28
  summed = lambda w, x: jax.lax.psum(jnp.sum(w * x), "data")
  after = lambda w, x: jax.lax.psum(jax.grad(local)(w, x), "data")
  with_pmap = functools.partial(jax.pmap, axis_name="data", in_axes=(None, 0))
  with_shard_map = functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
  whole, split = jax.device_put(w, NamedSharding(mesh, P())), jax.device_put(x, NamedSharding(mesh, P("data")))
  result = {
    "pmap, psum of the gradient": with_pmap(after)(w, x),
    "pmap, gradient of the psum": with_pmap(jax.grad(summed))(w, x),
    "jit, no psum": jax.jit(jax.grad(local))(whole, split),
    "shard_map, psum of the gradient": with_shard_map(after)(whole, split),
    "shard_map, gradient of the psum": with_shard_map(jax.grad(summed))(whole, split),
  }
  for name, gradient in result.items():
    print(f"{name}: {gradient}")
  try:
    jax.jit(after)(whole, split)
  except NameError as error:
    print("jit, with psum:", error)
  return result


def random_numbers():
  """Random numbers

  pmap code gives each device a key of its own: one of `split(key, 8)`, or `fold_in(key, axis_index)`. The numbers then
  depend on how many devices there are. With jit, a single key serves the whole batch, as on one device. Each device
  makes its own part of the numbers, and nothing is sent.

  To keep an old run's numbers, keep its keys: a batch of keys, one for each of the eight parts, and a vmap over them.
  This repository makes a key for each *example*, so that dropout is the same on any number of devices.
  """
  key = jax.random.key(0)
  by_device = jax.pmap(lambda key: jax.random.uniform(key, (2,)))(jax.random.split(key, 8)).reshape(16)
  on_four = jax.pmap(lambda key: jax.random.uniform(key, (4,)))(jax.random.split(key, 4)).reshape(16)
  mesh = jax.make_mesh((8,), ("data",))
  over_data = NamedSharding(mesh, P("data"))
  program = jax.jit(lambda key: jax.random.uniform(key, (16,)), out_shardings=over_data).lower(key).compile()
  sharded, kept = program(key), jax.vmap(lambda key: jax.random.uniform(key, (2,)))(jax.random.split(key, 8))
  print("pmap on 8 devices equals pmap on 4:", np.array_equal(by_device, on_four))
  print("jit on 8 devices equals one device:", np.array_equal(sharded, jax.random.uniform(key, (16,))))
  sent = print_sent(program, mesh)
  print("vmap over the old keys equals pmap:", np.array_equal(kept.reshape(16), by_device))
  return {"pmap": (by_device, on_four), "jit": sharded, "kept": kept, "sent": sent}


def batches():
  """Uneven batches, and arguments in the wrong place

  pmap runs on as many devices as the leading dimension says. If a last batch has five parts, it runs on five devices
  and compiles again, without a warning. jit always uses the whole mesh, so a batch that does not divide is an error, as
  it is in pmap's reshape. Pad it and pass a mask ([the
  tour](tour-placing.md#a-batch-that-does-not-divide-padding-and-a-mask)).

  Neither splits a *committed* array for you, one that `device_put` has placed elsewhere. Place it in the sharding that
  the step wants. `jax.device_put_sharded` and `device_put_replicated` no longer exist. `device_put` with a
  `NamedSharding` does the work of both.
  """
  five = jax.pmap(lambda x: 2 * x)(np.zeros((5, 4)))
  print("pmap, five parts: runs on", len(five.devices()), "devices")
  mesh = jax.make_mesh((8,), ("data",))
  over_data = NamedSharding(mesh, P("data"))
  double, pmapped = jax.jit(lambda x: 2 * x, in_shardings=over_data), jax.pmap(lambda x: 2 * x)
  elsewhere = jax.device_put(np.zeros((8, 4)), jax.devices()[3])
  result = {"five": five}
  for name, call in (
    ("jit, five rows", lambda: double(jax.device_put(np.zeros((5, 4)), over_data))),
    ("pmap, placed on device 3", lambda: pmapped(elsewhere)),
    ("jit, placed on device 3", lambda: double(elsewhere)),
    ("jit, placed again", lambda: double(jax.device_put(elsewhere, over_data))),
  ):
    try:
      result[name] = call()
      print(f"{name}: runs on {len(result[name].devices())} devices")
    except ValueError as error:
      result[name] = error
      print(f"{name}: an error")
  return result


def donated_and_static():
  """Donated and static arguments

  `donate_argnums` keeps its name and its meaning: the step may overwrite its old state. But a buffer can be used again
  only for a result of the same shape *and sharding*. Where you let the compiler choose the sharding of the new state,
  it may choose another one. Then the memory is held twice, and JAX warns. So say it with `out_shardings`, as
  `strategies/execution/strategy.py` does.

  `static_broadcasted_argnums` becomes `static_argnums`.
  """
  mesh = jax.make_mesh((8,), ("data",))
  split, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
  result = {}
  for name, shardings in (("whole again", whole), ("split", split)):
    step = jax.jit(lambda w, x, n: w + n * x, donate_argnums=0, static_argnums=2, out_shardings=shardings)
    w, x = (jax.device_put(np.zeros(64, np.float32), sharding) for sharding in (whole, split))
    with warnings.catch_warnings(record=True) as caught:
      warnings.simplefilter("always")
      step(w, x, 3)
    used = not any("donated buffers were not usable" in str(warning.message) for warning in caught)
    print(f"w is whole, the new w is {name}: memory used again: {used}")
    result[name] = used
  pmapped = jax.pmap(lambda x, n: n * x, static_broadcasted_argnums=1)(np.ones(8), 3)
  print("pmap with a static 3:", pmapped)
  return result | {"static": pmapped}


def nested():
  """Nested pmaps

  A pmap in a pmap used to make a grid of devices. It no longer runs: the inner one finds itself on devices that belong
  to the outer one. Use a mesh with two axes. In a shard_map, collectives take the name of one axis, or of both.
  """
  x = np.arange(8.0).reshape(4, 2)
  inner = jax.pmap(lambda x: jax.lax.psum(x, ("rows", "columns")), axis_name="columns")
  try:
    jax.pmap(inner, axis_name="rows")(x)
  except ValueError as error:
    print("pmap in a pmap:", type(error).__name__)
    result = {"error": error}
  mesh = jax.make_mesh((4, 2), ("rows", "columns"))
  specs = P("rows", "columns")
  for names in ("rows", "columns", ("rows", "columns")):
    add = jax.shard_map(
      lambda x, names=names: jax.lax.psum(x, names),
      mesh=mesh,
      in_specs=specs,
      out_specs=P(None if "rows" in names else "rows", None if "columns" in names else "columns"),
    )
    result[names] = jax.jit(add)(jax.device_put(x, NamedSharding(mesh, specs)))
    print("sum over", names, result[names].tolist())
  return result


def processes():
  """Several processes

  Under pmap, each process passes its *own* part of the batch, with a leading dimension of its own devices, and gets its
  own part of the results. Collectives span all processes. With jit there are only global arrays: every process calls
  the step with the same array [32, 4], of which it holds a part. `jax.make_array_from_process_local_data` makes that
  array from the rows of each process.

  This changes three things. A global array cannot be read as a whole in one process (`np.asarray` fails), so reduce
  what you print to a replicated number. Sums and means over the batch are global without a psum. And each process must
  know *which* rows are its own: `Strategy.rows` says so in this repository. Here there is one process, which holds all
  rows.
  """
  mesh = jax.make_mesh((8,), ("data",))
  over_data = NamedSharding(mesh, P("data"))
  rows = over_data.addressable_devices_indices_map((32, 4))
  own = np.concatenate([np.arange(32)[index[0]] for index in rows.values()])
  batch = jax.make_array_from_process_local_data(over_data, np.ones((len(own), 4)), global_shape=(32, 4))
  print(f"process {jax.process_index()} of {jax.process_count()} has rows {own.min()} to {own.max()} of {batch.shape}")
  print("fully addressable:", batch.is_fully_addressable)
  return {"own": own, "batch": batch}


STEPS = (
  leading_dimension,
  unchecked_replication,
  sums_and_gradients,
  random_numbers,
  batches,
  donated_and_static,
  nested,
  processes,
)
IN_FILE = (batches, donated_and_static, nested)
