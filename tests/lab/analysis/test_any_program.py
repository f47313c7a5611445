"""What explain says of a model that is not the Transformer equals the compiled program, where dimensions decide it."""

import collections

import jax
import pytest
from helpers import one_sentence

import strategies
from lab.analysis import any_program
from lab.analysis.compiled import compile_step
from lab.analysis.topology import machine_of
from projects.convnet.config import get_config
from runtime.devices import has_gpu_compiler
from strategies import Strategy
from tools import explain
from training import settings

BATCH = 64


def make(name: str, devices: list[jax.Device] | None = None, platform: str = "cpu") -> Strategy:
  config = get_config()
  config.strategy, config.own.widths = name, (16, 32)
  return strategies.create(config, settings.program(config, platform), devices or jax.devices())


def by_kind(rows: list) -> dict[str, float]:
  found = collections.Counter[str]()
  for row in rows:
    found[row.kind] += row.sent_in_step if hasattr(row, "sent_in_step") else row.bytes
  return found


def test_weights_are_gathered_as_theory_says_and_a_device_holds_what_it_predicts():
  runner = make("fsdp")
  step, theory = compile_step(runner, BATCH), by_kind(any_program.sent(runner))
  compiled, predicted = by_kind(step.collectives()), any_program.memory(runner)
  assert compiled["all-gather"] == theory["all-gather"] > 0
  # The CPU's compiler writes scatters as all-reduces. It also sums the statistics of batches.
  gradients = 2 * theory["reduce-scatter"] + theory["all-reduce"]
  assert gradients < compiled["all-reduce"] < 1.1 * gradients
  held = sum(shard.data.nbytes for x in jax.tree.leaves(runner.init(0)) for shard in x.addressable_shards[:1])
  assert predicted["parameters"] + predicted["optimizer"] == held - 4  # the number of the step


@pytest.mark.full
@pytest.mark.skipif(not has_gpu_compiler(), reason="needs the compiler for GPUs: make .venv/.compilers")
@pytest.mark.parametrize("name", ["fsdp", "zero1", "hsdp", "data_parallel"])
def test_bytes_on_gpus_are_those_of_theory(name: str):
  runner = make(name, machine_of("h100:1x8", None).devices(), "gpu")
  compiled, theory = by_kind(compile_step(runner, BATCH).collectives()), by_kind(any_program.sent(runner))
  for kind in ("all-gather", "reduce-scatter"):
    assert compiled[kind] == pytest.approx(theory[kind], abs=1)
  assert theory["all-reduce"] <= compiled["all-reduce"] < theory["all-reduce"] + 60_000  # statistics of batches


def test_the_page_of_explain_says_what_it_does_not_know():
  runner = make("data_parallel")
  found = explain.explain("data_parallel", runner, 16, compiled=False)
  assert any_program.NOT_KNOWN in explain.text(found, runner)
  with one_sentence("model.name='convnet'"):
    runner.program.sizes  # noqa: B018 - as --html asks
