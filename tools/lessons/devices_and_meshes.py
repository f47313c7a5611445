"""Devices and meshes: what there is to compute on, and the names that a program gives it.

The first lesson of the tour; tools/lessons/__init__.py says how a lesson is written. Next: placing.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import strategies
from errors import ConfigError
from strategies.mesh import make_mesh, resolve
from tools.lessons.sent import print_sent


def devices():
  """What there is to compute on

  `jax.devices()` lists the devices of the job: GPUs or TPUs where JAX finds some, else the CPU, as one device. This
  page always runs on eight devices made of one CPU (`jax_num_cpu_devices`, set before JAX is first used). Each is as
  much a device as a GPU is: it has arrays of its own, and what another one needs must be sent to it. But all eight
  share the cores of one machine, so they show what a program holds and sends, and nothing about how fast it is.

  Without instructions everything happens on the first device, and the others stay idle. That is why sharding exists.
  """
  for device in jax.devices():
    print(f"device {device.id}: {device.platform}, of process {device.process_index}")
  x = jnp.arange(8.0)
  y = x * x
  print("x is on device", *[device.id for device in x.devices()], "and so is y:", *[d.id for d in y.devices()])
  return {"devices": jax.devices(), "used": x.devices() | y.devices()}


def meshes():
  """Meshes of one, two and three axes

  A mesh is the devices, arranged in a grid whose axes have names. It computes nothing. It is there so that a program
  can say "split this over `data`" and not "devices 0, 2, 4 and 6". The names are yours; this repository's are in
  `strategies/layout.py`, so that layouts can be joined.

  `jax.make_mesh` arranges the devices so that neighbours in the mesh are neighbours on the machine, as far as they can
  be. The last axis varies fastest: its devices lie closest together, and it should carry what communicates most.
  """
  result = {}
  for shape, names in (((8,), ("data",)), ((4, 2), ("data", "model")), ((2, 2, 2), ("stage", "data", "model"))):
    mesh = jax.make_mesh(shape, names)
    print(" × ".join(f"{name}={size}" for name, size in mesh.shape.items()))
    print(mesh.device_ids, end="\n\n")
    result[len(shape)] = mesh.device_ids
  return result


def along_an_axis():
  """What it means to communicate along an axis

  Here every device holds one number, its own, and adds it up with others by `psum`, once along each axis of a 4 × 2
  mesh. Along `model` the devices of a row add up, in four groups of two; along `data` those of a column, in two groups
  of four. Whatever a sharded program sends, it sends within such groups: the devices that differ in one axis and agree
  in the others.

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

  A layout of this repository names its mesh axes and leaves sizes open: -1 takes the devices that are left. `resolve`
  fills them in for a number of devices, and says in one sentence what is wrong if it cannot.

  The program below adds up the squares in each column of x, whose rows lie over `data`, so its devices have to send
  something. On one device every axis has size 1, every piece is the whole array, and nothing is sent: the sharded
  program *is* the single-device program. No second path through the code has to be written for a laptop, nor tested.
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
