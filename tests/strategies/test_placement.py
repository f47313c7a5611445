"""Placement and communication of every strategy: bytes on each device, and collectives of the compiled step."""

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import numpy as np
import pytest
from helpers import config, in_full, random_batch, strategy
from jax.sharding import AxisType

import strategies
from strategies.execution.mesh import abstract_mesh, resolve
from training import settings
from training.program import Program

BATCH = 16


@pytest.fixture(scope="module")
def program() -> Program:
  # All sizes differ, so that a shape identifies its tensor.
  return settings.program(config(model__depth=4, model__seq_len=48), "cpu")


@functools.cache
def compiled_text(name: str, program: Program) -> str:
  return strategy(name, program).lower_train_step(BATCH).compile().as_text()


def collectives(text: str, kind: str) -> list[tuple[int, ...]]:
  """The result shapes of all collectives of a kind, each part of a tuple by itself, without dimensions of size 1."""
  results = re.findall(rf"^ *\S+ = (.*?) {kind}(?:-start)?\(", text, re.MULTILINE)
  shapes = [dims.split(",") for result in results for dims in re.findall(r"\w+\[([\d,]*)\]", result)]
  return [tuple(int(size) for size in shape if size not in ("", "1")) for shape in shapes]


@pytest.mark.parametrize("name, share", in_full([("fsdp", 8), ("two_d", 8)], ("fsdp", 8)))
def test_each_device_holds_its_share_of_parameters_and_optimizer(name: str, share: int, program: Program):
  state = strategy(name, program).init(seed=0)
  total = sum(x.nbytes for x in jax.tree.leaves((state.params, state.opt_state)))
  whole = sum(x.nbytes for x in jax.tree.leaves((state.params, state.opt_state)) if x.is_fully_replicated)
  held = dict.fromkeys(jax.devices(), 0)
  for x in jax.tree.leaves((state.params, state.opt_state)):
    for shard in x.addressable_shards:
      held[shard.device] += shard.data.nbytes
  assert whole < 0.01 * total
  for device_bytes in held.values():
    assert device_bytes == (total - whole) / share + whole


@pytest.mark.full
@pytest.mark.parametrize("name", ["zero1", "zero2"])
def test_zero_updates_a_piece_of_each_weight_on_each_device(name: str, program: Program):
  """Weights are whole, moments are in 8 pieces, and each device takes the roots of one piece of the second moments."""
  state = strategy(name, program).init(seed=0)
  matrices = [x for x in jax.tree.leaves(state.opt_state) if x.size > program.sizes.depth * program.sizes.width]
  assert len(matrices) == 2 * 9  # seven of a block, embedding and head
  assert all(shard.data.size == x.size / 8 for x in matrices for shard in x.addressable_shards)
  assert all(x.is_fully_replicated for x in jax.tree.leaves(state.params))
  pieces, whole = (roots(compiled_text(other, program)) for other in (name, "data_parallel"))
  norms = (2 * program.sizes.depth + 1) * program.sizes.width
  assert 8 * (pieces - norms) == whole - norms > 0


def roots(text: str) -> int:
  """Of how many numbers the square root is taken, in arrays larger than an activation's statistics."""
  shapes = re.findall(r"= f32\[([\d,]+)\]\S* sqrt\(", text)
  return sum(math.prod(map(int, shape.split(","))) for shape in shapes)


@pytest.mark.full
def test_fsdp_gathers_weights_block_by_block_and_frees_them(program: Program):
  """Each weight has its own all-gather, once forward and once backward. No gathered weight is kept for all layers."""
  text = compiled_text("fsdp", program)
  gathered = collectives(text, "all-gather")
  sizes, head = program.sizes, program.sizes.head_dim
  d, n, k, f, v = sizes.width, sizes.heads, sizes.kv_heads, sizes.mlp_width, sizes.vocab_size
  block = [(d, n, head), (d, k, head), (d, k, head), (n, head, d), (d, f), (d, f), (f, d)]
  assert sorted(gathered) == sorted([*block, *block, (v, d), (d, v)])
  for shape in block:
    stacked = ",".join(map(str, (sizes.depth, *shape)))
    assert f"f32[{stacked}]" not in text, "a gathered weight is kept for all layers"


@pytest.mark.full
def test_hsdp_gathers_within_a_replica_and_sums_across_replicas(program: Program):
  """Gathers what FSDP does, in groups of 4 neighbours. Sums gradients in groups of 2, one device of each replica."""
  text = compiled_text("hsdp", program)
  assert sorted(collectives(text, "all-gather")) == sorted(collectives(compiled_text("fsdp", program), "all-gather"))
  assert groups(text, "all-gather") == {((0, 1, 2, 3), (4, 5, 6, 7))}
  assert ((0, 4), (1, 5), (2, 6), (3, 7)) in groups(text, "all-reduce")


def groups(text: str, kind: str) -> set[tuple[tuple[int, ...], ...]]:
  """The groups of devices in the collectives of a kind.

  XLA writes them as axes of a mesh of device numbers: mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}.
  """
  pattern = re.compile(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\(\[([\d,]+)\]T\(([\d,]+)\)\))? \{(.*?)\}")
  numbers = lambda listed: [int(n) for n in listed.split(",")]
  found = set()
  for line in text.splitlines():
    if f" {kind}(" not in line:
      continue
    axes, dimensions, order, reduced = pattern.search(line).groups()
    sizes = {name: int(size) for name, size in re.findall(r"('\w+')=(\d+)", axes)}
    devices = np.arange(math.prod(sizes.values()))
    if dimensions:
      devices = devices.reshape(numbers(dimensions)).transpose(numbers(order))
    within = [i for i, name in enumerate(sizes) if name in reduced.split(",")]
    together = np.moveaxis(devices.reshape(list(sizes.values())), within, range(-len(within), 0))
    size = math.prod(list(sizes.values())[i] for i in within)
    found.add(tuple(sorted(tuple(sorted(group)) for group in together.reshape(-1, size).tolist())))
  return found


@pytest.mark.full
def test_tensor_parallel_never_gathers_logits(program: Program):
  for name in ("tensor_parallel", "two_d"):
    runner = strategy(name, program)
    text = compiled_text(name, program)
    examples = BATCH // runner.layout.shards("batch")
    logits = f"[{examples},{program.sizes.seq_len},{program.sizes.vocab_size}]"
    flat_logits = f"[{examples * program.sizes.seq_len},{program.sizes.vocab_size}]"
    assert logits not in text, "a device holds the full logits"
    assert flat_logits not in text, "a device holds the full logits"


@pytest.mark.full
def test_the_residual_stream_is_split_by_position_between_products(program: Program):
  """It is gathered before attention, MLP and head, and again backward. Nothing of it is kept or sent whole."""
  stream = (BATCH, program.sizes.seq_len, program.sizes.width)
  part, stages = (stream[0], stream[1] // 8, stream[2]), strategy("three_d", program)
  text = compiled_text("tensor_parallel", program)
  assert collectives(text, "all-gather") == [stream] * (2 + 4 + 2)  # forward; backward; head, and embedding backward
  stacked = lambda shape: f"f32[{','.join(map(str, (program.sizes.depth, *shape)))}]"
  assert stacked(part) in text
  assert stacked(stream) not in text, "a gathered stream is kept for all layers"
  sent = (program.sizes.seq_len // stages.layout.mesh["model"], program.sizes.width)
  assert set(collectives(compiled_text("three_d", program), "collective-permute")) == {sent}


@pytest.mark.full
def test_the_residual_stream_stays_whole_where_asked_or_where_it_cannot_be_split(program: Program):
  uneven = settings.program(config(model__depth=4, model__seq_len=42), "cpu")
  for runner in (strategy("tensor_parallel", program, sequence_parallel=False), strategy("tensor_parallel", uneven)):
    assert "sequence" not in runner.describe("tensor_parallel")
    assert collectives(runner.lower_train_step(BATCH).compile().as_text(), "all-gather") == []
  assert "sequence over model" in strategy("two_d", uneven).describe("two_d")


@pytest.mark.full
def test_data_parallel_sends_each_gradient_once(program: Program):
  """The scan over blocks sums the gradients of one block at a time, so the program's text has one block's shapes."""
  text = compiled_text("data_parallel", program)
  params = strategy("single", program).abstract_state().params
  blocks = sum(math.prod(x.shape) for x in jax.tree.leaves(params["blocks"]))
  edges = sum(math.prod(x.shape) for x in jax.tree.leaves(params)) - blocks
  expected = blocks // program.sizes.depth + edges
  numbers = sum(math.prod(shape) for shape in collectives(text, "all-reduce"))
  assert expected <= numbers <= expected + 8  # the others are the sums of loss and counts
  assert collectives(text, "all-gather") == []


@pytest.mark.full
@pytest.mark.parametrize("name", strategies.names())
def test_no_strategy_moves_activations_by_accident(name: str, program: Program):
  """Only pipelines permute, as each phase of their schedule exchanges. No strategy has an all-to-all.

  Devices that share positions gather keys here. Their other ways permute, or have all-to-alls, on purpose.
  """
  program = dataclasses.replace(program, sizes=dataclasses.replace(program.sizes, attention_context="gather"))
  text = compiled_text(name, program)
  assert collectives(text, "all-to-all") == []
  schedule = strategy(name, program).schedule
  exchanged = sum(len(phase.routes) for phase in schedule.phases) if schedule else 0
  assert len(collectives(text, "collective-permute")) == exchanged


@pytest.mark.full
def test_microbatches_stay_on_their_devices():
  accumulated = settings.program(config(model__depth=4, model__seq_len=48, accumulation=2), "cpu")
  text = compiled_text("data_parallel", accumulated)
  for kind in ("all-gather", "all-to-all", "collective-permute"):
    assert collectives(text, kind) == []


# pmap needs real devices (test_pmap_ddp.py).
@pytest.mark.parametrize(
  "name", in_full([name for name in strategies.names() if name not in ("single", "pmap_ddp")], "three_d")
)
def test_lowers_for_64_tpus_on_an_abstract_mesh(name: str):
  """The sharding works for any mesh, without its devices."""
  sizes = {"width": 128, "heads": 64, "kv_heads": 64, "seq_len": 128, "dtype": "bfloat16"}
  asked = config(name, **{f"model__{field}": size for field, size in sizes.items()})
  layout = resolve(strategies.layout_of(name), 64)
  abstract = strategies.build(asked, layout, settings.program(asked, "tpu"), abstract_mesh(layout))
  assert all(kind == AxisType.Auto for kind in abstract.mesh.axis_types)
  text = abstract.lower_train_step(256, lowering_platforms=("tpu",)).as_text()
  assert "mhlo.num_partitions = 64" in text


def test_train_step_donates_its_state(program: Program):
  runner = strategy("fsdp", program)
  state = runner.init(seed=0)
  runner.train_step(state, runner.shard(random_batch(program, BATCH), BATCH))
  assert all(x.is_deleted() for x in jax.tree.leaves(state.params))


def test_no_key_is_a_program_of_its_own(monkeypatch: pytest.MonkeyPatch):
  """A key outside of a program is two more, which each start compiles again: they are too small for the cache."""
  apart, key = [], jax.random.key

  def seen(seed: Any) -> jax.Array:
    made = key(seed)
    apart.extend([] if isinstance(made, jax.core.Tracer) else [seed])
    return made

  monkeypatch.setattr(jax.random, "key", seen)
  runner = strategy("single", settings.program(config(seed=17), "cpu"))
  runner._init = functools.partial(jax.eval_shape, runner._init)
  runner.init(17)
  runner.writing._generate = lambda *_: None
  runner.writing.generate(None, np.zeros((1, 4), np.int32), length=2, seed=3, temperature=1.0)
  assert apart == []
