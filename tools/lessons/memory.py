"""Memory: what a layout is, and what each device has to hold under it.

The last lesson of the tour. Next: strategies/layout.py, and the map of the repository, WORKSPACE.md.
"""

import collections
import math

import jax
from jax.sharding import NamedSharding

import strategies
from configs import base
from strategies.mesh import abstract_mesh, make_mesh, resolve
from tools.pictures import picture
from training import settings


def layouts():
  """From names to specs

  Written out, a spec for every array of a model is a long list, and a new one for every strategy. This repository
  writes it down in two halves. The model names the dimensions of its weights (`models/axes.py`); a `Layout` says which
  mesh axis a name lies on. Each spec follows from the two, and a layout, a line or two, is all a strategy has to say.

  Here is the first matrix of the model's MLPs, one for each of its 4 blocks, stacked: [layers, embed, mlp]. FSDP splits
  the width `embed`, tensor parallelism the hidden units `mlp`, and 2D, which is both layouts joined, both.
  """
  result = {}
  for name in ("data_parallel", "fsdp", "tensor_parallel", "two_d"):
    layout = resolve(strategies.layout_of(name), devices=8)
    sharding = NamedSharding(make_mesh(layout, jax.devices()), layout.spec(("layers", "embed", "mlp")))
    print(f"{name}, mesh {dict(layout.mesh)}: {sharding.spec}")
    print(picture(sharding, (4, 64, 128)), end="\n\n")
    result[name] = sharding
  return result


def replicated_and_sharded():
  """Replicated against fully sharded

  A training state takes four bytes a parameter, and eight more for the two moments that Adam keeps of each.
  `addressable_shards` are the pieces that devices really hold, so their sizes are the truth.

  On a single device that is everything. Data parallelism has the same on each of the eight, which is eight times the
  memory in all. FSDP has an eighth of every matrix on each. Only the scales of the norms and the counters of steps lie
  whole everywhere: they are too small to be worth a message.
  """
  program = settings.program(base.get_config("tiny", "fsdp"), "cpu")
  result = {}
  for name, devices in (("single", 1), ("data_parallel", 8), ("fsdp", 8)):
    layout = resolve(strategies.layout_of(name), devices)
    strategy = strategies.build({"strategy": name}, layout, program, make_mesh(layout, jax.devices()))
    state = strategy.init(seed=0)
    whole, pieces = collections.Counter(), collections.Counter()
    for x in jax.tree.leaves(state):
      for shard in x.addressable_shards:
        (whole if shard.data.shape == x.shape else pieces)[shard.device.id] += shard.data.nbytes
    print(f"{name:<13} {whole[0] + pieces[0]:>9,} bytes on device 0: {whole[0]:,} whole, {pieces[0]:,} in pieces")
    result[name] = {"whole": whole, "pieces": pieces, "devices": devices}
  everything, kept_whole = result["single"]["whole"][0], result["fsdp"]["whole"][0]
  print(f"({everything:,} - {kept_whole:,}) / 8 = {(everything - kept_whole) // 8:,}")
  return result


def before_there_is_a_machine():
  """The same sum before there is a machine

  What lies where is known before anything is computed. An `AbstractMesh` has axes and no devices, and a strategy built
  on it knows the shape of every piece. So the memory of a large model on many devices is a question for a laptop.

  This is a Transformer with 32 blocks of width 4,096, its parameters and moments in float32. Gradients and activations
  come on top. Tensor parallelism has 8 devices here, the others 256: it is for devices that are close together.
  """
  config = base.get_config("lm", "fsdp")
  config.model.update(width=4096, depth=32, heads=32, kv_heads=32, mlp_width=11008, vocab_size=32768)
  program = settings.program(config, "tpu")
  result = {}
  for name, sizes in (
    ("data_parallel", {"data": 256}),
    ("fsdp", {"data": 256}),
    ("tensor_parallel", {"model": 8}),
    ("two_d", {"data": 32, "model": 8}),
  ):
    layout = strategies.layout_of(name).on(**sizes)
    strategy = strategies.build({"strategy": name}, layout, program, abstract_mesh(layout))
    state = jax.tree.leaves(strategy.abstract_state())
    held = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in state)
    print(f"{name:<15} on {dict(layout.mesh)}: {held / 1e9:.2f} GB on each device")
    result[name] = {"held": held, "state": state}
  parameters = sum(x.size for x in jax.tree.leaves(strategy.abstract_state().params))
  print(f"{parameters:,} parameters")
  return result


STEPS = (layouts, replicated_and_sharded, before_there_is_a_machine)
