"""Memory: what a layout is, and what each device must hold.

The last lesson of the tour. Next: strategies/layout.py, and the map of the repository, WORKSPACE.md.
"""

import collections
import math

import jax
from jax.sharding import NamedSharding

import strategies
from configs import base
from lab.views.pictures import picture
from strategies.execution.mesh import abstract_mesh, make_mesh, resolve
from training import settings


def layouts():
  """From names to specs

  A spec for every array of a model would be a long list, and every strategy would need its own. This repository divides
  the work in two. The model names the dimensions of its weights (`models/dimensions.py`). A `Layout` says which mesh
  axis splits each name. Together they give every spec. So a strategy is little more than a layout of a line or two.

  Here is one matrix of the MLP, stacked for the model's 4 blocks: [layers, embed, mlp]. FSDP splits the model width
  `embed`. Tensor parallelism splits the hidden units `mlp`. The 2D strategy joins the two layouts and splits both.
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
  """Replicated and fully sharded states

  A training state takes four bytes for each parameter, and eight more for Adam's two moments of it. The sizes below are
  measured: `addressable_shards` are the pieces that the devices really hold.

  A single device holds everything. With data parallelism, each of the eight devices holds everything, which is eight
  times the memory in total. With FSDP, each device holds an eighth of every matrix. Only the scales of the norms and
  the step counters are whole on every device, because they are too small to be worth a message.
  """
  program = settings.program(base.get_config("tiny", "fsdp"), "cpu")
  result = {}
  for name, devices in (("single", 1), ("data_parallel", 8), ("fsdp", 8)):
    layout = resolve(strategies.layout_of(name), devices)
    strategy = strategies.build(base.get_config("tiny", name), layout, program, make_mesh(layout, jax.devices()))
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


def memory_without_devices():
  """The memory of a large model, without its devices

  The layout determines the size of every piece before anything is computed. An `AbstractMesh` has axes but no devices.
  A strategy built on it knows the shape of every piece. So a laptop can compute the memory of a large model on many
  devices.

  The model here is a Transformer with 32 blocks of width 4,096. Its parameters and moments are in float32. Gradients
  and activations need memory in addition. Tensor parallelism has 8 devices here, because it needs devices that are
  close together. The other strategies have 256.
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
    strategy = strategies.build(base.get_config("tiny", name), layout, program, abstract_mesh(layout))
    state = jax.tree.leaves(strategy.abstract_state())
    held = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in state)
    print(f"{name:<15} on {dict(layout.mesh)}: {held / 1e9:.2f} GB on each device")
    result[name] = {"held": held, "state": state}
  parameters = sum(x.size for x in jax.tree.leaves(strategy.abstract_state().params))
  print(f"{parameters:,} parameters")
  return result


STEPS = (layouts, replicated_and_sharded, memory_without_devices)
