"""Devices that do not divide the model or the batch: every strategy still equals a single device.

3, 5, 6, 7 and 12 divide neither width nor vocabulary, stages do not divide the depth, and the batch has 16 examples.
"""

import functools
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import (
  PARITY,
  assert_trees_close,
  assert_writes_as,
  config,
  in_full,
  initial_state,
  random_batch,
  unpadded,
)
from parting import explained
from variants import MICROBATCHES, VARIANTS, make_program

import strategies
from errors import ConfigError
from strategies.execution.mesh import OnMesh, resolve
from strategies.execution.padding import Stored, stored_shape
from strategies.execution.stages.staged import check_depth
from strategies.execution.strategy import Strategy
from strategies.layout import Layout
from training.program import Params, Program

BATCH, STEPS = 16, 3
SIZES = {
  "model__width": 64, "model__vocab_size": 97, "model__depth": 5, "model__head_dim": 4, "model__seq_len": 12,
}  # fmt: skip
# The counts that each strategy splits its mesh into. Heads and hidden widths must divide, so they follow the mesh.
MESHES: dict[str, dict[int, dict[str, int]]] = {
  "fsdp": {3: {}, 5: {}, 6: {}, 7: {}, 12: {}},
  "zero1": {3: {}, 5: {}, 6: {}, 7: {}, 12: {}},
  "zero2": {3: {}, 5: {}, 6: {}, 7: {}, 12: {}},
  "data_parallel": {3: {}, 7: {}},
  "pmap_ddp": {3: {}, 7: {}},
  "hsdp": {3: {"replica": 1}, 5: {"replica": 1}, 6: {}, 7: {"replica": 7}, 12: {}},
  "tensor_parallel": {3: {}, 5: {}, 6: {}, 7: {}, 12: {}},
  "two_d": {3: {"model": 3}, 5: {"model": 1}, 6: {"model": 2}, 7: {"model": 7}, 12: {"model": 3}},
  "three_d": {6: {"stage": 3, "model": 2}, 7: {"stage": 1, "model": 1}, 12: {"stage": 2, "model": 3}},
  "pipeline": {3: {"stage": 3}, 5: {"stage": 1}, 6: {"stage": 2}, 7: {"stage": 1}, 12: {"stage": 3}},
  "expert_fsdp": {3: {"expert": 3}, 5: {"expert": 5}, 6: {"expert": 3}, 7: {"expert": 1}, 12: {"expert": 6}},
  "long_context": {3: {"context": 3}, 5: {"context": 1}, 6: {"context": 2}, 7: {"context": 1}, 12: {"context": 2}},
}
# In `make test`, which must stay short: by the compiler, by hand, in stages, and each dimension that may be uneven.
IN_SHORT = {"fsdp": (7,), "zero1": (7,), "two_d": (6,), "pipeline": (6,)}
CASES = [(name, n) for name, meshes in MESHES.items() for n in meshes if n <= jax.device_count()]
OFTEN = [(name, n) for name, n in CASES if n in IN_SHORT.get(name, ())]


def program_on(name: str, devices: int, variant: str = "text", **fields: object) -> Program:
  """One whose heads and hidden width the mesh divides."""
  model = resolve(strategies.layout_of(name), devices, MESHES[name][devices]).shards("heads")
  heads = {"model__heads": 6 if 6 % model == 0 else model, "model__mlp_width": 60 if 60 % model == 0 else 7 * model}
  heads["model__kv_heads"] = heads["model__heads"]
  experts = {"model__experts": 30} if name == "expert_fsdp" else {}
  return make_program(variant, **SIZES | heads | experts | fields)


def runner_on(name: str, devices: int, program: Program) -> Strategy:
  mesh = {f"mesh__{axis}": size for axis, size in MESHES[name][devices].items()}
  return strategies.create(config(name, **MICROBATCHES, **mesh), program, jax.devices()[:devices])


@functools.cache
def alone(program: Program) -> tuple[np.ndarray, Params]:
  return run(strategies.create(config("single"), program, jax.devices()[:1]))


def run(runner: Strategy) -> tuple[np.ndarray, Params]:
  """The losses and gradient norms of some steps [steps, 2], and the gradient of the first, without padding.

  Other optimizers than Adam do not keep the gradient. What they make of it is in the next losses.
  """
  state, losses, gradients = initial_state(runner), [], None
  has_gradient = runner.program.optimizer.name == "adamw"
  for step in range(STEPS):
    batch = random_batch(runner.program, BATCH, seed=step)
    state, metrics = runner.train_step(state, runner.shard(batch, BATCH))
    if gradients is None and has_gradient:
      moment = unpadded(state.opt_state, runner.shapes.opt_state)[0].mu
      gradients = jax.tree.map(lambda m: m / (1 - runner.program.optimizer.b1), moment)
    losses.append((metrics["loss"], metrics["grad_norm"]))
  unpadded(state, runner.shapes)  # padding is still zeros
  return np.array(jax.device_get(losses)), gradients


def check(name: str, devices: int, variant: str = "text") -> None:
  """Raises AssertionError unless a strategy on so many devices equals a single device."""
  program = program_on(name, devices, variant)
  runner = runner_on(name, devices, program)
  (losses, gradients), (expected, of_one) = run(runner), alone(program)
  with explained(runner, strategies.create(config("single"), program, jax.devices()[:1]), BATCH):
    assert_trees_close(gradients, of_one, PARITY)
    np.testing.assert_allclose(losses, expected, rtol=PARITY)


@pytest.mark.parametrize("name, devices", in_full(CASES, *OFTEN))
def test_devices_that_divide_nothing_equal_a_single_one(name: str, devices: int):
  check(name, devices)


@pytest.mark.full
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "text"])
def test_every_option_works_where_devices_divide_nothing(variant: str):
  """Pieces of matrices that Muon makes whole, adapters, experts, packed documents, moments on the host and more."""
  for name, devices in (("two_d", 6), ("pipeline", 6)):
    if not (name == "pipeline" and VARIANTS[variant].get("optimizer__on_host")):
      check(name, devices, variant)


@pytest.mark.full
@pytest.mark.parametrize("name", ["zero1", "hsdp", "three_d", "expert_fsdp", "long_context"])
def test_twelve_devices_equal_a_single_one(name: str):
  """In a process of its own, because the tests have eight."""
  code = (
    "import jax, sys; jax.config.update('jax_num_cpu_devices', 12); sys.path[:0] = sys.argv[2:]; import test_padding"
  )
  here = Path(__file__).resolve().parent
  paths = map(str, (here, here.parent, here.parent.parent))
  command = [sys.executable, "-c", f"{code}; test_padding.check(sys.argv[1], 12)", name, *paths]
  done = subprocess.run(command, cwd=here.parent.parent, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr


@pytest.mark.full
@pytest.mark.parametrize("name", ["fsdp", "tensor_parallel", "pipeline"])
def test_texts_are_written_and_scored_the_same(name: str):
  program = program_on(name, 6)
  one = strategies.create(config("single"), program, jax.devices()[:1])
  assert_writes_as(runner_on(name, 6, program), one, texts=12)


@pytest.mark.full
def test_initial_weights_are_a_single_devices():
  program = program_on("fsdp", 6)
  runner, one = runner_on("fsdp", 6, program), strategies.create(config("single"), program, jax.devices()[:1])
  jax.tree.map(np.testing.assert_array_equal, unpadded(runner.init(3), runner.shapes), jax.device_get(one.init(3)))


def test_only_the_last_piece_is_padded_and_by_less_than_a_row_for_each_device():
  layout = resolve(strategies.layout_of("two_d"), 6, {"model": 3})  # embed in 2 pieces, vocab in 3
  assert stored_shape(layout, (97, 63), ("vocab", "embed")) == (99, 64)
  assert stored_shape(layout, (5, 63, 60), ("layers", "embed", "mlp")) == (5, 64, 60)
  assert stored_shape(Layout({"stage": 4}, layers="stage"), (61, 8), ("layers", None)) == (64, 8)
  assert stored_shape(layout, (96, 64), ("vocab", "embed")) == (96, 64)


def test_nothing_is_added_to_programs_where_devices_divide_all():
  """Then cutting and padding return what they are given."""
  stored = Stored(resolve(strategies.layout_of("fsdp"), 8), ("vocab", "embed"), np.zeros((3, 64)))
  x = np.zeros((3, 64))
  assert stored.pad(x) is x
  assert stored.cut(x) is x


def test_rows_that_fill_up_a_batch_are_no_examples():
  """16 examples on 7 devices: 3 rows each, and 5 of the last are empty. On 8, there are none."""
  layout = resolve(strategies.layout_of("fsdp"), 7)
  runner = runner_on("fsdp", 7, program_on("fsdp", 7))
  batch = random_batch(runner.program, BATCH)
  placed = jax.device_get(runner.shard(batch, BATCH))
  assert placed["mask"].tolist() == [True] * 16 + [False] * 5
  np.testing.assert_array_equal(placed["tokens"][:16], batch["tokens"])
  assert layout.shards("batch") == 7
  assert runner.rows(BATCH).tolist() == list(range(16))
  assert runner.abstract_batch(BATCH)["mask"].shape == (21,)
  place = OnMesh(runner.batch_sharding)
  assert [place.padded(n) for n in (1, 7, 8, 14)] == [7, 7, 14, 14]


def test_a_batch_may_not_be_mostly_empty():
  runner = runner_on("fsdp", 7, program_on("fsdp", 7))
  runner.check_batch("batch_size", 8)
  runner.check_batch("batch_size", 64, accumulation=2)
  assert runner.rows_computed(64, 2) == 70
  with pytest.raises(ConfigError, match=r"batch_size=3 is less than half of the 7 rows that 7 \(devices.*use 7"):
    runner.check_batch("batch_size", 3)
  with pytest.raises(ConfigError, match=r"batch_size=65 is not a multiple of 2 \(accumulation\); use 64"):
    runner.check_batch("batch_size", 65, accumulation=2)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
def test_stages_take_every_depth_that_leaves_none_empty(schedule: str):
  uneven = schedule in ("gpipe", "1f1b")
  for stages in range(1, 12):
    for depth in range(1, 30):
      each = -(-depth // stages)
      layers = [min(each, max(0, depth - stage * each)) for stage in range(stages)]
      works = all(layers) if uneven else len(set(layers)) == 1
      if works:
        check_depth(schedule, stages, 1, "model.depth", depth)
        continue
      with pytest.raises(ConfigError, match=rf"mesh.stage={stages} .*model.depth={depth}.*use mesh.stage=\d+") as error:
        check_depth(schedule, stages, 1, "model.depth", depth)
      for advised in str(error.value).rpartition("use mesh.stage=")[2].partition(",")[0].split(" or "):
        check_depth(schedule, int(advised), 1, "model.depth", depth)  # the advice works
      if "1f1b" in str(error.value):
        check_depth("1f1b", stages, 1, "model.depth", depth)


def test_61_layers_on_4_stages_leave_the_last_one_the_fewest():
  layout = Layout({"stage": 4}, layers="stage")
  (held,) = {stored_shape(layout, (61,), ("layers",))[0] // 4}
  assert [min(held, 61 - held * stage) for stage in range(4)] == [16, 16, 16, 13]
