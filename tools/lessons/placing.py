"""Placing arrays: which device holds which part of an array, how a batch gets there, and how to move it.

The second lesson of the tour. Next: four_ways.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from data.batches import Batches
from tools.lessons.sent import print_sent
from tools.pictures import picture


def specs():
  """What a PartitionSpec does to an array

  A `PartitionSpec`, or `P`, has an entry for each dimension of an array: the mesh axis that splits it, or None. A mesh
  axis that it does not name holds copies. With a mesh it makes a `NamedSharding`, and that is all there is to say about
  where an array is: which piece is on which device follows.

  Below, the same array [8, 16] on a mesh of 4 × 2. A cell is a piece, the numbers in it are the devices that hold it,
  the margins are the indices it covers. The shape stays (8, 16) throughout: a sharded array is one array, and code
  that uses it need not know. (With the package `rich`, `jax.debug.visualize_array_sharding(x)` draws the like.)
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

  Data parallelism, all of it: the first dimension of the batch lies over `data`. `device_put` cuts the host's array and
  sends each device its rows. Here the two devices of each row of the mesh get the same examples, since no dimension
  lies over `model`: `replica` numbers the copies.

  A process of a larger job has only its own rows. `make_array_from_process_local_data` takes those and the global
  shape, and returns the same global array. With one process, as here, its rows are all rows.
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

  Pieces of an array have one size, so 13 examples do not lie over 8 devices. And shapes are part of a compiled program:
  a last batch of another size would be compiled anew. So every batch has the same size, the last one is filled up, and
  a mask says which rows are true.

  What the padding holds must not matter. A mean over the batch would count it, and a mean of the devices' means would
  weigh a device with one example like one with eight. Sums do not have this trouble: add up the loss and the count,
  each over all devices, and divide once at the end. Every loss of this repository is computed so.
  """
  over_data = NamedSharding(jax.make_mesh((8,), ("data",)), P("data"))
  examples = Thirteen()
  all_of_them = examples.read(np.arange(13))["x"]
  try:
    jax.device_put(all_of_them, over_data)
  except ValueError:
    print("13 examples over 8 devices: ValueError")
  loss = count = 0
  for host_batch in Batches(examples, size=8).evaluation():
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

  An array can be asked for under another spec: `jax.device_put` in plain Python, `jax.reshard` in a jitted function.
  Its values stay, its pieces move, and which collective moves them follows from the two specs:

  - from split to whole, every device must get all other pieces: all-gather;
  - from whole to split, or to a finer split, every device already has what it needs: nothing is sent;
  - from one dimension to another over the same axis, every device has a part of every piece: all-to-all;
  - the same pieces on other devices: collective-permute.

  The fourth of the usual collectives, all-reduce, is missing here. It belongs to arithmetic: it adds up results that
  are spread over devices, and the next lesson has it.

  What is sent is read from the compiled program. Shapes there are those on one device: a quarter of f32[16,16], which
  has 1,024 bytes, is f32[4,16]. The bytes are what a device sends if all pass their pieces on around a ring. The
  compiler here is XLA's for the CPU. Others may choose otherwise: the one for TPUs also writes reduce-scatter, which is
  the first half of an all-reduce.
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
  return result


STEPS = (specs, a_batch, uneven_batch, resharding)
