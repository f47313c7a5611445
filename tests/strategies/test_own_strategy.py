"""A user's own strategy is one file. It is found without registration, and it equals a single device."""

import collections
import dataclasses
import functools
import importlib.util
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from golden.make_explain import TPU_FIELDS
from helpers import (
  PARITY,
  assert_trees_close,
  config,
  in_full,
  initial_state,
  one_sentence,
  program,
  random_batch,
  strategy,
)

import strategies
from configs import base
from lab.analysis import predict, theory
from lab.analysis.case import Case
from lab.analysis.compiled import compile_step
from lab.analysis.topology import machine_of
from models.ops import attention
from runtime.devices import has_gpu_compiler
from strategies.execution.mesh import resolve
from strategies.layout import Layout
from tools import explain
from training.program import Params, Program

BATCH = 16
IMPORTS = """from strategies.data_parallel import LAYOUT as DATA_PARALLEL
from strategies.layout import Layout
"""
OWN = {
  # Shards the vocabulary only, so every device computes all blocks.
  "own_vocab": 'Layout(mesh={"model": -1}, vocab="model")',
  # Shards one dimension of the weights over two mesh axes.
  "own_embed": 'Layout(mesh={"data": -1, "model": 2}, batch=("data", "model"), embed=("data", "model"))',
  # Splits the optimizer's state over the replicas too.
  "own_state": 'Layout(mesh={"replica": 2, "data": -1}, batch=("replica", "data"), embed="data", '
  'state=("data", "replica"))',
  # Splits the weights over an axis that sums gradients by hand, and over one that does not.
  "own_mixed": 'Layout(mesh={"replica": 2, "data": 2, "model": -1}, batch=("replica", "data"), '
  'embed=("data", "model"))',
  # Shards the vocabulary over devices that compute the same blocks, beside data parallelism.
  "own_rows": '(DATA_PARALLEL | Layout(mesh={"model": 2}, vocab="model")).on(data=-1)',
  # Has mesh axes that no other strategy has.
  "own_axes": 'Layout(mesh={"x": 2, "fsdp": -1}, batch=("x", "fsdp"), embed="fsdp")',
}


@pytest.fixture(autouse=True)
def own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
  """Adds the strategies of `OWN` to the package `strategies`, each as a file."""
  for name, layout in OWN.items():
    (tmp_path / f"{name}.py").write_text(f"{IMPORTS}\nLAYOUT = {layout}\n")
  monkeypatch.setattr(strategies, "__path__", [*strategies.__path__, str(tmp_path)])


def small() -> Program:
  return program(model__depth=2, model__mlp_width=64, model__seq_len=16, model__dropout=0.1)


@functools.cache
def gradients_of_single() -> Params:
  return gradients("single")


def gradients(name: str, **fields: Any) -> Params:
  runner = strategy(name, dataclasses.replace(small(), **fields.pop("program", {})), **fields)
  batch = runner.shard(random_batch(runner.program, BATCH), BATCH)
  return jax.device_get(runner.gradients(initial_state(runner), batch)[1])


@pytest.mark.parametrize("name", in_full(OWN, "own_axes"))
def test_one_file_is_a_strategy_that_equals_a_single_device(name: str):
  assert name in strategies.names()
  assert_trees_close(gradients(name), gradients_of_single(), PARITY)


@pytest.mark.full
def test_it_sums_its_gradients_once_a_step():
  in_parts = {"program": {"accumulation": 2}}
  expected = gradients("single", **in_parts)
  assert_trees_close(gradients("own_mixed", **in_parts), expected, PARITY)
  assert_trees_close(gradients("own_mixed", gather="step", **in_parts), expected, PARITY)


@pytest.mark.full
@pytest.mark.parametrize("topology", [None, "v5e:2x4", "h100:1x8"])
def test_devices_that_compute_the_same_blocks_send_nothing_about_them(
  topology: str | None, monkeypatch: pytest.MonkeyPatch
):
  """Each calls attention's kernel on the same arrays, so their gradients are the same, and no sum is needed."""
  if topology and not (has_gpu_compiler() if topology.startswith("h100") else importlib.util.find_spec("libtpu")):
    pytest.skip("the compiler is not installed; make test-topology")
  monkeypatch.setattr(attention, "KERNELS", attention.KERNELS | {"blockwise"})  # called on each device's own part
  asked, where = base.get_config("tiny", "own_rows"), machine_of(topology) if topology else None
  asked.update_from_flattened_dict(TPU_FIELDS | {"model.attention": "auto" if where else "blockwise"})
  runner, ours, wanted = explain.create(asked, where), collections.Counter(), collections.Counter()
  for row in compile_step(runner, BATCH).collectives():
    ours[row.kind, row.axes] += row.sent_in_step
  for row in theory.sent(Case.of(runner, BATCH, runner.mesh.devices.flat[0].platform)):
    wanted[row.kind, row.axes] += row.bytes
  assert ours == {what: pytest.approx(sent, rel=1e-6, abs=512) for what, sent in wanted.items()}


@pytest.mark.full
def test_compiled_flops_equal_the_prediction_from_the_layout():
  """The prediction for `own_vocab` includes the blocks on every device. In `own_mixed` the compiler splits products."""
  for name in OWN.keys() - {"own_mixed"}:
    runner = strategy(name, small())
    assert compile_step(runner, BATCH).flops() == predict.flops(Case.of(runner, BATCH, "cpu"))


def test_own_mesh_axes_follow_the_canonical_ones():
  layout = Layout(mesh={"x": 2, "model": 2, "fsdp": -1, "data": 1}, embed="fsdp", heads="model")
  assert list(layout.mesh) == ["data", "model", "x", "fsdp"]
  assert resolve(strategies.layout_of("own_axes"), 8, {"x": 4}).mesh == {"x": 4, "fsdp": 2}
  with one_sentence("mesh.fsdp=2", "no 'fsdp' axis", "data"):
    resolve(strategies.layout_of("fsdp"), 8, {"fsdp": 2})


@pytest.mark.full
def test_initial_state_equals_single_device_bitwise():
  states = [jax.device_get(strategy(name, small()).init(seed=3)) for name in ("own_axes", "single")]
  jax.tree.map(np.testing.assert_array_equal, *states)


def test_it_needs_no_config_file():
  asked = config("own_axes")
  assert (
    strategies.create(asked, small(), jax.devices()).describe("own_axes").startswith("own_axes on mesh x=2 × fsdp=4")
  )
