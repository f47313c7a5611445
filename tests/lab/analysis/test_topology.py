"""Compiles every strategy with the TPU compiler, without TPUs. `make test-topology` installs the compiler.

Compares what each strategy sends with the formulas, as test_communication.py does on CPU, and with a golden page. Both
tests use the same compiled program.
"""

import collections
import importlib.util
import math
from pathlib import Path
from typing import Any

import jax
import pytest
from compiled_steps import explained_in_8_gb, loops_beside_sends
from golden import make_explain as golden
from helpers import config, laid_out, one_sentence

import strategies
from configs import base
from lab.analysis import explanation, memory, theory
from lab.analysis.case import Case
from lab.analysis.compiled import compile_step
from lab.analysis.topology import machine_of
from models.ops import pieces
from strategies.execution.strategy import Strategy
from tools import explain as tool
from training import settings

no_compiler = importlib.util.find_spec("libtpu") is None
pytestmark = [
  pytest.mark.full,
  pytest.mark.skipif(no_compiler, reason="the TPU compiler is not installed; make test-topology"),
]
NAMES = [name for name in strategies.names() if golden.lowers_for(name, golden.SLICE)]
SENDERS = [name for name in NAMES if strategies.layout_of(name).uses_every_axis()]

# Losses, counts and norms, which the formulas leave out: a few bytes each.
SCALARS = 512


def grouped(name: str, inputs: str, topology: str = golden.SLICE) -> tuple[collections.Counter, collections.Counter]:
  """Bytes that a device sends in a step, by (kind, axes): in the compiled program, and according to the formulas."""
  return by_kind(golden.explained(name, topology, inputs))


def by_kind(found: dict[str, Any]) -> tuple[collections.Counter, collections.Counter]:
  ours, wanted = collections.Counter(), collections.Counter()
  for row in found["communication"]:
    assert row["times"], f"unknown how often {row} runs"
    ours[row["kind"], row["axes"]] += row["sent_in_step"]
  for row in found["theory"]:
    wanted[row["kind"], row["axes"]] += row["bytes"]
  return ours, wanted


def size(name: str, inputs: str, *, edges: bool = False) -> int:
  """Bytes of the matrices in bfloat16, as they are sent. With `edges`, only of those that only `embed` can split."""
  weights = golden.explained(name, golden.SLICE, inputs)["weights"]
  matrices = [weight for weight in weights if any(dim not in (None, "layers") for dim in weight["dims"])]
  wanted = [weight for weight in matrices if not edges or set(weight["dims"]) == {"embed", None}]
  return 2 * sum(math.prod(weight["shape"]) for weight in wanted)


@pytest.mark.parametrize("name, inputs", golden.programs(SENDERS, ["images"]))
def test_every_strategy_sends_what_theory_says_and_nothing_else(name: str, inputs: str):
  ours, wanted = grouped(name, inputs)
  layout = strategies.layout_of(name)
  of_gradients = (what for what in ours if what[0] == "reduce-scatter" and {*what[1]} <= {*layout.axes("batch")})
  scatter = next(of_gradients, None)
  if scatter and inputs == "images" and not layout.layers:
    # The compiler scatters some gradients of the two weights that only `embed` splits, one of them in float32. Theory
    # has both all-reduced, which sends twice as much.
    scattered = ours[scatter] - wanted[scatter]
    assert 0 <= scattered <= 2 * size(name, inputs, edges=True)
    ours[scatter] -= scattered
    ours["all-reduce", scatter[1]] += 2 * scattered
  for what in ours | wanted:
    assert ours[what] == pytest.approx(wanted[what], rel=1e-6, abs=SCALARS), what


def test_collectives_on_separate_cores_of_a_tpu7x_count():
  """Those of a pipeline are all-reduces, as in data parallelism, and permutes."""
  ours, wanted = grouped("pipeline", "tokens", "tpu7x:2x2x1")
  for what in ours | wanted:
    assert ours[what] == pytest.approx(wanted[what], rel=1e-6, abs=SCALARS), what
  assert golden.explained("pipeline", "tpu7x:2x2x1", "tokens")["time"]["left_out"] == []


@pytest.mark.parametrize("name, inputs", golden.of_tokens(SENDERS))
def test_no_strategy_uses_all_to_all(name: str, inputs: str):
  """With AdamW. Muon, in the programs for images, shares layers by them, and theory says how much that sends."""
  found = {axes for kind, axes in grouped(name, inputs)[0] if kind == "all-to-all"}
  allowed = {"context", "expert"}  # where attention exchanges positions for heads, and where tokens go to experts
  assert all(allowed & set(axes) for axes in found)


def test_fsdp_scatters_its_gradients():
  """P·(n−1)/n numbers, half of what data parallelism sends."""
  assert grouped("fsdp", "tokens")[0]["reduce-scatter", ("data",)] == size("fsdp", "tokens") * 7 / 8


@pytest.mark.parametrize("name", ["zero1", "zero2"])
def test_zero_scatters_gradients_in_bfloat16_and_gathers_new_weights_in_float32(name: str):
  """P·(n−1)/n numbers each. So in one precision they send what data_parallel does, but for the embedding's gradient."""
  ours, whole = grouped(name, "tokens")[0], size(name, "tokens")
  assert ours["reduce-scatter", ("data",)] == grouped("fsdp", "tokens")[0]["reduce-scatter", ("data",)]
  assert ours["all-gather", ("data",)] == 2 * whole * 7 / 8


def test_data_parallel_all_reduces_its_gradients():
  """2·P·(n−1)/n numbers, those of the norms in float32."""
  ours, _ = grouped("data_parallel", "tokens")
  norms = 4 * (2 * 4 + 1) * golden.TPU_FIELDS["model.width"]
  assert ours.keys() == {("all-reduce", ("data",))}
  assert ours["all-reduce", ("data",)] == pytest.approx(
    2 * (size("data_parallel", "tokens") + norms) * 7 / 8, abs=SCALARS
  )


@pytest.mark.parametrize("name, axis", [("hsdp", "replica"), ("three_d", "data")])
def test_the_bytes_of_gradients_do_not_grow_with_the_parts_of_a_batch(name: str, axis: str):
  """As on CPU (test_communication.py): what goes over this axis, alone or together with others, goes once a step."""

  def sent(parts: int) -> float:
    config = base.get_config("tiny", name)
    config.update_from_flattened_dict(golden.TPU_FIELDS | {"batch_size": 64, "accumulation": parts})
    step = compile_step(tool.create(config, machine_of(golden.SLICE)), 64)
    return sum(found.sent_in_step for found in step.collectives() if axis in found.axes)

  assert sent(4) == pytest.approx(sent(2), abs=SCALARS)


@pytest.mark.parametrize("name, inputs", golden.of_tokens(SENDERS))
def test_the_links_send_all_bytes_and_expose_a_part_of_them(name: str, inputs: str):
  """On 2×4 chips a group along one dimension can use one link of 50 GB/s, and a group along both can use two."""
  found = golden.explained(name, golden.SLICE, inputs)
  rows, time = found["communication"], found["time"]
  for row in rows:
    assert row["sent_in_step"] / 100e9 <= row["seconds"] * 1.000001
    assert row["seconds"] <= row["sent_in_step"] / 50e9 * 1.000001
    assert 0 <= row["exposed"] <= row["seconds"]
    # libtpu runs nearly all of them by themselves, but some of those in a stage's units beside other kernels.
    if row["kind"] == "all-reduce" and not strategies.layout_of(name).layers:
      assert row["exposed"] >= 0.9 * row["seconds"]
  assert time["communication"] == pytest.approx(sum(row["seconds"] for row in rows))
  assert time["exposed"] == pytest.approx(sum(row["exposed"] for row in rows))
  busy = max(time["compute"] / (1 - time["idle"]), time["memory"])
  assert time["seconds"] == pytest.approx(busy + time["exposed"])


def test_stages_exchange_while_their_units_run():
  """In ticks with both kinds of units, cotangents travel during the forward units, activations during the others.

  With the default schedule; test_gpu_topology.py also tests one with weight units.
  """
  config, where = base.get_config("tiny", "pipeline"), machine_of("v5e:2x2")
  config.update_from_flattened_dict(golden.FIELDS | golden.TPU_FIELDS)
  runner = tool.create(config, where)
  step = compile_step(runner, config.batch_size)
  assert [loops for loops in loops_beside_sends(step.module) if loops] == [{"forward_1"}, {"backward_1"}]
  sends = step.overlap(where.chip, where.links_of(runner.mesh)).collectives
  shares = [
    (one.collective.times, one.hidden / one.sent) for one in sends if one.collective.kind == "collective-permute"
  ]
  assert [share for times, share in shares if times == runner.schedule.phases[1].ticks] == [1, 1]


def test_the_host_holds_the_state_and_offloaded_activations():
  """In a model whose state is large. If all of it came at once for the update, the step would need more memory.

  test_gpu_topology.py also tests a pipeline.
  """
  config, where = base.get_config("tiny", "fsdp"), machine_of(golden.SLICE)
  kept = {"optimizer.on_host": True, "model.remat": "offload"}
  sizes = {"model.width": 1024, "model.mlp_width": 4096, "model.depth": 8}
  config.update_from_flattened_dict(golden.FIELDS | golden.TPU_FIELDS | sizes | kept)
  runner = tool.create(config, where)
  step, predicted = compile_step(runner, config.batch_size), memory.of(Case.of(runner, config.batch_size, "tpu"))
  assert step.host == predicted.host
  assert step.arguments == pytest.approx(predicted.parameters, rel=0.01)
  assert step.bytes < 1.1 * predicted.total


@pytest.mark.parametrize(
  "name",
  [pytest.param(name, marks=[pytest.mark.both_stacks] * golden.has_own_page(name, golden.SLICE)) for name in SENDERS],
)
def test_a_strategy_on_tpus_matches_its_golden_page(name: str):
  file = golden.file(name, golden.SLICE)
  if not file.exists():
    pytest.skip(f"no golden page for {name}; write it with python -m tests.golden.make_explain --topology")
  assert golden.page(name, golden.SLICE) == file.read_text()


def test_a_single_tpu_matches_its_golden_page():
  """It sends nothing, so no compiler is needed. Its step would take longer to compile than any strategy's."""
  runner = golden.strategy("single", golden.SLICE)
  found = explanation.explain("single", runner, golden.FIELDS["batch_size"], machine_of(golden.SLICE), compiled=False)
  assert golden.text(found | {"communication": []}) == golden.file("single", golden.SLICE).read_text()


@pytest.mark.parametrize("topology, width", [("v5p:4x4x4", 1024), ("v6e:8x8", 512)])
def test_a_whole_slice_scatters_its_gradients(topology: str, width: int):
  """Of 64 chips. On v6e the pieces have 8 rows, which fill no tile, and are scattered by hand.

  Without the options, v5p sends twice the bytes, and explain says of which weights.
  """
  config, where = base.get_config("tiny", "fsdp"), machine_of(topology)
  sizes = {"width": width, "depth": 2, "heads": 8, "kv_heads": 8, "mlp_width": 4 * width, "vocab_size": 4096}
  config.update_from_flattened_dict({f"model.{name}": size for name, size in sizes.items()})
  config.update_from_flattened_dict({"model.seq_len": 512, "batch_size": 64})

  def sent(runner: Strategy) -> tuple[float, list[dict[str, Any]]]:
    found = explanation.explain("fsdp", runner, config.batch_size, where)
    return sum(row["sent_in_step"] for row in found["communication"]), found["excess"]

  runner = tool.create(config, where)
  assert bool(runner.transfers.by_hand) == (width == 512)
  wanted = sum(row.bytes for row in theory.sent(Case.of(runner, config.batch_size, "tpu")))
  ours, excess = sent(runner)
  assert ours == pytest.approx(wanted, rel=0.01)
  assert excess == []
  if topology == "v5p:4x4x4":
    config.compiler_options = "default"
    ours, excess = sent(tool.create(config, where))
    assert ours > 1.8 * wanted
    assert {row["kind"] for row in excess} == {"all-reduce"}
    assert "blocks/mlp/up" in excess[0]["weights"]
    assert "compiler_options='recommended'" in excess[0]["said"]


def test_a_whole_slice_scatters_the_sums_of_split_products():
  """Of 64 chips. Without the options, three of four sums of a block go round a ring, and 1.1 times as much is sent.

  That happens with large products alone, so the sizes are those of 7 billion parameters.
  """
  config, where = base.get_config("tiny", "two_d"), machine_of("v5p:4x4x4")
  sizes = {"width": 4096, "depth": 3, "heads": 32, "kv_heads": 32, "mlp_width": 11_008, "vocab_size": 32_000}
  config.update_from_flattened_dict({f"model.{name}": size for name, size in sizes.items()})
  config.update_from_flattened_dict({"model.seq_len": 4096, "batch_size": 64, "mesh.model": 4, "model.remat": "dots"})
  ours, wanted = by_kind(explanation.explain("two_d", tool.create(config, where), config.batch_size, where))
  for what in ours | wanted:
    assert ours[what] == pytest.approx(wanted[what], rel=1e-6, abs=SCALARS), what


def test_a_whole_slice_shares_positions_in_a_ring_and_by_halos():
  """Of 64 chips, for global and local layers. It never gathers keys, and sends what theory says, kind by kind."""
  config, where = base.get_config("tiny", "long_context"), machine_of("v5p:4x4x4")
  sizes = {"width": 1024, "depth": 2, "heads": 8, "kv_heads": 4, "mlp_width": 4096, "vocab_size": 4096}
  config.model.update(**sizes, seq_len=2048, attention_context="ring", window=129, layers_pattern="local:1,global:1")
  config.update_from_flattened_dict({"batch_size": 16, "mesh.context": 4})
  runner = tool.create(config, where)
  found = explanation.explain("long_context", runner, config.batch_size, where)
  ours, wanted = by_kind(found)
  assert {axes for kind, axes in ours if kind == "collective-permute"} == {("context",)}
  assert {axes for kind, axes in ours if kind == "all-gather"} == {("data", "context")}  # weights
  for what in ours | wanted:
    assert ours[what] == pytest.approx(wanted[what], rel=0.01, abs=SCALARS), what
  assert found["excess"] == []


def test_a_whole_slice_gathers_keys_and_values():
  """Of 64 chips that share a text, and no weights. Without the options, libtpu gathers and scatters by all-reduces."""
  config, where = base.get_config("tiny", "context"), machine_of("v5p:4x4x4")
  sizes = {"width": 1024, "depth": 2, "heads": 8, "kv_heads": 4, "mlp_width": 2048, "vocab_size": 4096}
  config.model.update(**sizes, seq_len=16_384, attention_context="gather")
  config.update_from_flattened_dict({"batch_size": 1, "mesh.context": 64})
  found = explanation.explain("context", tool.create(config, where), config.batch_size, where)
  ours, wanted = by_kind(found)
  assert {kind for kind, _ in ours} == {"all-gather", "reduce-scatter", "all-reduce"}
  for what in ours | wanted:
    assert ours[what] == pytest.approx(wanted[what], rel=1e-6, abs=SCALARS), what
  assert found["excess"] == []


def test_explaining_a_long_text_lists_no_mask_of_all_of_it(monkeypatch: pytest.MonkeyPatch):
  """Splash attention visits each block of a mask in Python: for a million positions that took most of an hour."""
  made, kernel = [], pieces.splash_kernel
  record = lambda q, k, *rest, **more: made.append(k) or kernel(q, k, *rest, **more)
  monkeypatch.setattr(pieces, "splash_kernel", record)
  config, where = base.get_config("tiny", "context"), machine_of("v5p:2x2x2")
  config.update_from_flattened_dict({"model.seq_len": 16_384, "model.window": 256, "batch_size": 1})
  explanation.explain("context", tool.create(config, where), config.batch_size, where, compiled=False)
  assert max(made, default=0) <= 16_384 // 8


def test_a_whole_slice_shares_experts():
  """Of 64 chips. Experts are gathered over the chips that have the same ones, and other weights over all."""
  config, where = base.get_config("tiny", "expert_fsdp"), machine_of("v5p:4x4x4")
  sizes = {
    "width": 1024,
    "depth": 2,
    "heads": 8,
    "kv_heads": 4,
    "experts": 32,
    "expert_width": 1024,
    "vocab_size": 4096,
  }
  config.update_from_flattened_dict({f"model.{name}": size for name, size in sizes.items()})
  config.update_from_flattened_dict({"model.seq_len": 512, "batch_size": 64, "mesh.expert": 8})
  config.model.expert_transport = "exchange"
  found = explanation.explain("expert_fsdp", tool.create(config, where), config.batch_size, where)
  ours, wanted = by_kind(found)
  assert {axes for kind, axes in ours if kind == "all-to-all"} == {("expert",), ("data", "expert")}  # rows, and routers
  assert {axes for kind, axes in ours if kind == "all-gather"} == {("data",), ("data", "expert")}
  for what in ours | wanted:
    assert ours[what] == pytest.approx(wanted[what], rel=0.01, abs=SCALARS), what
  assert found["excess"] == []
  assert found["time"]["flops"] == pytest.approx(found["time"]["predicted_flops"], rel=0.01)


def test_ragged_rows_fill_the_rows_of_tiles():
  """A row of a single number, such as a token's weight, travels as 512 bytes. A capacity makes no difference to it."""
  config, where = base.get_config("tiny", "expert"), machine_of(golden.SLICE)
  config.update_from_flattened_dict(golden.FIELDS | golden.TPU_FIELDS | golden.MIXTURE)
  config.model.update(expert_transport="ragged", expert_capacity=1.25, depth=2)
  found = explanation.explain("expert", tool.create(config, where), config.batch_size, where)
  ours, wanted = by_kind(found)
  rows = 4 * 128 * 2 * 7 / 8  # tokens of a device, experts of each, sent to other devices
  assert ours["ragged-all-to-all", ("expert",)] == 2 * rows * (5 * 2 * 256 + 3 * 512)
  for what in ours | wanted:
    assert ours[what] == pytest.approx(wanted[what], rel=1e-6, abs=SCALARS), what


@pytest.mark.both_stacks
def test_experts_in_stages_send_what_theory_says():
  """And hidden units over `model`. The first stage runs dense blocks. The compiler of jax 0.10 fails on such stages.

  The compiler lets the devices of `model` share some of the router's work, and gathers its small results.
  """
  layout = (strategies.layout_of("three_d") | strategies.layout_of("expert")).on(stage=2, data=1, expert=2, model=2)
  where, sizes = machine_of(golden.SLICE), golden.TPU_FIELDS | {"model.dense_layers": 2, "model.expert_width": 512}
  fields = {name.replace(".", "__"): value for name, value in (golden.FIELDS | sizes | golden.MIXTURE).items()}
  build = lambda: laid_out(layout, settings.program(config(**fields), "tpu"), where.devices(), **fields)
  if jax.__version_info__ < (0, 12):
    with one_sentence("model.experts=8", "mesh.model=2"):
      build()
    return
  ours, wanted = by_kind(explanation.explain("three_d", build(), golden.FIELDS["batch_size"], where))
  for what in ours | wanted:
    assert ours[what] == pytest.approx(wanted[what], rel=0.02, abs=SCALARS), what


def test_a_model_on_1024_chips_is_explained_in_8_gb(tmp_path: Path):
  """Runs the command as a user would. The model is as wide as the chips are many.

  The compiler needs ten times as long for 7 billion parameters, and 2 GB. lab/benchmarks/predictions.py compiles one.
  """
  model = {"width": 1024, "heads": 8, "kv_heads": 8, "mlp_width": 1024, "vocab_size": 1024, "depth": 2, "seq_len": 128}
  found = explained_in_8_gb(tmp_path, model, "--topology=v5p:8x8x16", "--config.batch_size=1024")
  assert found["mesh"] == {"data": 1024}
  assert found["memory"]["fits"]
