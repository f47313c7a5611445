"""The generated parts of the guide are up to date with the code and the records."""

import json
import re
from types import ModuleType

import pytest

import strategies
import strategies.pipeline
from benchmarks import (
  checkpoint_cost,
  generation,
  guide,
  input_pipeline,
  optimizers,
  pages,
  pipeline_schedules,
  predictions,
  preparation,
  published,
)
from benchmarks.pages import ROOT
from models.remat import NAMES
from strategies.layout import Layout
from strategies.pipeline.orders import ORDERS


def test_the_layouts_in_the_readme_are_those_of_the_strategies():
  (block,) = re.findall(r"```python\n(data_parallel = .*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
  layouts = {"Layout": Layout}
  exec(block, layouts)
  found = {name: layout for name, layout in layouts.items() if isinstance(layout, Layout)}
  assert len(found) == 9
  for name, layout in found.items():
    assert layout == strategies.layout_of(name)


def test_the_picture_in_the_readme_leads_to_every_strategy():
  """Except to the one without devices to choose from, and the legacy one."""
  (picture,) = re.findall(r"```mermaid\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
  arrows = re.findall(r'^  (\w+) -- ".*?" --> (\w+)', picture, re.MULTILINE)
  assert len(arrows) == len(picture.splitlines()) - 2  # all lines but the first question's
  assert {end for _, end in arrows} - {"state", "links"} == set(strategies.names()) - {"single", "pmap_ddp"}


def test_the_pipeline_page_shows_the_schedules_and_the_record():
  record = json.loads(pipeline_schedules.RECORD.read_text())
  page = pipeline_schedules.PAGE.read_text()
  assert pages.fill(page, pipeline_schedules.tables(record)) == page
  assert "stage 3" in page


def test_the_pipeline_docstring_quotes_the_record():
  text = " ".join(strategies.pipeline.__doc__.split())
  rows = pipeline_schedules.tables(json.loads(pipeline_schedules.RECORD.read_text()))["speed"].splitlines()
  ratios = {cells[1].strip(): cells[-2].strip() for cells in (row.split("|") for row in rows) if len(cells) > 2}
  for name in ORDERS:
    assert f"{name} {ratios[name]}" in text


@pytest.mark.parametrize("benchmark", [checkpoint_cost, generation, input_pipeline, optimizers, preparation])
def test_a_page_shows_its_benchmarks_record(benchmark: ModuleType):
  page = benchmark.PAGE.read_text()
  assert pages.fill(page, benchmark.tables(json.loads(benchmark.RECORD.read_text()))) == page


def test_muon_is_better_than_adamw_from_every_seed():
  """With rates that are best inside the grid, not at its ends."""
  record = json.loads(optimizers.RECORD.read_text())
  assert max(optimizers.seeds(record, "muon")) < min(optimizers.seeds(record, "adamw"))
  for name in optimizers.NAMES:
    assert len(optimizers.seeds(record, name)) == len(optimizers.SEEDS) == 3
    assert record["losses"][name][-1]["rate"] in optimizers.RATES[1:-1]


def test_the_memory_page_lists_the_names_of_values():
  table = (ROOT / "docs/memory.md").read_text().partition("| Name | Value |")[2].partition("\n\n")[0]
  rows = [row.split("|")[1] for row in table.splitlines()[2:]]
  assert re.findall(r"`(\w+)`", " ".join(rows)) == list(NAMES)


@pytest.mark.parametrize("platform", predictions.RECORDS)
def test_the_explain_page_shows_the_predictions(platform: str):
  page, record = predictions.PAGE.read_text(), json.loads(predictions.RECORDS[platform].read_text())
  assert pages.fill(page, predictions.tables(record)) == page


def test_the_explain_page_shows_published_speeds():
  page = predictions.PAGE.read_text()
  assert pages.fill(page, {"published": published.table()}) == page


def test_the_strategies_page_shows_the_golden_pages_and_the_records():
  page = guide.PAGE.read_text()
  assert pages.fill(page, guide.parts()) == page
