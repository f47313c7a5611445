"""Placing arrays: which device holds which piece of an array, how a batch gets there, and how to move an array.

The second lesson of the tour. Next: four_ways.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from data.batches import EvaluationBatches
from lab.lessons.sent import print_sent
from lab.views.pictures import picture


def specs():
  """What a PartitionSpec does to an array

  A `PartitionSpec`, or `P`, has one entry for each dimension of an array: the mesh axis that splits the dimension, or
  None. Along a mesh axis that it does not name, the devices hold copies. A mesh and a spec together make a
  `NamedSharding`, which determines the piece that each device holds.

  Below is the same array [8, 16] under six specs on a 4 × 2 mesh. Each cell is a piece. The numbers in it are the
  devices that hold the piece, and the margins show the indices that it covers. The array's shape is always (8, 16),
  because a sharded array is still one array and most code can ignore that it is sharded. (With the package `rich`,
  `jax.debug.visualize_array_sharding(x)` draws similar pictures.)
  """
  mesh = jax.make_mesh((4, 2), ("data", "model"))
  result = {}
  for spec in (P("data", None), P(None, "model"), P("data", "model"), P("model", "data"), P(("data", "model")), P()):
    x = jax.device_put(jnp.zeros((8, 16)), NamedSharding(mesh, spec))
    print(f"{spec}    type: {jax.typeof(x)}")
    print(picture(x.sharding, x.shape), end="\n\n")
    result[spec] = x
  return result


def a_batch():
  """Placing a batch

  Data parallelism splits the first dimension of the batch over `data`. `device_put` cuts the host's array and sends
  each device its rows. No dimension is split over `model`. So the two devices in a row of the mesh get the same
  examples, and `replica` numbers these copies.

  In a job of several processes, each process has only its own rows. `make_array_from_process_local_data` takes those
  rows and the global shape, and returns the global array. Here there is one process, so its rows are all the rows.
  """
  mesh = jax.make_mesh((4, 2), ("data", "model"))
  over_data = NamedSharding(mesh, P("data"))
  host_batch = np.arange(16).reshape(8, 2)
  batch = jax.device_put(host_batch, over_data)
  for shard in batch.addressable_shards:
    print(f"device {shard.device.id}, replica {shard.replica_id}: rows {shard.data.tolist()}")
  from_processes = jax.make_array_from_process_local_data(over_data, host_batch, global_shape=(8, 2))
  print("the same from each process's rows:", bool(jnp.array_equal(batch, from_processes)))
  return {"batch": batch, "from_processes": from_processes}


class Thirteen:
  """A data set of 13 numbered examples."""

  def __len__(self):
    return 13

  def read(self, ids):
    return {"x": ids.astype(np.float32) ** 2}


def uneven_batch():
  """A batch that does not divide: padding and a mask

  All pieces of an array have the same size, so 13 examples cannot be split over 8 devices. Shapes are also part of a
  compiled program, so a last batch of another size would be compiled again. Therefore every batch has the same size.
  The last batch is padded, and a mask marks the real rows.

  The padding must not change the result. A mean over the batch would count it. A mean of the devices' means would give
  a device with one example the weight of a device with eight. Sums avoid both mistakes: add up the loss and the count
  over all devices, and divide once at the end. All losses in this repository are computed this way.
  """
  over_data = NamedSharding(jax.make_mesh((8,), ("data",)), P("data"))
  examples = Thirteen()
  all_of_them = examples.read(np.arange(13))["x"]
  try:
    jax.device_put(all_of_them, over_data)
  except ValueError:
    print("13 examples over 8 devices: ValueError")
  loss = count = 0
  for host_batch in EvaluationBatches(examples, size=8).all():
    batch = jax.device_put(host_batch, over_data)
    loss += jnp.sum(jnp.where(batch["mask"], batch["x"], 0))
    count += jnp.sum(batch["mask"])
    print("ids ", host_batch["id"])
    print("mask", host_batch["mask"].astype(int))
  print(f"sum {loss:.0f} / count {count} = {loss / count:.4f}; the mean of all 13 is {all_of_them.mean():.4f}")
  padded_mean = jnp.mean(batch["x"])
  print(f"in the last batch alone: {jnp.mean(batch['x'], where=batch['mask']):.4f}, but {padded_mean:.4f} with padding")
  return {"loss": loss, "count": count, "mean": all_of_them.mean(), "last": batch}


def resharding():
  """Moving an array to another sharding

  `jax.device_put` in plain Python and `jax.reshard` in a jitted function give an array another spec. With `Auto` mesh
  axes, as in this repository, `reshard` moves nothing in a jitted function (the last lines): use
  `with_sharding_constraint` there. The values stay the same and the pieces move. The old and the new spec determine
  the collective that moves them:

  - From split to whole, every device must get all other pieces: an all-gather.
  - From whole to split, or to a finer split, every device already has its piece: nothing is sent.
  - From one dimension to another over the same axis, every device needs a part of every piece: an all-to-all.
  - If the same pieces go to other devices: a collective-permute.

  Another common collective, the all-reduce, is missing here. It adds up partial results from several devices, so it
  comes from arithmetic. The next lesson shows it.

  The lines "sends" are read from the compiled program. Shapes there are those of one device: f32[4,16] is a quarter of
  f32[16,16], which has 1,024 bytes. The bytes are what one device sends if the devices pass their pieces around a ring.
  This is XLA's compiler for the CPU. Other compilers may choose other collectives. The TPU compiler, for example, also
  uses reduce-scatter, the first half of an all-reduce.
  """
  mesh = jax.make_mesh((4, 2), ("data", "model"))
  result = {}
  for before, after in (
    (P("data", None), P()),
    (P(), P("data", None)),
    (P("data", None), P(("data", "model"), None)),
    (P("data", None), P(None, "data")),
    (P(("data", "model"), None), P(("model", "data"), None)),
  ):
    with jax.set_mesh(mesh):
      x = jax.device_put(jnp.arange(256.0).reshape(16, 16), before)
      program = jax.jit(lambda x, after=after: jax.reshard(x, after)).lower(x).compile()
      y = program(x)
    print(f"{jax.typeof(x)}  →  {jax.typeof(y)}")
    result[before, after] = x, y, print_sent(program, mesh)
  mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
  x = jax.device_put(np.zeros((16, 16)), NamedSharding(mesh, P("data")))
  for way in (jax.reshard, jax.lax.with_sharding_constraint):
    y = jax.jit(lambda x, way=way: way(x, NamedSharding(mesh, P())))(x)
    print(f"Auto axes: {way.__name__} to whole copies gives {y.sharding.spec}")
    result[way.__name__] = y
  return result


STEPS = (specs, a_batch, uneven_batch, resharding)
