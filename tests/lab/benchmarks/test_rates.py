"""The fit of what steps take: its record, the constants made from it, and that a row is predicted from others alone."""

import dataclasses
import json

import pytest

from lab.analysis.reached import RATES
from lab.analysis.roofline import Roofline
from lab.benchmarks import published, rates

RECORD = json.loads(rates.RECORD.read_text())
OFF = {row["what"]: row["expected"] / row["seconds"] - 1 for row in RECORD["rows"]}


@pytest.mark.parametrize("platform", RATES)
def test_the_constants_are_those_of_the_record(platform: str):
  fitted, used = RECORD["fitted"][platform], RATES[platform]
  for name in ("products", "attention", "memory"):
    assert getattr(used, name) == pytest.approx(fitted[name], abs=0.006)
  assert used.rows == fitted["rows"] == sum(r["platform"] == platform and not r["unlike"] for r in RECORD["rows"])
  assert used.start == pytest.approx(fitted["start"], abs=0.6)
  assert (used.median, used.largest) == pytest.approx((fitted["median"], fitted["largest"]), abs=0.006)


@pytest.mark.parametrize("platform", RATES)
def test_rows_are_predicted_from_the_others_within_20_percent_half_of_them_within_10(platform: str):
  fitted = RECORD["fitted"][platform]
  assert fitted["median"] <= 0.10
  assert fitted["largest"] <= 0.20


def test_every_published_row_is_there_and_one_that_is_off_has_a_reason():
  assert len(RECORD["rows"]) == 3 + len(published.ROWS) + len(published.WAYS)
  assert {row["what"] for row in RECORD["rows"] if not row["unlike"] and abs(OFF[row["what"]]) > 0.2} == set()
  assert {row["unlike"] for row in RECORD["rows"]} == {
    "", rates.NO_LOOP, published.EAGER, published.PIECES, published.RING, published.UNKNOWN,
  }  # fmt: skip


@pytest.mark.full
def test_the_record_is_what_the_fit_finds():
  found = rates.compared()
  assert [row["what"] for row in found["rows"]] == [row["what"] for row in RECORD["rows"]]
  for ours, theirs in zip(found["rows"], RECORD["rows"], strict=True):
    assert ours["expected"] == pytest.approx(theirs["expected"], rel=1e-6)
  assert found["fitted"].keys() == RECORD["fitted"].keys()


def made(group: str, compute: float, memory: float, attention: float = 0.0, factor: float = 1.0) -> rates.Row:
  """A step that takes 1.5 times its products, 3 times its attention and half of its memory traffic, times a factor."""
  times = Roofline(compute, memory, 0.0, exposed=0.25, attention=attention)
  seconds = factor * (1.5 * (compute - attention) + 3 * attention + 0.5 * memory + 0.25)
  return rates.Row(group, f"{group} {compute}", "gpu", seconds, times, times.seconds)


def test_the_fit_finds_the_constants_that_rows_were_made_with():
  found = rates.fit([made("a", 4, 1, 1), made("a", 2, 3), made("b", 5, 9, 0.5)], 3.0)
  assert (found.products, found.attention, found.memory) == pytest.approx((1.5, 3.0, 0.5))


def test_products_are_never_faster_than_the_peak():
  fast = [dataclasses.replace(made("a", compute, 1.0), seconds=0.5 * compute) for compute in (4, 8, 9)]
  assert rates.fit(fast, 3.0).products == 1.0


def test_a_row_has_no_part_in_its_own_prediction(monkeypatch: pytest.MonkeyPatch):
  """Nor have the rows of its source in the second one. Rows of other programs than ours have a part in none."""
  rows = [made("a", 4, 1, 1), made("a", 2, 3, factor=1.3), made("b", 5, 9, 0.5), made("c", 7, 2)]
  odd = dataclasses.replace(made("d", 3, 1, factor=4), unlike="another program")
  monkeypatch.setattr(rates, "others", lambda *_: [])

  def predicted(*rows: rates.Row) -> list[tuple[float, float]]:
    monkeypatch.setattr(rates, "ours", lambda: [*rows, *(dataclasses.replace(row, platform="tpu") for row in rows)])
    return [(row["expected"], row["from_other_sources"]) for row in rates.compared()["rows"]]

  before = predicted(*rows, odd)
  changed = predicted(dataclasses.replace(rows[0], seconds=9 * rows[0].seconds), *rows[1:], odd)
  assert changed[0] == before[0]  # its own
  assert changed[1][0] != before[1][0]
  assert changed[1][1] == before[1][1]  # of the same source
  assert changed[2][1] != before[2][1]
  stranger = predicted(*rows, dataclasses.replace(odd, seconds=9 * odd.seconds))
  assert stranger == before
