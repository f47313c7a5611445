"""docs/choosing-sizes.md: its inequalities are the planner's formulas, and it quotes what is refused."""

import types

import pytest
from helpers import one_sentence

import strategies
from lab.analysis import topology
from lab.benchmarks import pages, sizes
from lab.benchmarks.sizes import OfWidth, Problem
from strategies.execution.mesh import make_mesh, resolve

TEXT = " ".join(sizes.PAGE.read_text().split())
named = pytest.mark.parametrize("problem", sizes.PROBLEMS, ids=lambda one: f"{one.name} {one.topology}")


def test_the_page_shows_the_table():
  page = sizes.PAGE.read_text()
  assert pages.fill(page, sizes.parts()) == page


@named
def test_an_inequality_says_what_the_planners_formulas_say(problem: Problem):
  if isinstance(problem, OfWidth):
    assert problem.most() == pytest.approx(problem.by_plan_most(), rel=0.02)  # which counts embedding and head, too
  else:
    assert problem.least() == pytest.approx(problem.by_plan(), rel=1e-3)


@named
def test_more_tokens_or_fewer_devices_leave_more_time_to_arithmetic(problem: Problem):
  few, enough, many = problem.shares()
  if isinstance(problem, OfWidth):
    assert few > enough > many
  else:
    assert few < 0.35 < enough <= many
    assert many > 0.6


def test_the_factors_of_the_text_are_those_of_theory():
  """Bytes of a weight, and of a number of the stream in each block, in bfloat16 and before the share of a ring."""
  per_weight = {one.name: 6 * one.factor for one in sizes.PROBLEMS if not one.mesh and not isinstance(one, OfWidth)}
  assert per_weight == {"data_parallel": pytest.approx(4), "fsdp": 6}


def test_several_slices_are_refused_as_the_page_says():
  with one_sentence("topology='2xv5e:4x8' is not valid"):
    topology.machine_of("2xv5e:4x8")
  assert "`topology='2xv5e:4x8' is not valid`" in TEXT
  devices = [types.SimpleNamespace(slice_index=i // 6) for i in range(12)]
  with one_sentence("cannot be laid out over 2 slices"):
    make_mesh(resolve(strategies.layout_of("hsdp"), 12, {"replica": 3}), devices)
  assert "`cannot be laid out over 2 slices`" in TEXT


def test_explain_says_of_real_slices_what_the_page_quotes():
  said = (pages.ROOT / "tools/explain.py").read_text()
  assert "spans several slices, but the times assume the links within one" in said
  assert "`replica spans several slices, but the times assume the links within one`" in TEXT
