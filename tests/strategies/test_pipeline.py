"""The pipeline equals a single device under every schedule, uses every stage, and repeats no work."""

import functools
import math
import re
import warnings

import jax
import numpy as np
import pytest
from helpers import (
  IMAGES,
  PARITY,
  assert_trees_close,
  config,
  each_once,
  in_full,
  initial_state,
  one_sentence,
  random_batch,
  strategy,
)
from helpers import program as make_program
from jax.sharding import PartitionSpec as P
from parting import explained

import strategies
from lab.analysis import search, work
from lab.analysis.compiled import compile_step
from lab.analysis.timeline import unit_rounds
from lab.analysis.topology import machine_of
from strategies.execution.mesh import abstract_mesh, make_mesh, resolve
from strategies.execution.stages.schedule import KINDS
from strategies.execution.stages.staged import check_compiler, regroup
from strategies.execution.strategy import Strategy
from training import settings
from training.program import Params, Program

STEPS, BATCH = 20, 32
SMALL = {
  "model__width": 32, "model__depth": 8, "model__heads": 4, "model__kv_heads": 2, "model__mlp_width": 64,
  "model__seq_len": 16, "model__vocab_size": 64,
}  # fmt: skip
SCHEDULES = ["gpipe", "1f1b", "interleaved", "zero_bubble"]
# (strategy, stages, devices)
MESHES = {"stage": ("pipeline", 2, 2), "stage × data": ("pipeline", 4, 8), "stage × data × model": ("three_d", 2, 8)}
FACTORS = [1, 2, 4]  # microbatches per stage
# A Latin square: its nine cases cover every pair of a schedule, a mesh and a factor.
CASES = [
  (schedule, mesh, FACTORS[(i + j) % 3]) for i, schedule in enumerate(SCHEDULES) for j, mesh in enumerate(MESHES)
]
# With two stages, models are less deep. test_parity.py tests the default schedule, 1f1b, on the other meshes.
SHORT = [case for case in CASES if case[:2] == ("zero_bubble", "stage × data")]


@functools.cache
def program(depth: int = 8) -> Program:
  # Without clipping, Adam's first moment after one step is (1 − b1) times the gradient.
  fields = SMALL | {"optimizer__warmup": 2, "optimizer__clip_norm": 0.0, "model__depth": depth}
  return make_program(steps=STEPS, **fields)


def pipeline(schedule: str, microbatches: int, mesh: str = "stage × data", model: Program | None = None) -> Strategy:
  name, stages, devices = MESHES[mesh]
  fields = {"mesh__stage": stages, "pipeline__schedule": schedule, "pipeline__microbatches": microbatches}
  return strategy(name, model or program(), devices, **fields)


def run(runner) -> tuple[list[float], Params]:
  """The losses of 20 steps, and the gradients of the first times (1 − b1)."""
  state, losses, gradient = initial_state(runner), [], None
  for step in range(STEPS):
    state, metrics = runner.train_step(state, runner.shard(random_batch(program(), BATCH, seed=step), BATCH))
    if gradient is None:
      gradient = jax.device_get(state.opt_state[0].mu)
    losses.append(metrics["loss"])
  return jax.device_get(losses), gradient


@functools.cache
def reference(depth: int) -> tuple[list[float], Params]:
  return run(strategy("single", program(depth)))


@pytest.mark.parametrize("schedule, mesh, factor", in_full(CASES, *SHORT))
def test_pipeline_equals_single_device(schedule: str, mesh: str, factor: int):
  """Every layer's gradient too: interleaved keeps the layers of the state in order, and moves weights within a step."""
  stages = MESHES[mesh][1]
  runner = pipeline(schedule, factor * stages, mesh, program(2 * stages))
  losses, gradient = run(runner)
  expected_losses, expected_gradient = reference(2 * stages)
  with explained(runner, strategy("single", program(2 * stages)), BATCH):
    assert_trees_close(gradient, expected_gradient, PARITY)
    np.testing.assert_allclose(losses, expected_losses, rtol=PARITY)
  assert np.isfinite(losses).all()
  assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(gradient))


@pytest.mark.full
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_work_is_done_twice_and_stages_wait_no_longer_than_in_the_papers(schedule: str):
  """Counts FLOPs in the compiled program: the units of all stages together are the step of a single device.

  Each unit is in a loop that runs once or not at all, and so is the head, which only the last stage runs. A tick lasts
  as long as the units of its busiest stage. The bubble is that of Qi et al. 2024, table 2: (S - 1)(F + B - W), where
  W = 0 without weight units.
  """
  runner = strategy("pipeline", program(), pipeline__schedule=schedule)
  step, ours = compile_step(runner, BATCH), runner.schedule
  in_units = lambda **rounds: work.flops(step.module, dict.fromkeys(unit_rounds(runner), 0) | rounds)
  assert in_units() == 0
  blocks, heads, units = np.zeros((ours.ticks, ours.stages)), set(), dict.fromkeys(KINDS, 0.0)
  for number, phase in enumerate(ours.phases):
    ticks = slice(phase.first, phase.end)
    for kind in phase.units:
      units[kind] = in_units(**{f"{kind}_{number}": 1})
      blocks[ticks] += units[kind] * ours.table[kind]["runs"][ticks]
    heads.add(in_units(**{f"finish_{number}": 1}))
  (head,) = heads - {0}
  total = blocks.sum() + ours.microbatches * head
  assert total * runner.layout.mesh["data"] == compile_step(strategy("single", program()), BATCH).flops()
  idle = 1 - blocks.mean() / blocks.max(axis=1).mean()
  bubble = (ours.stages - 1) * (units["forward"] + units["backward"] - units["weights"])
  assert idle == pytest.approx(bubble / (ours.chunks * ours.microbatches * sum(units.values()) + bubble))
  exchanged = [c.times for c in step.collectives() if c.kind == "collective-permute" and c.axes == ("stage",)]
  wanted = [phase.ticks for phase in ours.phases for _ in phase.routes]
  assert sorted(times for times in exchanged if times > 1) == sorted(wanted)  # weights move to their chunks once


OF_DOCUMENTS = {"data__packing": "documents", "model__dropout": 0.1, "model__remat": "dots"}
OF_IMAGES = IMAGES | {"data__augment": True, "model__dropout": 0.1, "model__remat": "full"}


def trained_on(images: bool) -> Program:
  return make_program(optimizer__clip_norm=0.0, **(OF_IMAGES if images else OF_DOCUMENTS))


@functools.cache
def in_weight_units(name: str, images: bool, vocab_whole: bool) -> Strategy:
  """A pipeline with weight units, of documents or of images."""
  layout = strategies.layout_of(name).place(**{"vocab": None} if vocab_whole else {}).on(data=2)
  asked = config(name, pipeline__schedule="zero_bubble")
  return strategies.build(asked, layout, trained_on(images), make_mesh(layout, jax.devices()))


@pytest.mark.full
@pytest.mark.parametrize(
  "name, images, vocab_whole",
  [
    ("pipeline", False, False),
    ("three_d", True, False),
    ("three_d", False, True),  # a whole table and split positions
  ],
)
def test_only_neighbours_exchange_and_only_between_units(name: str, images: bool, vocab_whole: bool):
  """If the compiler added a collective-permute inside a unit, it would wait for stages that run another unit.

  Nor may an all-to-all run in a loop. Gradients of small arrays are exchanged by one after the last unit.
  """
  runner = in_weight_units(name, images, vocab_whole)
  text = runner.lower_train_step(BATCH).compile().as_text()
  exchanges = sum(len(phase.routes) for phase in runner.schedule.phases)
  assert len(re.findall(r" collective-permute(?:-start)?\(", text)) == exchanges == 4
  assert not re.findall(r" all-to-all\(.*/while/", text)
  assert len(re.findall(r"/while/.*ppermute", text)) >= exchanges  # what is in a loop says so


def temporary_bytes(schedule: str, microbatches: int) -> int:
  larger = make_program(**SMALL | {"model__seq_len": 64, "model__width": 64})
  runner = strategy("pipeline", larger, 4, pipeline__schedule=schedule, pipeline__microbatches=microbatches)
  return runner.lower_train_step(4 * microbatches).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.full
def test_memory_of_1f1b_stays_flat_where_gpipe_grows():
  """Goes from M = 2 S, where 1f1b holds one microbatch less than gpipe, to M = 8 S. Microbatches are the same size."""
  (gpipe, gpipe_more), (ours, ours_more) = ([temporary_bytes(s, m) for m in (8, 32)] for s in ("gpipe", "1f1b"))
  assert ours_more < 1.05 * ours
  assert gpipe_more > 2.5 * gpipe
  assert ours < gpipe


@pytest.mark.full
@pytest.mark.parametrize("name, images", [("pipeline", False), ("three_d", True)])
def test_weight_units_compute_the_gradients_of_every_kind_of_model(name: str, images: bool):
  """With segments, dropout, images and remat. The reference is a single device."""
  found = []
  for runner in (in_weight_units(name, images, False), strategy("single", trained_on(images))):
    batch = runner.shard(random_batch(trained_on(images), BATCH), BATCH)
    state, metrics = runner.train_step(initial_state(runner), batch)
    found.append(jax.device_get((metrics["loss"], state.opt_state[0].mu)))  # the gradients times (1 − b1)
  assert_trees_close(*found, PARITY)


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_every_layer_affects_the_loss(schedule: str):
  """Changing one layer's weights changes the training and the evaluation loss by as much as on a single device."""
  small = make_program(**SMALL)
  ours, single = pipeline(schedule, 4, "stage", small), strategy("single", small)
  batch, state = random_batch(small, BATCH), jax.device_get(single.init(seed=0))
  losses_of = []  # (training, evaluation) of the original, then of each changed layer
  for layer in [None, *range(small.sizes.depth)]:
    changed = jax.tree.map(lambda w: w.copy(), state)
    if layer is not None:
      changed.params["blocks"]["attention"]["value"][layer] *= 20
    losses = []
    for runner in (ours, single):
      placed = jax.device_put(changed, runner.state_sharding)
      trained = runner.gradients(placed, runner.shard(batch, BATCH))[0]["loss"]
      evaluated = runner.eval_step(placed, runner.shard(batch, BATCH))
      losses.append((float(trained), float(evaluated["loss"] / evaluated["count"])))
    assert losses[0] == pytest.approx(losses[1], rel=PARITY)
    losses_of.append(losses[0])
  for changed_losses in losses_of[1:]:
    assert abs(np.array(changed_losses) / np.array(losses_of[0]) - 1).min() > 10 * PARITY


@pytest.mark.parametrize("stages, chunks", each_once([2, 3, 4], [2, 3, 4, 6]))
def test_regroup_assigns_the_layers_to_stages_in_turn(stages: int, chunks: int):
  """Chunk c of stage s is group c · S + s of the layers, also if neither number divides the other."""
  mesh = jax.make_mesh((stages,), ("stage",), devices=jax.devices()[:stages], axis_types=(jax.sharding.AxisType.Auto,))
  layers = np.arange(2.0 * stages * chunks, dtype=np.float32)
  of_stage = lambda w: regroup(w, stages, chunks)[None]
  assign = jax.jit(jax.shard_map(of_stage, mesh=mesh, in_specs=P("stage"), out_specs=P("stage"), check_vma=False))
  expected = layers.reshape(chunks, stages, 2).swapaxes(0, 1)
  np.testing.assert_array_equal(assign(layers), expected)
  (back,) = jax.linear_transpose(assign, layers)(expected)
  np.testing.assert_array_equal(back, layers)


@pytest.mark.parametrize(
  "name, fields, parts",
  [
    ("pipeline", {"pipeline__schedule": "1f1c"}, ["pipeline.schedule='1f1c'", "did you mean '1f1b'"]),
    ("pipeline", {"mesh__stage": 8}, ["mesh.stage=8", "model.depth=4", "2 or 4"]),
    (
      "pipeline",
      {"pipeline__schedule": "interleaved", "pipeline__chunks": 2},
      ["mesh.stage=4 × pipeline.chunks=2", "model.depth=4", "1 or 2"],
    ),
    ("pipeline", {"pipeline__microbatches": 0}, ["pipeline.microbatches=0"]),
    ("pipeline", {"model__remat": "offload"}, ["model.remat='offload'", "'full'"]),
    ("pmap_ddp", {"optimizer__on_host": True}, ["optimizer.on_host=True", "strategy='data_parallel'"]),
    ("fsdp", {"gather": "often"}, ["gather='often'", "part"]),
    ("pipeline", {"pipeline__schedule": "interleaved", "pipeline__chunks": -1}, ["pipeline.chunks=-1"]),
    ("pipeline", {"pipeline__schedule": "zero_bubble", "pipeline__chunks": 2}, ["pipeline.chunks=2", "'zero_bubble'"]),
    (
      "three_d",
      {"pipeline__schedule": "interleaved", "pipeline__microbatches": 7, "pipeline__chunks": 2},
      ["pipeline.microbatches=7", "mesh.stage=2", "8"],
    ),
  ],
)
def test_mistakes_get_one_sentence(name: str, fields: dict, parts: list[str]):
  with one_sentence(*parts):
    strategy(name, make_program(**{"model__depth": 4} | fields), **fields)


@pytest.mark.full
@pytest.mark.parametrize("param_dtype, schedule", [("float32", "1f1b"), ("bfloat16", "zero_bubble")])
def test_bfloat16_trains_and_generates(param_dtype: str, schedule: str):
  """Losses agree to 2%, because bfloat16 has 8 significant bits. Mainly tests that the programs compile and run."""
  half = make_program(**SMALL | {"model__dtype": "bfloat16", "model__param_dtype": param_dtype})
  runners = [strategy("pipeline", half, pipeline__schedule=schedule), strategy("single", half)]
  batch, prompt = random_batch(half, BATCH), np.array([[1, 2, 3]], np.int32)
  losses = [float(r.gradients(initial_state(r), r.shard(batch, BATCH))[0]["loss"]) for r in runners]
  assert losses[0] == pytest.approx(losses[1], rel=0.02)
  options = {"length": 5, "seed": 0, "temperature": 0.0}
  ours, expected = (np.asarray(r.writing.generate(initial_state(r).params, prompt, **options)) for r in runners)
  np.testing.assert_array_equal(ours, expected)


def test_a_batch_that_does_not_split_into_microbatches_is_refused():
  runner = pipeline("1f1b", 8)
  with one_sentence("batch_size=20", "8 (pipeline.microbatches)", "use 16"):
    runner.check_batch("batch_size", 20)


def test_fewer_microbatches_than_stages_give_a_warning_with_the_bubble():
  with pytest.warns(UserWarning, match=r"pipeline.microbatches=2 is fewer than mesh.stage=4.* 60% of the time"):
    runner = pipeline("1f1b", 2)
  assert math.isclose(runner.schedule.idle_time(), 3 / 5)


def test_interleaved_uses_two_chunks_if_the_depth_allows():
  assert pipeline("interleaved", 8).schedule.chunks == 2
  shallow = make_program(model__depth=4)
  with pytest.warns(UserWarning, match=r"nothing to interleave.*model\.depth=4.*mesh\.stage=4.*multiple of 8"):
    runner = strategy("pipeline", shallow, pipeline__schedule="interleaved")
  assert runner.schedule.chunks == 1


def test_describe_names_the_schedule():
  assert pipeline("1f1b", 8).describe("pipeline") == (
    "pipeline on mesh stage=4 × data=2; batch over data, layers over stage; schedule 1f1b, 8 microbatches: bubble 27%"
  )


@pytest.mark.full
@pytest.mark.parametrize("version, attention", [((0, 10, 2), "plain"), ((0, 12, 0), "splash")])
def test_devices_that_share_a_stage_have_no_kernel_where_the_tpu_compiler_aborts(
  version: tuple[int, ...], attention: str, monkeypatch: pytest.MonkeyPatch
):
  """Training and the planner agree on it. Stages of one device, or of several with own examples, keep the kernel."""
  monkeypatch.setattr(jax, "__version_info__", version)
  fields = {"model__seq_len": 128, "model__depth": 4, "batch_size": 32}
  program = settings.program(config("three_d", **fields), "tpu")
  assert program.sizes.attention == "splash"
  for name, expected in (("three_d", attention), ("pipeline", "splash")):
    layout = resolve(strategies.layout_of(name), 8, {})
    with warnings.catch_warnings(record=True) as warned:
      warnings.simplefilter("always")
      runner = strategies.build(config(name, **fields), layout, program, abstract_mesh(layout))
    assert runner.program.sizes.attention == expected
    assert any("runs as 'plain'" in str(each.message) for each in warned) == (expected == "plain")
    plans = search.search(program.sizes, 32, machine_of("v5e:2x4"), [name])
    assert {plan.case.sizes.attention for plan in plans if plan.case.schedule} >= {expected}


def test_experts_in_stages_that_tensor_parallelism_splits_are_refused_where_the_tpu_compiler_fails(
  monkeypatch: pytest.MonkeyPatch,
):
  """It would end the process. Tests compile them for CPUs, GPUs and newer TPU compilers."""
  layout = (strategies.layout_of("three_d") | strategies.layout_of("expert")).on(stage=2, data=1, expert=2, model=2)
  mixture, dense = (make_program(model__experts=experts).sizes for experts in (8, 0))
  monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
  with one_sentence("model.experts=8", "mesh.model=2", "use Python 3.12 or later, or mesh.model=1"):
    check_compiler(layout, mixture, "tpu")
  check_compiler(layout, dense, "tpu")
  check_compiler(layout, mixture, "gpu")
  check_compiler(layout.on(expert=4, model=1), mixture, "tpu")
  monkeypatch.setattr(jax, "__version_info__", (0, 12, 0))
  check_compiler(layout, mixture, "tpu")
