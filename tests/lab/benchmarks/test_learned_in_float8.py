"""What is learned in float8 is what is learned in float32, in the recorded runs."""

import json
import statistics

import pytest

from lab.benchmarks import float8

RECORD = json.loads(float8.RECORD.read_text())


@pytest.mark.parametrize("preset", RECORD["losses"])
def test_validation_losses_in_float8_are_near_those_in_float32(preset: str):
  found = RECORD["losses"][preset]
  assert {len(losses) for losses in found.values()} == {3}
  assert found.keys() == float8.WAYS.keys()
  assert len({loss for losses in found.values() for loss in losses}) == 9  # each run rounds in its own way
  assert abs(float8.apart(RECORD, preset, "float8")) < float8.LIMIT
  spread = max(found["float32"]) - min(found["float32"])
  assert statistics.mean(found["float8"]) - statistics.mean(found["float32"]) < spread


def test_the_page_shows_the_record():
  assert float8.tables(RECORD)["float8"] in float8.PAGE.read_text()
