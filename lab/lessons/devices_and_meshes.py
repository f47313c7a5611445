"""Devices and meshes: which devices a program has, and how it names them.

The first lesson of the tour. lab/lessons/__init__.py says how to write a lesson. Next: placing.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import strategies
from errors import ConfigError
from lab.lessons.sent import print_sent
from strategies.execution.mesh import make_mesh, resolve


def devices():
  """The devices of a program

  `jax.devices()` lists the devices of the job. These are GPUs or TPUs if JAX finds any, else the CPU as one device.
  This page always runs on eight devices made from one CPU (`jax_num_cpu_devices`, set before JAX is first used). Each
  behaves like a GPU: it has its own arrays, and data that another device needs must be sent there. But all eight share
  the cores of one machine. So they show what a program holds and sends, but not how fast it is on real devices.

  By default, everything happens on the first device and the others stay idle. Sharding puts them all to work.
  """
  for device in jax.devices():
    print(f"device {device.id}: {device.platform}, of process {device.process_index}")
  x = jnp.arange(8.0)
  y = x * x
  print("x is on device", *[device.id for device in x.devices()], "and so is y:", *[d.id for d in y.devices()])
  return {"devices": jax.devices(), "used": x.devices() | y.devices()}


def meshes():
  """Meshes of one, two and three axes

  A mesh arranges the devices in a grid and names the grid's axes. It computes nothing. It lets a program say "split
  this over `data`" instead of "devices 0, 2, 4 and 6". You choose the names. This repository's names are in
  `strategies/layout.py`, so that layouts can be joined.

  `jax.make_mesh` makes neighbours in the mesh neighbours on the machine, as far as possible. The last axis varies
  fastest, so its devices are closest together. Use it for what communicates most.
  """
  result = {}
  for shape, names in (((8,), ("data",)), ((4, 2), ("data", "model")), ((2, 2, 2), ("stage", "data", "model"))):
    mesh = jax.make_mesh(shape, names)
    print(" × ".join(f"{name}={size}" for name, size in mesh.shape.items()))
    print(mesh.device_ids, end="\n\n")
    result[len(shape)] = mesh.device_ids
  return result


def along_an_axis():
  """Communication along a mesh axis

  Here every device of a 4 × 2 mesh holds its own number. `psum` adds the numbers up along one axis. Along `model`, the
  two devices of each row add up: four groups of two. Along `data`, the four devices of each column add up: two groups
  of four. Every message of a sharded program stays within such a group. The devices of a group differ in their position
  on one axis and agree on the others.

  `jax.shard_map` runs a function once on each device, on the piece of the array that the device holds.
  """
  mesh = jax.make_mesh((4, 2), ("data", "model"))
  numbers = jax.device_put(jnp.arange(8).reshape(4, 2), NamedSharding(mesh, P("data", "model")))
  along_model = jax.shard_map(
    lambda mine: jax.lax.psum(mine, "model"), mesh=mesh, in_specs=P("data", "model"), out_specs=P("data", None)
  )(numbers)
  along_data = jax.shard_map(
    lambda mine: jax.lax.psum(mine, "data"), mesh=mesh, in_specs=P("data", "model"), out_specs=P(None, "model")
  )(numbers)
  print("the devices", numbers, "summed along model", along_model, "summed along data", along_data, sep="\n")
  return {"model": along_model, "data": along_data}


def one_device():
  """Any number of devices, down to one

  A `Layout` of this repository names its mesh axes and may leave a size open: -1 takes the devices that are left.
  `strategies.layout_of` returns a strategy's layout. `resolve` fills in the sizes for a number of devices. If it
  cannot, it raises an error that says why. `make_mesh` then makes the mesh.

  The program below adds up the squares in each column of x. The rows of x are split over `data`, so the devices must
  communicate. On one device every axis has size 1, every piece is the whole array, and nothing is sent. So the sharded
  program also runs on a laptop, and no second version has to be written or tested.
  """
  layout = strategies.layout_of("two_d")
  print("two_d is written for", dict(layout.mesh))
  x = jnp.arange(32.0).reshape(8, 4)
  result = {}
  for n in (8, 4, 1):
    resolved = resolve(layout, n)
    mesh = make_mesh(resolved, jax.devices()[:n])
    batch = jax.device_put(x, NamedSharding(mesh, resolved.spec(("batch", None))))
    program = jax.jit(lambda x: jnp.sum(x * x, axis=0)).lower(batch).compile()
    print(f"devices: {n}, mesh: {dict(resolved.mesh)}, rows of x on each: {len(batch.addressable_shards[0].data)}")
    result[n] = {"y": program(batch), "sent": print_sent(program, mesh), "mesh": resolved.mesh}
  try:
    resolve(layout, 3)
  except ConfigError as error:
    print("devices: 3,", error)
  print("all results are equal:", all(np.array_equal(one["y"], jnp.sum(x * x, axis=0)) for one in result.values()))
  return result


STEPS = (devices, meshes, along_an_axis, one_device)
