"""The generated parts of the guide are what the code generates."""

import json

from benchmarks import pipeline


def test_the_pipeline_page_shows_the_schedules_and_the_record():
  record = json.loads(pipeline.RECORD.read_text())
  page = pipeline.PAGE.read_text()
  assert pipeline.fill(page, pipeline.tables(record)) == page
  assert "stage 3" in page
