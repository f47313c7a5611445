"""The command that simulates jobs with failures: its inputs, policies and search, what it prints, and mistakes."""

import dataclasses
import html
import json
import math
import re
from pathlib import Path

import pytest
from helpers import one_sentence

from checkpointing.interval import best_interval, duration, expected_seconds
from lab.analysis.failures import KINDS, PUBLISHED, Job, Outcome, Policy, Rates, Tier
from lab.benchmarks.pages import ROOT
from lab.failure_inputs import DAY, HOUR, inputs
from lab.failure_policies import NAMES, Times, policy_of, result_of, rhythm_of, search, shares, spares_for
from tools import failures
from tools.failures import UNITS

TIMES = Times(copy=1, write=40, restore=100, send=0.5, fetch=2, step=5)
JOB = Job(16_384, 10 * DAY, PUBLISHED["llama3"], start=600, repair=DAY)
FAST = ["--days=5", "--seeds=2"]


def test_a_policys_name_says_how_it_saves_and_replaces_hosts():
  assert policy_of("storage+wait", TIMES, 3) == Policy(Tier(41, 0, 100))
  assert policy_of("background+spares", TIMES, 3) == Policy(Tier(1, 40, 100), spares=3)
  assert policy_of("memory+elastic", TIMES, 3) == Policy(Tier(1, 40, 100), Tier(1, 0.5, 2), elastic=True)
  assert len({policy_of(name, TIMES, 3) for name in NAMES}) == len(NAMES) == 9


@pytest.mark.parametrize("pause", [5.0, 60.0])
def test_the_search_finds_the_best_interval_of_dalys_equation(pause: float):
  """Where both hold, a job with the found interval takes at most 0.1% longer than with the best one."""
  job = Job(16_384, 40 * DAY, Rates(other=16_384 * 3), start=0, repair=0)
  policy, times = Policy(Tier(pause, 0, 300)), Times(0, 0, 0, 0, 0, step=1)
  found = search(job, policy, times, seeds=4)
  assert best_interval(pause, job.mtbf) == pytest.approx(found, rel=0.2)
  time = lambda interval: expected_seconds(40 * DAY, interval, pause, job.mtbf, 300)
  assert time(found) < 1.001 * time(best_interval(pause, job.mtbf))


def test_an_interval_is_at_least_a_step_and_the_time_to_write():
  policy = policy_of("background+spares", TIMES, 14)
  slow = dataclasses.replace(TIMES, write=4000)
  assert search(JOB, policy_of("background+spares", slow, 14), slow, seeds=1) >= 4000
  assert search(JOB, policy, TIMES, seeds=1) == pytest.approx(best_interval(1, JOB.mtbf), rel=0.3)
  assert search(JOB, policy, dataclasses.replace(TIMES, step=1000), seeds=1) >= 1000


def test_saves_to_storage_are_rare_if_memory_has_copies():
  policy = policy_of("memory+spares", TIMES, 14)
  rhythm = rhythm_of(JOB, policy, 100)
  assert 1000 < rhythm.interval * rhythm.to_storage < 10 * DAY
  assert rhythm_of(JOB, policy_of("background+spares", TIMES, 14), 100).to_storage == 1
  safe = Job(16_384, 10 * DAY, Rates(other=1e5), start=600, repair=DAY)  # no host is ever lost
  assert rhythm_of(safe, policy, 100).to_storage == 10 * DAY / 100


def test_more_is_better():
  """Copies in memory beat saves in the background, which beat waiting for storage. Waiting for repairs is worst."""
  goodput = {name: result_of(name, JOB, TIMES, spares_for(JOB), seeds=2).goodput for name in NAMES}
  for hosts in ("wait", "spares", "elastic"):
    assert goodput[f"storage+{hosts}"] < goodput[f"background+{hosts}"] < goodput[f"memory+{hosts}"]
  assert goodput["memory+wait"] < 0.5 < goodput["storage+spares"]


def test_defaults_scale_with_the_state_of_a_device():
  published = inputs(8960, DAY, 405e9).times
  assert (published.copy, published.copy + published.write, published.restore) == pytest.approx((0.59, 51.06, 129.49))
  half = inputs(17_920, DAY, 405e9).times
  assert (half.copy, half.write, half.restore) == pytest.approx((0.295, 50.47 / 2, 129.49 / 2))
  stored = inputs(16_000, DAY, 100e9, storage=0.5e9).times
  assert stored.write == stored.restore == pytest.approx(12 * 100e9 / 2000 / 0.5e9)  # bytes of a host at 0.5 GB/s


def test_every_input_can_be_given_and_says_its_source():
  found = inputs(16_384, DAY, 405e9)
  assert list(found.values) == list(UNITS)
  for value in found.values.values():
    assert re.match(r"published: .*\(arXiv:\d{4}\.\d{5}\)|predicted: |assumed: ", value.source)
  given = inputs(16_384, DAY, 405e9, spares=5, given=dict.fromkeys(UNITS, 1234.0))
  assert {(value.seconds, value.source) for value in given.values.values()} == {(1234.0, "given")}
  assert (given.job.start, given.job.repair, given.spares) == (1234, 1234, 5)
  assert {given.times.copy, given.times.write, given.times.restore, given.times.fetch, given.times.step} == {1234}
  assert given.job.rates == Rates(1234 / HOUR, 1234 / HOUR, 1234 / HOUR)


def test_the_command_prints_shares_that_add_up(capsys: pytest.CaptureFixture):
  failures.main(["--devices=16384", "--mtbf=50000", *FAST])
  printed = capsys.readouterr().out
  assert "16,384 devices in 2,048 hosts" in printed
  assert re.search(r"^mtbf +5\.71 years .* given$", printed, re.MULTILINE)
  rows = [line for line in printed.splitlines() if line.startswith(tuple(NAMES))]
  assert [row.split()[0] for row in rows] == NAMES
  for row in rows:
    percents = [float(share) for share in re.findall(r"([\d.]+)%", row)]
    assert len(percents) == len(KINDS) + 1  # and the standard error
    assert sum(percents[:-1]) == pytest.approx(100, abs=0.04)  # each is rounded


def test_equal_commands_print_equal_tables(capsys: pytest.CaptureFixture):
  for _ in range(2):
    failures.main(["--policies=memory+elastic", *FAST])
  printed = capsys.readouterr().out
  assert printed[: len(printed) // 2] == printed[len(printed) // 2 :]


def test_the_page_has_a_curve_for_each_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(failures, "SIZES", (1000, 10_000))
  file = tmp_path / "failures.html"
  failures.main(["--policies=background+spares,memory+spares,memory+elastic", f"--html={file}", *FAST])
  page = file.read_text()
  charts = [json.loads(html.unescape(data)) for data in re.findall(r'data-chart="(.*?)"', page)]
  drawn = {line["name"]: line["points"] for chart in charts for line in chart["series"]}
  assert [[line["name"] for line in chart["series"]] for chart in charts] == [
    ["background+spares", "memory+spares"], ["memory+elastic"],
  ]  # fmt: skip
  for points in drawn.values():
    (few, good), (many, less) = points
    assert (few, many) == (1000, 10_000)
    assert 1 > good > less > 0.8
  for word in (*KINDS, "arXiv:2407.21783", "9.04 years"):
    assert word in page


def test_shares_of_several_runs_weigh_them_by_their_time():
  short, long = (dict.fromkeys(KINDS, 0.0) | {kind: 1.0} for kind in ("down", "training"))
  found = shares([Outcome(100, 0, short), Outcome(300, 0, long)])
  assert found == dict.fromkeys(KINDS, 0.0) | {"down": 0.25, "training": 0.75}


@pytest.mark.parametrize("argument, parts", [
  ("--devices=0", ["devices=0", "at least 1"]),
  ("--devices=12", ["devices=12", "multiple of 8"]),
  ("--devices=8", ["devices=8", "at least 16"]),
  ("--mtbf=1e-300", ["devices=16384", "every 2.2e-301 s", "use fewer", "larger mtbf"]),
  ("--days=0", ["days=0", "above 0", "54"]),
  ("--params=-1", ["params=-1", "above 0"]),
  ("--storage=0", ["storage=0", "above 0"]),
  ("--spares=0", ["spares=0", "at least 1"]),
  ("--seeds=0", ["seeds=0", "at least 1"]),
  ("--rates=lama3", ["rates='lama3'", "did you mean 'llama3'?"]),
  ("--policies=memory+spare", ["policies='memory+spare'", "did you mean 'memory+spares'?"]),
  ("--policies=", ["policies=''", "use one of"]),
  ("--start=-1", ["start=-1", "above 0"]),
  ("--repair=inf", ["repair=inf", "finite"]),
  ("--step=nan", ["step=nan", "above 0"]),
  *[(f"--{name}=0", [f"{name}=0", "above 0"]) for name in UNITS],
])  # fmt: skip
def test_a_mistake_is_one_sentence(argument: str, parts: list[str]):
  with one_sentence(*parts):
    failures.main([*FAST, argument])


def test_a_page_that_cannot_be_written_is_a_mistake(tmp_path: Path):
  with one_sentence("html=", "folder"):
    failures.main([f"--html={tmp_path}", *FAST])


def test_durations_have_a_unit_that_suits_them():
  assert [duration(s) for s in (0.329, 84.6, 750, 3.09 * HOUR, 54 * DAY, 9.04 * 365 * DAY, math.inf)] == [
    "0.329 s", "84.6 s", "12.5 min", "3.09 h", "54 days", "9.04 years", "never",
  ]  # fmt: skip


def test_the_page_of_the_guide_shows_what_the_command_prints(capsys: pytest.CaptureFixture):
  """Two of its rows, and the heading."""
  page = (ROOT / "docs" / "failures.md").read_text()
  shown = [line.split() for line in page.partition("<!-- table -->")[2].partition("<!-- end -->")[0].splitlines()]
  failures.main(["--devices=16384", "--policies=storage+spares,memory+elastic"])
  printed = [line.split() for line in capsys.readouterr().out.splitlines()]
  rows = [line for line in printed if line and (line[0] in NAMES or line[0] == "policy")]
  assert len(rows) == 3
  assert [row for row in rows if row not in shown] == []
  assert {row[0] for row in shown if row} >= set(NAMES)
