"""What a step is expected to take: the parts of the roofline, one after another, at the rates that devices reach."""

import pytest

from lab.analysis.reached import RATES, Rates
from lab.analysis.roofline import Roofline

SLOW = Rates(
  products=1.5, attention=3.0, memory=0.5, start=60.0, kinds=("NVIDIA H100",), rows=4, median=0.1, largest=0.2
)


def test_kernels_run_one_after_another():
  assert SLOW.seconds(Roofline(compute=6, memory=4, communication=0, attention=2)) == 1.5 * 4 + 3 * 2 + 0.5 * 4


def test_exposed_communication_and_the_waits_of_stages_are_added():
  times = Roofline(compute=4, memory=2, communication=9, exposed=3, idle=0.5)
  assert SLOW.seconds(times) == (1.5 * 4 + 0.5 * 2) / 0.5 + 3


def test_the_link_to_the_host_runs_beside_kernels_and_then_the_update():
  times = Roofline(compute=2, memory=2, communication=0, host=7, update=1)
  assert SLOW.seconds(times) == 6 + 1
  assert SLOW.seconds(Roofline(compute=2, memory=2, communication=0, host=3, update=1)) == 4 + 1


@pytest.mark.parametrize("times", [Roofline(0.1, 5.0, 0.0), Roofline(3.0, 1.0, 2.0, 2.0, idle=0.3, attention=1.0)])
@pytest.mark.parametrize("platform", RATES)
def test_a_step_is_never_faster_than_at_best(platform: str, times: Roofline):
  assert RATES[platform].seconds(times) >= times.seconds


def test_it_says_what_it_rests_on():
  assert SLOW.described("NVIDIA H100 80GB HBM3") == (
    "fitted to 4 measured steps on NVIDIA H100, half of them within 10% and all within 20% if predicted from the others"
  )
  assert SLOW.described("NVIDIA B200").endswith(". None was measured on NVIDIA B200")
