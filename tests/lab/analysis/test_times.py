"""Times and sizes from first principles: those of predictions, and those that explain computes from a compiled step."""

import dataclasses
import math

import pytest
from helpers import program, strategy

import strategies
from lab.analysis import explanation, hlo, memory, predict, search, theory
from lab.analysis.case import Case
from lab.analysis.compiled import CompiledStep
from lab.analysis.links import of_devices
from lab.analysis.reached import RATES
from lab.analysis.topology import machine_of
from lab.analysis.weights import weights
from lab.benchmarks import predicted
from models.flops import palm_flops_per_example, train_flops_per_example
from models.sizes import ModelSizes
from runtime.hardware import Chip, chip

V5P = machine_of("v5p:4x4x4")  # 459 TFLOP/s, 2765 GB/s of memory, 100 GB/s a link, a closed torus


def model(**fields: object) -> ModelSizes:
  return dataclasses.replace(program(model__seq_len=64).sizes, dtype="bfloat16", attention="plain", **fields)


@pytest.mark.parametrize(
  "name, mesh, links",
  [
    ("fsdp", {"data": 64}, {("data",): 6}),  # six links over all three dimensions
    # Replicas along one dimension; weights are sharded over two.
    ("hsdp", {"replica": 4, "data": 16}, {("data",): 4, ("replica",): 2, ("replica", "data"): 6}),
    ("two_d", {"data": 16, "model": 4}, {("data",): 4, ("model",): 2, ("data", "model"): 6}),
  ],
)
def test_times_of_a_candidate(name: str, mesh: dict, links: dict):
  case = Case(strategies.layout_of(name).on(**mesh), model(), 64)
  times = search._candidate(name, case, V5P, None).times
  waits = predict._longer_than_products(case, V5P.chip, V5P.links(mesh))  # the model is small, so products are short
  assert times.compute == pytest.approx(predict.flops(case) / 459e12)
  assert times.memory == pytest.approx(predict.traffic(case) / 2765e9)
  sent = hidden = 0.0
  for row in theory.sent(case):
    gathers = row.kind in ("all-gather", "reduce-scatter")
    each = 1 / links[row.axes] / 100e9
    sent += row.bytes * each
    if gathers and not row.waits:  # libtpu hides those of the blocks' weights, and no all-reduces
      hidden += (row.bytes - row.edges) * each
  assert times.communication == pytest.approx(sent)
  assert hidden < times.memory  # so the kernels hide all of it
  assert hidden > 0
  assert 0 < waits < hidden
  assert times.exposed == pytest.approx(sent - hidden + waits)
  assert times.seconds == pytest.approx(times.memory + times.exposed)
  assert times.idle == 0


def test_kernels_hide_no_more_than_their_own_time():
  """With a network this slow, all that the links send beyond the kernels' time is exposed."""
  case = dataclasses.replace(Case(strategies.layout_of("fsdp").on(data=16), model(), 64), compiler="gpu")
  times = {
    network: search._candidate("fsdp", case, machine_of("h100:2x8", network), None).times
    for network in ("400Gb", "1Gb", "0.5Gb")
  }
  slow = times["1Gb"]
  kernels = max(slow.compute, slow.memory)
  assert slow.exposed == pytest.approx(slow.communication - kernels)
  assert slow.communication == pytest.approx(400 * times["400Gb"].communication)
  assert times["0.5Gb"].seconds == pytest.approx(slow.seconds + slow.communication)


@pytest.mark.parametrize("name, mesh", [("two_d", {"data": 4, "model": 2}), ("hsdp", {"replica": 2, "data": 4})])
def test_sums_of_activations_are_exposed_on_gpus_and_gradients_of_blocks_are_not(name: str, mesh: dict[str, int]):
  """The next computation waits for a sum of activations, and an all-reduce for the scatter of the same gradients.

  All that is hidden is for the weights of blocks.
  """
  where = machine_of("h100:1x8")
  case = Case(strategies.layout_of(name).on(**mesh), model(depth=8), 512, compiler="gpu")
  times, rows = search._candidate(name, case, where, None).times, theory.sent(case)
  assert {row.waits for row in rows} == {name == "two_d", False}
  # What nothing can hide.
  seen = sum(row.bytes if row.waits or row.kind == "all-reduce" else row.edges for row in rows)
  assert 0 < seen < sum(row.bytes for row in rows)
  assert times.exposed == pytest.approx(seen / 450e9)


def test_the_edges_of_a_row_are_its_weights_outside_the_blocks():
  """Embedding and head are gathered once, and their gradients scattered once: 2 · 256 · width numbers of bfloat16."""
  rows = theory.sent(Case(strategies.layout_of("fsdp").on(data=8), model(), 64, compiler="gpu"))
  edges = {row.kind: row.edges for row in rows if row.edges}
  numbers = 2 * 256 * model().width * 7 / 8
  assert edges == {"all-gather": 2 * numbers, "reduce-scatter": 2 * numbers}


@pytest.mark.parametrize(
  "name, schedule, compiler, ticks, exposed",
  [
    ("pipeline", "gpipe", "tpu", 2 * (8 + 3), 2 * (8 + 3)),
    ("pipeline", "1f1b", "tpu", 2 * (8 + 3), 2 * 3),
    ("pipeline", "zero_bubble", "gpu", 2 * (8 + 3), 2 * 3),
    ("three_d", "1f1b", "tpu", 2 * (8 + 3), 2 * 3),
    ("three_d", "1f1b", "gpu", 2 * (8 + 3), 2 * (8 + 3)),  # sums over `model` in the units
  ],
)
def test_units_hide_what_stages_exchange_where_a_tick_has_both_kinds(
  name: str, schedule: str, compiler: str, ticks: int, exposed: int
):
  """Each exchange has one array [b, T, D], of the device's positions. The first and last S - 1 have no unit beside."""
  layout = strategies.layout_of(name).on(stage=4, data=2)
  built = search._schedule(schedule, 4, 8, 1)
  case = Case(layout, model(depth=4), 32, schedule=built, compiler=compiler)
  (row,) = (row for row in theory.sent(case) if row.kind == "collective-permute")
  array = case.examples * case.sizes.positions * case.sizes.width * case.item / layout.shards("sequence")
  assert (row.bytes, row.edges) == (ticks * array, exposed * array)


def test_idle_time_of_a_pipeline_candidate():
  """A stage waits in s - 1 of v · m + s - 1 parts of the time, and with weight units in a third of these s - 1.

  The search tries enough microbatches for less than an eighth.
  """
  layout = strategies.layout_of("pipeline").on(stage=4, data=16)
  least = {}
  for name, stages, microbatches, chunks in search._pipelines(layout, 4):
    schedule = search._schedule(name, stages, microbatches, chunks)
    case = Case(layout, model(depth=4), 16 * microbatches, schedule=schedule)
    times = search._candidate("pipeline", case, V5P, (name, stages, microbatches, chunks)).times
    waits = 3 / (3 if name == "zero_bubble" else 1)
    assert times.idle == schedule.idle_time() == pytest.approx(waits / (chunks * microbatches + waits))
    again = dataclasses.replace(case, sizes=model(depth=4, remat="full"))  # a backward unit repeats the forward unit
    judged = search._candidate("pipeline", again, V5P, (name, stages, microbatches, chunks)).times
    assert judged.idle == schedule.idle_time(backward=3.0)
    assert judged.idle == pytest.approx(times.idle) or name == "zero_bubble"  # whose units repeat it twice
    assert times.seconds >= times.compute / (1 - times.idle)
    least[name] = min(times.idle, least.get(name, 1.0))
  assert max(least.values()) < 1 / 8


def test_traffic_of_weights_blocks_and_logits():
  """Each pass reads the weights; gradients are written and read; the optimizer reads and writes three numbers.

  The rest grows with the batch: the blocks' values, and the logits in float32.
  """
  layout = strategies.layout_of("fsdp").on(data=4)

  def parts(**fields: object) -> tuple[float, float]:
    """The bytes that do not depend on the batch, and the bytes that one example adds."""
    one, two = (predict.traffic(Case(layout, model(**fields), size)) for size in (4, 8))
    return 2 * one - two, two - one

  case = Case(layout, model(), 4)
  held, used = (sum(map(part, weights(model()))) for part in (case.held, case.used))
  for remat, passes in (("minimal", 3), ("dots", 3), ("full", 4)):
    assert parts(remat=remat)[0] == pytest.approx(passes * used * 2 + (2 + 6) * held * 4)
  logits = parts(vocab_size=512)[1] - parts(vocab_size=256)[1]
  assert logits == pytest.approx(6 * 64 * 256 * 4)
  assert parts(depth=4)[1] - logits == pytest.approx(2 * (parts(depth=2)[1] - logits))


def test_accumulation_keeps_the_gradients_of_the_current_part_beside_the_sum():
  """The sum is in float32, and the part's gradients, which are summed by hand, in the compute dtype."""
  layout, held = strategies.layout_of("data_parallel").on(data=2), sum(weight.size for weight in weights(model())) * 4
  assert memory.of(Case(layout, model(), 8)).gradients == held
  assert memory.of(Case(layout, model(), 8, accumulation=2)).gradients == held + held / 2


# Two gathers over `data` and one over `model` of 8 devices, and a product.
STEP = """HloModule m

ENTRY %main (a: bf16[64,64]) -> bf16[64,64] {
  %a = bf16[64,64]{1,0} parameter(0)
  %g = bf16[256,64]{1,0} all-gather(%a), channel_id=1, replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}
  %h = bf16[256,64]{1,0} all-gather(%a), channel_id=2, replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}
  %m = bf16[128,64]{1,0} all-gather(%a), channel_id=3, replica_groups=[4,2]<=[8], dimensions={0}
  ROOT %d = bf16[256,64]{1,0} dot(%g, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


def test_times_and_communication_that_explain_computes_from_a_step():
  runner = strategy("two_d", program(), mesh__data=4, mesh__model=2)
  step = CompiledStep(hlo.parse(STEP), 60, 40, 0.0, runner.layout.mesh, {})
  figures = chip("NVIDIA H200")  # 989 TFLOP/s, 4.8 TB/s of memory, 450 GB/s of links
  assert figures is not None
  timed = step.overlap(figures, of_devices(figures, runner.mesh))
  time = explanation._time(runner, Case.of(runner, 16, "gpu"), step, figures, timed)
  array = 64 * 64 * 2
  assert time["compute"] == pytest.approx(2 * 256 * 64 * 64 / 989e12)
  assert time["traffic"] == 2 * (1 + 4) * array + (1 + 2) * array + (4 + 1 + 4) * array
  assert time["memory"] == pytest.approx(time["traffic"] / 4.8e12)
  assert time["communication"] == pytest.approx((3 + 3 + 1) * array / 450e9)
  assert time["exposed"] == time["communication"]  # nothing runs beside them
  assert time["seconds"] == pytest.approx(time["memory"] + time["exposed"])
  sizes = runner.program.sizes
  assert time["per_second"] == pytest.approx(16 * sizes.seq_len / time["seconds"])
  of_peak = lambda flops: pytest.approx(16 * flops / 8 / 989e12 / time["seconds"])
  assert time["mfu"] == of_peak(train_flops_per_example(sizes))
  assert time["palm_mfu"] == of_peak(palm_flops_per_example(sizes))
  scores = predict.attention_flops(Case.of(runner, 16, "gpu")) / 989e12
  products, rates = time["compute"] - scores, RATES["gpu"]
  kernels = rates.products * products + rates.attention * scores + rates.memory * time["memory"]
  assert time["expected"] == pytest.approx(max(kernels + time["exposed"], time["seconds"]))
  assert time["expected_mfu"] == pytest.approx(time["mfu"] * time["seconds"] / time["expected"])
  (gathers,) = (row for row in explanation._communication(step.collectives(), timed) if row["axes"] == ("data",))
  assert (gathers["count"], gathers["sent_in_step"]) == (2, 2 * 3 * array)
  assert gathers["seconds"] == gathers["exposed"] == pytest.approx(2 * 3 * array / 450e9)
  assert [row["seconds"] for row in explanation._communication(step.collectives(), None)] == [
    None,
    None,
  ]  # unknown devices


@pytest.mark.parametrize("capacity, fits", [(99, False), (100, True)])
def test_a_step_fits_if_arguments_and_temporaries_fit_together(capacity: float, fits: bool):
  runner = strategy("fsdp", program())
  case, step = Case.of(runner, 16, "gpu"), CompiledStep(hlo.parse(STEP), 60, 40, 0.0, runner.layout.mesh, {})
  assert explanation._memory("fsdp", case, step, None, capacity, compiler_knows=False)["fits"] is fits


def test_fixes_multiply_the_current_accumulation():
  case = dataclasses.replace(Case.of(strategy("fsdp", program(model__remat="full")), 64, "cpu"), accumulation=2)
  changes = [fix["change"] for fix in explanation.fixes("fsdp", case, math.inf)]
  assert "accumulation=4" in changes
  assert "accumulation=2" not in changes


def test_the_benchmarks_prediction_includes_exposed_communication(monkeypatch: pytest.MonkeyPatch):
  """For real devices. Here each CPU device stands for one with 1 GFLOP/s on a 1 GB/s network without a torus."""
  made_up = Chip(flops=1e9, memory=1e9, bandwidth=1e15, link=1e9)
  monkeypatch.setattr(predicted, "chip", lambda kind: made_up)
  monkeypatch.setattr(predicted, "peak_flops", lambda device, dtype: made_up.flops)
  runner = strategy("three_d", program())
  case = Case.of(runner, 32, "cpu")
  sent = sum(row.bytes for row in theory.sent(case)) / 1e9  # XLA:CPU hides none of it
  busy = predict.flops(case) / 1e9 / (1 - case.idle)
  assert sent > 0.01 * busy > 0
  assert predicted.predicted_step(runner, 32)["seconds"] == pytest.approx(busy + sent)
