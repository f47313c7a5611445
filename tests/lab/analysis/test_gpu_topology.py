"""Compiles every strategy with the GPU compiler, without GPUs. `make test-topology` installs the compiler.

Compares what each strategy sends and computes with the formulas, as test_communication.py does on CPU and
test_topology.py for TPUs. The models have the widths of test_topology.py, in bfloat16 and with cuDNN's attention.
"""

import collections
import functools
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from compiled_steps import explained_in_8_gb, loops_beside_sends, sent_and_wanted
from golden import make_explain as golden
from helpers import config, laid_out

import strategies
from configs import base
from lab.analysis import calls, explanation, gpus, memory, predict
from lab.analysis.case import Case
from lab.analysis.compiled import CompiledStep, compile_step
from lab.analysis.topology import Machine, machine_of
from lab.analysis.weights import weights
from lab.benchmarks import predictions
from runtime.devices import has_gpu_compiler
from strategies.execution.strategy import Strategy
from tools import explain as tool
from training import settings

pytestmark = [
  pytest.mark.full,
  pytest.mark.skipif(not has_gpu_compiler(), reason="the GPU compiler is not installed; make test-topology"),
]
HOST = "h100:1x8"
NAMES = [name for name in strategies.names() if golden.lowers_for(name, HOST)]
SENDERS = [name for name in NAMES if strategies.layout_of(name).uses_every_axis()]
ROOT = Path(__file__).parents[3]

# Losses, counts and norms, which the formulas leave out: a few bytes each.
SCALARS = 512


@functools.cache
def compiled(name: str, inputs: str) -> tuple[Strategy, Case, CompiledStep]:
  """A strategy on 8 GPUs of one host, what is predicted of its step, and the compiled step."""
  config, where = base.get_config("tiny", name), machine_of(HOST)
  config.update_from_flattened_dict(golden.FIELDS | golden.TPU_FIELDS | golden.INPUTS[inputs])
  runner = tool.create(config, where)
  return runner, Case.of(runner, config.batch_size, "gpu"), compile_step(runner, config.batch_size)


@functools.cache
def grouped(name: str, inputs: str) -> tuple[collections.Counter, collections.Counter]:
  """Bytes that a device sends in a step, by (kind, axes): in the compiled program, and according to the formulas."""
  return sent_and_wanted(*compiled(name, inputs)[1:])


@pytest.mark.parametrize("name, inputs", golden.programs(SENDERS))
def test_every_strategy_sends_what_theory_says_and_nothing_else(name: str, inputs: str):
  ours, wanted = grouped(name, inputs)
  for what in ours | wanted:
    assert ours[what] == pytest.approx(wanted[what], rel=1e-6, abs=SCALARS), what


def test_eight_hosts_share_positions_in_a_ring_and_by_halos():
  """64 GPUs, for global and local layers."""
  asked = base.get_config("tiny", "long_context")
  sizes = {"width": 1024, "depth": 2, "heads": 8, "kv_heads": 4, "mlp_width": 4096, "vocab_size": 4096}
  asked.model.update(**sizes, seq_len=2048, attention_context="ring", window=129, layers_pattern="local:1,global:1")
  asked.update_from_flattened_dict({"batch_size": 16, "mesh.context": 4})
  runner = tool.create(asked, machine_of("h100:8x8"))
  ours, wanted = sent_and_wanted(Case.of(runner, 16, "gpu"), compile_step(runner, 16))
  assert ours["collective-permute", ("context",)] > 0
  for what in ours | wanted:
    assert ours[what] == pytest.approx(wanted[what], rel=1e-6, abs=SCALARS), what


@pytest.mark.parametrize("name", ["fsdp", "zero1", "hsdp", "two_d"])
def test_six_gpus_that_do_not_divide_the_model_send_padding_and_nothing_else(name: str):
  """By hand: left to the compiler, gradients of unequal pieces would be all-reduced."""
  asked = base.get_config("tiny", name)
  asked.update_from_flattened_dict(golden.FIELDS | golden.TPU_FIELDS | {"model.vocab_size": 1001, "batch_size": 48})
  runner = tool.create(asked, machine_of("h100:1x6"))
  assert runner.program.sizes.width % runner.layout.shards("state")
  case, step = Case.of(runner, 48, "gpu"), compile_step(runner, 48)
  ours, wanted = sent_and_wanted(case, step)
  if name == "two_d":
    # The gradient of the last norm's scale is summed by the compiler over `model`, and then by hand over `data`. XLA
    # makes one sum over both of these, which sends less: on n devices each sends 2(n − 1)/n of it.
    scale = 4 * runner.program.sizes.width
    for axes, sent in ((("model",), -2 * 1 / 2), (("data",), -2 * 2 / 3), (("data", "model"), 2 * 5 / 6)):
      wanted["all-reduce", axes] += sent * scale
  for what in ours | wanted:
    assert ours[what] == pytest.approx(wanted[what], rel=1e-6, abs=SCALARS), what
  assert step.left_out() == []


@pytest.mark.parametrize(
  "fields",
  [
    {"pipeline.schedule": "zero_bubble", "model.expert_transport": "gather"},
    {
      "model.dense_layers": 2,
      "model.expert_width": 512,
      "model.expert_capacity": 1.0,
      "model.expert_transport": "exchange",
    },
  ],
)
def test_stages_with_experts_send_and_compute_what_theory_says(fields: dict):
  """With weight units, and with dense blocks on the first stage and a capacity.

  Memory traffic is within a factor of two: blocks have only 8 rows here, and XLA splits their products.
  """
  layout = (strategies.layout_of("pipeline") | strategies.layout_of("expert")).on(stage=2, data=2, expert=2)
  asked = golden.FIELDS | golden.TPU_FIELDS | golden.MIXTURE | fields
  named = {name.replace(".", "__"): value for name, value in asked.items()}
  where = machine_of(HOST)
  runner = laid_out(layout, settings.program(config(**named), "gpu"), where.devices(), **named)
  case, step = Case.of(runner, asked["batch_size"], "gpu"), compile_step(runner, asked["batch_size"])
  ours, wanted = sent_and_wanted(case, step)
  for what in ours | wanted:
    assert ours[what] == pytest.approx(wanted[what], rel=1e-6, abs=SCALARS), what
  assert step.left_out() == []
  assert step.flops() == round(predict.flops(case))
  assert 1 / 2 < predict.traffic(case) / step.traffic() < 2


@pytest.mark.parametrize("name", ["fsdp", "pipeline"])
def test_the_host_holds_the_state_and_offloaded_activations(name: str):
  """Streamed: what comes to the device for the update takes no more room than the activations did."""
  config, where = base.get_config("tiny", name), machine_of(HOST)
  kept = {"optimizer.on_host": True, "model.remat": "full" if strategies.layout_of(name).layers else "offload"}
  config.update_from_flattened_dict(golden.FIELDS | golden.TPU_FIELDS | kept)
  found = explanation.explain(name, runner := tool.create(config, where), config.batch_size, where)
  of_host, predicted = found["memory"]["host"], found["memory"]["predicted"]
  _, before, step = compiled(name, "tokens")
  assert of_host == predicted["host"] >= memory.of(before).optimizer
  assert found["memory"]["arguments"] == pytest.approx(predicted["parameters"], rel=0.01)
  assert found["memory"]["temporary"] < step.temporary
  text = tool.text(found, runner)
  assert "and in the host's memory" in text
  assert f"{of_host / 1e9:.2f} GB each way, at 64 GB/s" in text


@pytest.mark.parametrize("name, inputs", golden.programs(NAMES))
def test_no_flop_is_done_twice_and_none_is_left_out(name: str, inputs: str):
  """Also where cuDNN computes the scores again, and where remat or a pipeline repeats products."""
  _, case, step = compiled(name, inputs)
  assert case.sizes.dtype == "bfloat16"
  assert step.left_out() == []
  assert step.flops() == round(predict.flops(case))


@pytest.mark.parametrize("name, inputs", golden.of_tokens(NAMES))
def test_attention_is_cudnns_forward_and_backward(name: str, inputs: str):
  """Both calls run in the loops over blocks, so `flops` counts them as often as there are layers and parts."""
  _, case, step = compiled(name, inputs)
  assert case.sizes.attention == "cudnn"
  visits = [visit for visit in step.module.walk(step.rounds) if visit.instruction.operation == "custom-call"]
  runs: collections.Counter[str] = collections.Counter()
  for visit in visits:
    if "fmha" in (target := calls.target(visit.instruction)):
      assert calls.flops(visit.instruction, visit.computation)
      runs["Backward" in target] += visit.times
  each = case.batch_parts * case.sizes.depth // case.layout.shards("layers")
  assert runs == {False: each, True: each}


@pytest.mark.parametrize("name, inputs", golden.of_tokens(NAMES))
def test_no_strategy_uses_all_to_all(name: str, inputs: str):
  """With AdamW. Muon, in the programs for images, shares layers by them, and theory says how much that sends."""
  found = {axes for kind, axes in grouped(name, inputs)[0] if kind == "all-to-all"}
  allowed = {"context", "expert"}  # where attention exchanges positions for heads, and where tokens go to experts
  assert all(allowed & set(axes) for axes in found)


def size(name: str, wanted: str = "") -> int:
  """Bytes of the matrices in bfloat16, or of those with one role."""
  found = weights(compiled(name, "tokens")[0].program.sizes)
  return 2 * sum(weight.size for weight in found if weight.is_matrix and (not wanted or wanted in weight.roles))


def test_fsdp_gathers_its_weights_in_bfloat16_and_scatters_all_gradients():
  """Blocks are gathered twice, embedding and head once. In float32 they would send twice as much."""
  ours, _ = grouped("fsdp", "tokens")
  assert (
    ours["all-gather", ("data",)]
    == (2 * size("fsdp", "block") + size("fsdp", "head") + size("fsdp", "embedding")) * 7 / 8
  )
  assert ours["reduce-scatter", ("data",)] == size("fsdp") * 7 / 8


@pytest.mark.parametrize("name, inputs", golden.of_tokens(["fsdp", "hsdp", "two_d", "three_d"]))
def test_all_weights_are_gathered_in_bfloat16(name: str, inputs: str):
  """Also the head and the embedding, whose casts the compiler could move behind their gathers."""
  _, case, step = compiled(name, inputs)
  gathered = {
    (shape.dtype, shape.size)
    for one in step.collectives()
    if one.kind == "all-gather" and one.axes == case.axes("embed")
    for shape in one.operands
  }
  edges = {case.held(weight) for weight in weights(case.sizes) if weight.is_matrix and not weight.in_blocks}
  assert edges <= {size for _, size in gathered}
  assert {dtype for dtype, size in gathered if size >= min(edges)} == {"bf16"}


def test_data_parallel_all_reduces_its_gradients():
  """2·P·(n−1)/n numbers, those of the norms in float32."""
  _, case, _ = compiled("data_parallel", "tokens")
  norms = 4 * (2 * case.sizes.depth + 1) * case.sizes.width
  ours, _ = grouped("data_parallel", "tokens")
  assert ours.keys() == {("all-reduce", ("data",))}
  expected = 2 * (size("data_parallel") + norms) * 7 / 8
  assert ours["all-reduce", ("data",)] == pytest.approx(expected, abs=SCALARS)


@pytest.mark.parametrize("name, inputs", golden.of_tokens(SENDERS))
def test_the_links_send_all_bytes_and_expose_a_part_of_them(name: str, inputs: str):
  runner, _, step = compiled(name, inputs)
  where = machine_of(HOST)
  found = step.overlap(where.chip, where.links_of(runner.mesh))
  assert found.sent == pytest.approx(sum(one.sent_in_step for one in step.collectives()) / where.chip.link)
  assert all(0 <= one.exposed <= one.sent for one in found.collectives)
  assert 0 < found.exposed <= found.sent
  assert found.kernels >= step.flops() / where.chip.flops
  assert (found.exposed < found.sent) or not {"all-gather", "reduce-scatter"} & {
    one.collective.kind for one in found.collectives
  }


@pytest.mark.skipif(bool(list(Path("/dev").glob("nvidia*"))), reason="this machine has GPUs")
def test_a_machine_without_gpus_compiles_a_plan_and_prints_nothing_about_them():
  """The plugin complains at length if there is no GPU or no cuDNN."""
  command = [sys.executable, "-m", "tools.plan", "--config=configs/fsdp.py:tiny", "--topology=h100:1x4"]
  command += ["--config.batch_size=32", "--strategies=fsdp", "--best=1", "--compile"]
  free = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
  done = subprocess.run(command, cwd=ROOT, env=free, capture_output=True, text=True, timeout=100)
  assert (done.returncode, done.stderr) == (0, "")
  assert re.search(r"By the compiler:\n 1  [\d.]+ MB \(predicted [\d.]+ MB\): fits, at least ", done.stdout)


@pytest.mark.parametrize("schedule, beside", [("1f1b", {"backward_1"}), ("zero_bubble", {"backward_1", "weights_1"})])
def test_stages_exchange_while_their_units_run(schedule: str, beside: set[str]):
  """In ticks with both kinds of units, cotangents travel during the forward units, activations during the others."""
  config, where = base.get_config("tiny", "pipeline"), machine_of("h100:1x4")
  config.update_from_flattened_dict(golden.FIELDS | golden.TPU_FIELDS | {"pipeline.schedule": schedule})
  runner = tool.create(config, where)
  step = compile_step(runner, config.batch_size)
  assert [loops for loops in loops_beside_sends(step.module) if loops] == [{"forward_1"}, beside]
  sends = step.overlap(where.chip, where.links_of(runner.mesh)).collectives
  shares = [
    (one.collective.times, one.hidden / one.sent) for one in sends if one.collective.kind == "collective-permute"
  ]
  assert [share for times, share in shares if times == runner.schedule.phases[1].ticks] == [1, 1]


@functools.cache
def realistic(number: int, **fields: str) -> tuple[Machine, Strategy, CompiledStep]:
  """A case of the benchmark, compiled here, with other values of some fields."""
  case = predictions.GPU[number]
  config, where = predictions.config(case), machine_of(case[1])
  config.update_from_flattened_dict(fields)
  runner = strategies.create(config, settings.program(config, where.platform), where.devices())
  return where, runner, compile_step(runner, config.batch_size)


REALISTIC = [
  number
  for number, case in enumerate(predictions.GPU)
  if case[:6] in (("fsdp", HOST, "1B", 2048, 32, "minimal"), ("tensor_parallel", HOST, "1B", 2048, 8, "full"))
]


@pytest.mark.parametrize("number", REALISTIC)
def test_memory_is_predicted_within_15_percent_of_the_compiler(number: int):
  _, runner, step = realistic(number)
  predicted = memory.of(Case.of(runner, predictions.GPU[number][4], "gpu"))
  assert predicted.total == pytest.approx(step.bytes, rel=0.15)
  assert predicted.state == pytest.approx(step.arguments, rel=0.02)  # and the batch


def test_there_is_a_realistic_case_of_both_kinds():
  assert len(REALISTIC) == 2


def slow_parts(where: Machine, runner: Strategy, step: CompiledStep) -> set[str]:
  """What makes a program slower than it should be. Its results are right, so no other test would notice.

  A device sends less than 1 MB in collectives for norms and losses, and more in all others. Those of weights and
  gradients are along the mesh axes that split the batch. Only those in the loop over blocks have kernels to run beside.
  """
  called = {calls.target(visit.instruction) for visit in step.module.walk(step.rounds)}
  sent = step.overlap(where.chip, where.links_of(runner.mesh)).collectives
  large = [one for one in sent if one.collective.sent > 2**20]
  of_batch = lambda one: set(one.collective.axes) <= set(runner.layout.axes("batch"))
  found = {
    "forward": "__cudnn$fmhaSoftmax" not in called,
    "backward": "__cudnn$fmhaSoftmaxBackward" not in called,
    "dtype": any(shape.dtype != "bf16" for one in large for shape in one.collective.operands),
    "waiting": any(one.hidden == 0 for one in large if of_batch(one) and one.collective.times > 1),
  }
  assert large
  return {part for part, is_slow in found.items() if is_slow}


ON_H100 = {case[0]: number for number, case in enumerate(predictions.GPU) if case[1] in (HOST, "h100:2x8", "h100:16x8")}


# jax 0.12 starts the gather of keys and values in the backward pass too late: 1.0 of 25 ms of this loop's gathers.
LATE = [
  pytest.mark.xfail(jax.__version_info__ >= (0, 12), reason="XLA of jax 0.12 starts one gather late", strict=True),
  pytest.mark.both_stacks,
]


@pytest.mark.parametrize("name", [pytest.param(name, marks=LATE * (name == "fsdp")) for name in ON_H100])
def test_programs_for_h100_have_fused_attention_and_start_collectives_in_bfloat16_ahead(name: str):
  assert slow_parts(*realistic(ON_H100[name])) == set()


@pytest.mark.parametrize(
  "fields, options, expected",
  [
    ({"model.attention": "plain"}, {}, {"forward", "backward"}),
    ({"model.dtype": "float32"}, {}, {"forward", "backward", "dtype"}),
    ({}, {"xla_gpu_disable_async_collectives": "ALLCOLLECTIVES"}, {"waiting"}),
  ],
)
def test_a_slow_program_is_noticed(fields: dict, options: dict, expected: set[str], monkeypatch: pytest.MonkeyPatch):
  for name, value in options.items():
    monkeypatch.setitem(gpus.OPTIONS, name, value)
  assert slow_parts(*realistic.__wrapped__(REALISTIC[0], **fields)) == expected


def test_a_model_of_8_billion_on_1024_gpus_is_explained_in_8_gb(tmp_path: Path):
  """Runs the command as a user would. All bytes cross the network, since `data` spans all hosts."""
  model = predictions.MODELS["8B, GQA"] | {"seq_len": 8192, "remat": "full"}
  found = explained_in_8_gb(tmp_path, model, "--topology=h100:128x8", "--network=200Gb", "--config.batch_size=1024")
  assert sum(math.prod(weight["shape"]) for weight in found["weights"]) > 7.5e9
  assert found["mesh"] == {"data": 1024}
  assert found["not_known"] == gpus.NOT_KNOWN
  rows, time = found["communication"], found["time"]
  assert time["communication"] == pytest.approx(sum(row["sent_in_step"] for row in rows) / (8 * 25e9))
  assert time["communication"] == pytest.approx(sum(row["seconds"] for row in rows))
  assert time["exposed"] == pytest.approx(sum(row["exposed"] for row in rows))
  assert 0 < time["exposed"] < time["communication"]
  assert time["seconds"] == pytest.approx(max(time["compute"], time["memory"]) + time["exposed"])
