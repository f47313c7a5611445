"""Plan beside the compiled step, from the record: close, or marked."""

import json

import pytest

from lab.analysis import predict
from lab.analysis.search import DOUBT, doubt, search
from lab.analysis.topology import machine_of
from lab.benchmarks import planned
from lab.benchmarks.predictions import by_formula, case_on, config
from tools import plan
from training import settings

RECORDED = {name: json.loads(file.read_text()) for name, file in planned.RECORDS.items()}
PLANS = [found for record in RECORDED.values() for found in record["plans"]]
name_of = lambda found: "-".join(map(str, found["case"][:2] + found["case"][5:6]))


@pytest.mark.parametrize("found", PLANS, ids=name_of)
def test_plans_step_is_within_a_tenth_of_the_compiled_one_or_marked(found: dict):
  ours, theirs, reason = planned.beside(found)
  assert reason or ours == pytest.approx(theirs, rel=DOUBT)


def test_plans_best_rows_are_not_marked():
  marked = {found["case"][1]: bool(planned.beside(found)[2]) for found in PLANS}
  assert marked == {"v5p:4x4x4": False, "v5p:8x8x16": False, "v6e:8x8": False, "h100:32x8": False}


@pytest.mark.parametrize("replicas, expected", [(2, ""), (32, "gradients are all-reduced for 65.3 ms")])
def test_all_reduces_that_gpus_may_wait_for_are_marked(replicas: int, expected: str):
  """The fewer pieces there are, the larger they are that copies all-reduce."""
  where = machine_of("h100:32x8")
  case = case_on(where, config(("hsdp", "h100:32x8", "7B", 4096, 256, "dots", {"mesh.replica": replicas})))
  found = doubt(case, predict.times(case, where.chip, where.links(case.layout.mesh)), where)
  assert found.startswith(expected)
  assert bool(found) == bool(expected)


@pytest.mark.full
@pytest.mark.parametrize("topology", [name for names in planned.MACHINES.values() for name in names])
def test_the_record_has_the_rows_that_plan_prints(topology: str):
  assert [found["case"] for found in PLANS if found["case"][1] == topology] == [
    list(case) for case in planned.plans(topology)
  ]


def test_strategies_send_what_theory_says_on_64_chips():
  ratios = [sum(found["sent"].values()) / by_formula(found["case"])["sent"] for found in RECORDED["tpu"]["bytes"]]
  assert all(0.99 < ratio < 1.01 for ratio in ratios)


def test_plan_marks_times_that_it_cannot_vouch_for_and_says_why():
  where = machine_of("h100:1x8")
  asked = config(("two_d", "h100:1x8", "1B", 2048, 64, "full", {}))
  sizes = settings.program(asked, "gpu").sizes
  found = search(sizes, 64, where, ["tensor_parallel", "fsdp"])
  marked = [one for one in found if one.doubt]
  assert {one.strategy for one in marked} >= {"tensor_parallel"}
  chosen = [next(one for one in found if not one.doubt), marked[0]]
  times = [row[4] for row in plan.rows_of(chosen, sizes, where, 64)[1:]]
  assert [plan.MARK in time for time in times] == [False, True]
  said = plan.doubts(chosen).splitlines()
  assert len(said) == 2
  assert said[1] == f"{plan.MARK} 2: {marked[0].doubt}."
  assert plan.doubts(chosen[:1]) == ""
