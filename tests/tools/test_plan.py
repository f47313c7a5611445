"""The planner: what it finds fits, is ordered, can be run, and is what its formulas say."""

import itertools

import pytest
from helpers import one_sentence

import strategies
from analysis import plan, predict
from configs import base
from models.config import ModelConfig
from tools import plan as tool
from training import settings

SLICE = "v5p:4x4x4"


def model(params: float = 7e9, length: int = 2048) -> ModelConfig:
  config = base.get_config("lm", "fsdp")
  config.model.update(tool.model_of(params, length))
  return settings.program(config, "tpu").model


@pytest.fixture(scope="module")
def found() -> list[plan.Candidate]:
  return plan.search(model(), 256, tool.slice_of(SLICE))


def test_all_that_is_found_fits_and_the_fastest_comes_first(found: list[plan.Candidate]):
  chip = tool.slice_of(SLICE).chip
  assert len(found) > 50
  assert all(candidate.memory <= plan.USABLE * chip.memory for candidate in found)
  assert all(a.seconds <= b.seconds for a, b in itertools.pairwise(found))
  assert {"fsdp", "hsdp", "two_d", "three_d"} <= {candidate.strategy for candidate in found}


def test_a_candidate_is_what_its_config_makes(found: list[plan.Candidate]):
  """The fields that are printed, given to train.py, are the case that was judged."""
  sizes = tool.model_of(7e9, 2048)
  for candidate in plan.best(found, 10):
    config = tool.config_of(candidate, tool.fields(candidate, sizes, 256))
    layout = strategies.layout(config.strategy).resolve(64, config.mesh)
    runner = strategies.build(config, layout, settings.program(config, "tpu"), layout.abstract_mesh())
    runner.check_batch("batch_size", config.batch_size, config.accumulation)
    case = predict.Case.of(runner, config.batch_size, "tpu")
    assert predict.memory(case).total == candidate.memory
    assert predict.flops(case) == pytest.approx(candidate.compute * tool.slice_of(SLICE).chip.flops)


def test_what_does_not_fit_is_dropped():
  """Data parallelism needs 16 bytes a parameter on each device, so 7 B do not fit into 32 GB."""
  names = {candidate.strategy for candidate in plan.search(model(), 256, tool.slice_of("v6e:8x8"))}
  assert "data_parallel" not in names
  assert "fsdp" in names


def test_more_than_fits_anywhere_leaves_nothing():
  assert plan.search(model(70e9), 64, tool.slice_of("v5e:2x2")) == []


def test_at_most_two_of_a_strategy_are_shown(found: list[plan.Candidate]):
  shown = [candidate.strategy for candidate in plan.best(found, 10)]
  assert max(map(shown.count, shown)) == 2
  assert shown[0] == found[0].strategy


def test_gathers_over_a_whole_closed_torus_cost_twice():
  """There the compiler writes them as all-reduce."""
  where = tool.slice_of(SLICE)
  assert where.is_whole([4, 4, 4])
  assert not where.is_whole([4, 4, 2])
  assert not tool.slice_of("v5e:16x16").is_whole([16, 16])


@pytest.mark.parametrize("params", [1e8, 1e9, 7e9, 70e9, 405e9])
def test_a_model_of_a_size_has_about_that_size(params: float):
  made = model(params)
  assert sum(weight.size for weight in predict.weights(made)) == pytest.approx(params, rel=0.2)


@pytest.mark.parametrize("topology", ["v5p", "v5p:8x8", "v5e:2x2x2", "h100:8"])
def test_a_slice_that_is_none_is_refused(topology: str):
  with one_sentence(f"topology={topology!r}", "sizes"):
    tool.slice_of(topology)


def test_a_size_that_no_model_has_is_refused():
  with one_sentence("params=10", "1e8"):
    tool.model_of(10, 2048)
