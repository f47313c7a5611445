"""Which runner a config gets, and in which ways its model reads what other devices hold."""

import dataclasses
from typing import Any

import jax

from errors import ConfigError
from models.ops import experts
from models.ops.context import choose, of_local
from models.ops.loss import chunk_of_gpus
from models.ops.positions import chunks
from models.sizes import ModelSizes
from strategies.execution.automatic import Automatic
from strategies.execution.by_hand import ByHand
from strategies.execution.options import scatters
from strategies.execution.runner import Limit, Runner
from strategies.execution.stages.staged import Staged, check_compiler
from strategies.execution.transfers import Transfers
from strategies.layout import Layout
from training.program import Program


def asked_kind(named: type[Runner] | None, layout: Layout) -> type[Runner] | None:
  """The kind of runner that a layout asks for, or the strategy's file (`named`); None: what is sent decides."""
  return Staged if layout.shards("layers") > 1 else named


def runner_of(
  named: type[Runner] | None,
  program: Program,
  layout: Layout,
  fallbacks: tuple[Limit, ...],
  device: jax.Device | None,
  gather: str,
  pipeline: dict[str, Any],
) -> Runner:
  """The runner of a program under a resolved layout.

  Args:
    named: the kind of runner that the strategy's file names; None if it names none.
    fallbacks: the limits because of which the program is not quite the one that was asked for.
    device: a device of the mesh; None for a mesh without devices.
    gather, pipeline: the fields of the config (configs/base.py).
  """
  asked = asked_kind(named, layout)
  if asked is Staged:
    check_compiler(layout, program.sizes, device.platform if device else "")
    return Staged.make(program, layout, fallbacks, **pipeline)
  by_hand = asked is not None or not scatters(device, layout, program.traits)
  transfers = Transfers.of(layout, parts=program.accumulation, gather=gather, by_hand=by_hand)
  kind = asked or (ByHand if transfers.by_hand else Automatic)
  return kind(program, layout, transfers, fallbacks)


# The kinds of devices that multiply float8 numbers faster than those of bfloat16: how `jax.Device.device_kind` begins.
MULTIPLY_FLOAT8 = ("NVIDIA L4", "NVIDIA H", "NVIDIA B", "NVIDIA GB", "TPU7x")
CUDNN_HEAD_BEFORE = 128  # the largest head of cuDNN's backward pass on GPUs before H100 (compute capability 9.0)
UNROLLED = 32  # blocks, at most: more would take minutes to compile


def on_device(sizes: ModelSizes, layout: Layout, device: jax.Device | None) -> ModelSizes:
  """The model as it runs on such devices. Raises ConfigError if products in float8 gain nothing there.

  `unroll="auto"`: without a loop on a GPU alone, where a step is faster (docs/accelerator.md). Several have not been
  timed. On TPUs programs without a loop take more memory. `loss_chunk=0`: on GPUs, see `chunk_of_gpus`.
  """
  kind = device.device_kind if device else "cpu"
  if sizes.products == "float8" and not kind.startswith(("cpu", *MULTIPLY_FLOAT8)):
    raise ConfigError(
      f"model.products='float8' gains nothing on {kind}, which multiplies float8 numbers no faster; use "
      "'float8_gathers', which halves the bytes of gathered weights, or 'dtype'"
    )
  capability = getattr(device, "compute_capability", None) or "9.0"
  if sizes.attention == "cudnn" and sizes.head_dim > CUDNN_HEAD_BEFORE and float(capability) < 9:
    why = f"cudnn has heads of at most {CUDNN_HEAD_BEFORE} on {kind}, and model.head_dim={sizes.head_dim}"
    sizes = dataclasses.replace(sizes, attention="plain", attention_why=why)
  if device and device.platform == "gpu" and not sizes.loss_chunk:
    sizes = dataclasses.replace(sizes, loss_chunk=chunk_of_gpus(sizes.width, sizes.vocab_size))
  if sizes.unroll != "auto":
    return sizes
  alone = device is not None and device.platform == "gpu" and layout.device_count == 1
  return dataclasses.replace(sizes, unroll="all" if alone and sizes.depth <= UNROLLED else "scan")


def with_way(sizes: ModelSizes, layout: Layout) -> ModelSizes:
  """The model with the ways in which it reads positions and experts of other devices (models/ops/).

  Raises ConfigError if its mixer, positions or heads do not split as this layout asks.
  """
  if mixture := sizes.experts:
    transport = experts.choose(mixture.transport, layout.shards("experts"), mixture.per_token)
    sizes = dataclasses.replace(sizes, experts=dataclasses.replace(mixture, transport=transport))
  count = layout.shards("positions")
  if count == 1:
    return sizes
  fields = " × ".join(f"mesh.{axis}={layout.mesh[axis]}" for axis in layout.axes("positions"))
  if not sizes.mixes.splits_positions:
    raise ConfigError(
      f"model.mixer={sizes.mixer!r} does not say that devices may split the positions of a text, as this strategy does "
      f"with {fields}; use a strategy other than context and long_context, or another mixer"
    )
  unit = chunks(count)
  if sizes.positions % unit:
    better = -(-sizes.positions // unit) * unit
    fits = layout.sizes_in_words(
      layout.axes("positions"), lambda size: size == 1 or sizes.positions % chunks(size) == 0
    )
    fix = f"model.seq_len={better}" if sizes.inputs == "tokens" else fits
    raise ConfigError(
      f"{fields} gives each device two equal pieces of an example, but its {sizes.positions} positions are not a "
      f"multiple of {unit}; use {fix}"
    )
  if not sizes.mixes.per_pair(sizes):
    return sizes
  heads = layout.shards("heads")
  own_heads, in_stages = (sizes.heads // heads, sizes.kv_heads // heads), layout.shards("layers") > 1
  if any(sizes.windowed):
    local = of_local(sizes.attention_context, count, *own_heads, causal=sizes.predicts.causal, permutes=not in_stages)
    sizes = dataclasses.replace(sizes, local_way=local)
  chosen = choose(sizes.attention_context, count, sizes.positions, *own_heads, permutes=not in_stages)
  return dataclasses.replace(sizes, attention_context=chosen.name, context_why=chosen.why)
