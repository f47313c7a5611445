"""Times and sizes from first principles: those of predictions, and those that explain computes from a compiled step."""

import dataclasses
import math

import jax
import pytest
from helpers import program, strategy

import strategies
from analysis import explanation, hlo, predict, roofline, search, theory
from analysis.case import Case, weights
from analysis.compiled import Step
from analysis.timeline import idle_time
from analysis.topology import slice_of
from benchmarks import expected
from models.config import ModelConfig
from runtime.hardware import Chip, chip
from strategies.mesh import make_mesh

V5P = slice_of("v5p:4x4x4")  # 459 TFLOP/s, 2765 GB/s of memory, 100 GB/s a link, a closed torus


def model(**fields: object) -> ModelConfig:
  return dataclasses.replace(program(model__seq_len=64).model, dtype="bfloat16", attention="plain", **fields)


@pytest.mark.parametrize(
  "name, mesh, links",
  [
    # Six links over all three dimensions, where gathers and scatters send twice the bytes (`Slice.is_whole`).
    ("fsdp", {"data": 64}, {("data",): 6}),
    # Replicas along one dimension; weights are sharded over two.
    ("hsdp", {"replica": 4, "data": 16}, {("data",): 4, ("replica",): 2, ("replica", "data"): 6}),
    ("two_d", {"data": 16, "model": 4}, {("data",): 4, ("model",): 2}),
  ],
)
def test_times_of_a_candidate(name: str, mesh: dict, links: dict):
  case = Case(strategies.layout_of(name).on(**mesh), model(), 64)
  times = search._candidate(name, case, V5P, None).times
  assert times.compute == pytest.approx(predict.flops(case) / 459e12)
  assert times.memory == pytest.approx(predict.traffic(case) / 2765e9)
  sent = {False: 0.0, True: 0.0}
  for row in theory.sent(case):
    twice = links[row.axes] == 6 and row.kind in ("all-gather", "reduce-scatter")
    sent[row.waits] += row.bytes * (2 if twice else 1) / links[row.axes] / 100e9
  assert times.communication == pytest.approx(sent[False])
  assert times.waiting == pytest.approx(sent[True])
  assert (times.waiting > 0) == ("model" in mesh)  # sums of activations
  assert times.idle == 0


def test_idle_time_of_a_pipeline_candidate():
  """A gpipe stage is idle in s - 1 of m + s - 1 ticks. The search tries enough microbatches for less than an eighth."""
  layout = strategies.layout_of("pipeline").on(stage=4, data=16)
  least = {}
  for name, stages, microbatches, chunks in search._pipelines(layout, 4):
    schedule = search._schedule(name, stages, microbatches, chunks)
    case = Case(layout, model(depth=4), 16 * microbatches, schedule=schedule)
    times = search._candidate("pipeline", case, V5P, (name, stages, microbatches, chunks)).times
    assert times.idle == idle_time(schedule) > 0
    again = dataclasses.replace(case, model=model(depth=4, remat="full"))  # a backward unit repeats the forward unit
    judged = search._candidate("pipeline", again, V5P, (name, stages, microbatches, chunks)).times
    assert judged.idle == idle_time(schedule, backward=3.0)
    assert (judged.idle > times.idle) == (name != "gpipe")
    assert times.seconds >= times.compute / (1 - times.idle)
    if name == "gpipe":
      assert times.idle == pytest.approx(3 / (microbatches + 3))
    least[name] = min(times.idle, least.get(name, 1.0))
  assert least["gpipe"] < 1 / 8


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


def test_accumulation_doubles_the_memory_of_gradients():
  layout, held = strategies.layout_of("data_parallel").on(data=2), sum(weight.size for weight in weights(model())) * 4
  assert predict.memory(Case(layout, model(), 8)).gradients == held
  assert predict.memory(Case(layout, model(), 8, accumulation=2)).gradients == 2 * held


def test_devices_without_coordinates_count_as_one_dimension():
  mesh = make_mesh(strategies.layout_of("two_d").on(data=4, model=2), jax.devices())
  assert roofline.extents(mesh, ("data",)) == ([4], [8])


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
  step = Step(hlo.parse(STEP), 60, 40, 0.0, runner.layout.mesh, {})
  figures = chip("NVIDIA H200")  # 989 TFLOP/s, 4.8 TB/s of memory, 450 GB/s of links
  assert figures is not None
  time = explanation._time(runner, Case.of(runner, 16, "gpu"), step, figures)
  array = 64 * 64 * 2
  assert time["compute"] == pytest.approx(2 * 256 * 64 * 64 / 989e12)
  assert time["traffic"] == 2 * (1 + 4) * array + (1 + 2) * array + (4 + 1 + 4) * array
  assert time["memory"] == pytest.approx(time["traffic"] / 4.8e12)
  assert time["communication"] == pytest.approx((3 + 3 + 1) * array / 450e9)
  assert time["seconds"] == max(time["compute"], time["memory"], time["communication"])
  model = runner.program.model
  assert time["per_second"] == pytest.approx(16 * model.seq_len / time["seconds"])
  assert time["mfu"] == pytest.approx(16 * model.train_flops_per_example() / 8 / 989e12 / time["seconds"])
  (gathers,) = (row for row in explanation._communication(step) if row["axes"] == ("data",))
  assert (gathers["count"], gathers["sent_in_step"]) == (2, 2 * 3 * array)


@pytest.mark.parametrize("capacity, fits", [(99, False), (100, True)])
def test_a_step_fits_if_arguments_and_temporaries_fit_together(capacity: float, fits: bool):
  runner = strategy("fsdp", program())
  case, step = Case.of(runner, 16, "gpu"), Step(hlo.parse(STEP), 60, 40, 0.0, runner.layout.mesh, {})
  figures = Chip(flops=1.0, memory=capacity, bandwidth=1.0, link=1.0)
  assert explanation._memory("fsdp", case, step, None, figures, compiler_knows=False)["fits"] is fits


def test_fixes_multiply_the_current_accumulation():
  case = dataclasses.replace(Case.of(strategy("fsdp", program(model__remat="full")), 64, "cpu"), accumulation=2)
  changes = [fix["change"] for fix in explanation.fixes("fsdp", case, math.inf)]
  assert "accumulation=4" in changes
  assert "accumulation=2" not in changes


def test_the_benchmarks_prediction_includes_waiting(monkeypatch: pytest.MonkeyPatch):
  """For real devices. Here each CPU device stands for one with 1 GFLOP/s on a 1 GB/s network without a torus."""
  made_up = Chip(flops=1e9, memory=1e9, bandwidth=1e15, link=1e9)
  monkeypatch.setattr(expected, "chip", lambda kind: made_up)
  monkeypatch.setattr(expected, "peak_flops", lambda device, dtype: made_up.flops)
  runner = strategy("three_d", program())
  case = Case.of(runner, 32, "cpu")
  waits = sum(row.bytes for row in theory.sent(case) if row.waits) / 1e9
  hidden = sum(row.bytes for row in theory.sent(case) if not row.waits) / 1e9
  busy = predict.flops(case) / 1e9 / (1 - case.idle)
  assert waits > 0
  assert busy > hidden
  assert expected.expected_step(runner, 32, None)["seconds"] == pytest.approx(max(busy, hidden) + waits)
