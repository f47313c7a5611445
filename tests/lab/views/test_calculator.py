"""The calculator of docs/index.html shows what lab/analysis says, for every strategy, and refuses what a run does."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from browser import Browser

import strategies
from configs import base
from errors import ConfigError
from lab.analysis import memory, predict, theory
from lab.analysis.case import Case
from lab.analysis.search import search
from lab.analysis.shapes import model_of
from lab.views import calculator
from reporting import pages
from reporting.pages.units import amount, duration
from strategies.execution.mesh import abstract_mesh, resolve
from training import settings

FEW = calculator.Choices(("v5e", "v5p", "h100"), ("1e9",), (8,), ("minimal", "offload"), (1, 8))
OWN = {
  "own_axes": 'Layout(mesh={"x": 2, "fsdp": -1}, batch=("x", "fsdp"), embed="fsdp")',  # axes that no other has
  "own_sizes": 'Layout(mesh={"data": 3, "model": 5}, batch="data", mlp="model")',  # fits no number of devices here
}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory):
  """Two strategies that are one file each, for all tests here."""
  folder = tmp_path_factory.mktemp("own")
  for name, layout in OWN.items():
    (folder / f"{name}.py").write_text(f"from strategies.layout import Layout\n\nLAYOUT = {layout}\n")
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(strategies, "__path__", [*strategies.__path__, str(folder)])
    yield


@pytest.fixture(scope="module")
def page(own: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
  """A page with the calculator, for few choices."""
  file = tmp_path_factory.mktemp("page") / "page.html"
  pages.write(file, pages.document("", "", calculator.view(FEW), script=calculator.script()))
  return file


@pytest.fixture(scope="module")
def known(page: Path) -> dict[str, Any]:
  """What the page looks up."""
  (data,) = re.findall(r'id="calculator-data">(.*?)</script>', page.read_text())
  known = json.loads(data)
  assert len(set(known["texts"])) == len(known["texts"])
  known["rows"] = {key: [[known["texts"][i] for i in row] for row in rows] for key, rows in known["rows"].items()}
  return known


def built(row: list[str], platform: str, parameters: str, devices: str, remat: str, batch: str) -> Case:
  """The case of a row. Raises what a run raises."""
  config = base.get_config("lm", row[0])
  config.model.update(model_of(float(parameters), 4096) | {"remat": remat})
  sizes = {axis: int(size) for axis, size in re.findall(r"(\w+)=(-?\d+)", row[1])}
  layout = resolve(strategies.layout_of(row[0]), int(devices), sizes)
  made = strategies.build(config, layout, settings.program(config, platform), abstract_mesh(layout))
  made.check_batch("batch_size", int(batch) * int(devices))
  return Case.of(made, int(batch) * int(devices), platform)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:pipeline.microbatches", "ignore:model.attention")
def test_every_row_is_what_analysis_says(known: dict[str, Any]):
  """Its memory, its bytes over each axis, and its time on each kind; or the sentence with which a run is refused."""
  refused = 0
  for key, rows in known["rows"].items():
    platform, *chosen = key.split(" ")
    assert set(strategies.names()) - {"expert", "expert_fsdp"} == {row[0] for row in rows}  # the models are dense
    for row in rows:
      if len(row) == 3:
        with pytest.raises(ConfigError) as error:
          built(row, platform, *chosen)
        assert row[2] == str(error.value)
        refused += 1
        continue
      case = built(row, platform, *chosen)
      predicted, messages = memory.of(case), theory.sent(case)
      on_host = f", and {amount(predicted.host)} of its host" if predicted.host else ""
      assert row[2] == amount(predicted.total) + on_host
      for axes in {row.axes for row in messages}:
        assert f"over {'+'.join(axes)} {amount(sum(one.bytes for one in messages if one.axes == axes))}" in row[3]
      assert row[3].count("over ") == len({row.axes for row in messages})
      for kind, (of, column) in known["kinds"].items():
        if of == platform:
          where = calculator.machine(kind, 8)
          times = predict.times(case, where.chip, where.links(case.layout.mesh))
          shares = [times.mfu(flops, where.chip) for flops in (case.model_flops, case.palm_flops)]
          assert shares[0] <= 1
          fits = predicted.total <= where.chip.memory
          best = f"{duration(times.seconds)}, {shares[0]:.0%} ({shares[1]:.0%} as PaLM counts)"
          said = best if fits else "does not fit"
          assert row[4 + column] == said, (key, row, kind)
  assert 0 < refused < 50


def test_the_rows_are_those_of_plan(known: dict[str, Any]):
  """The search of tools.plan makes its cases in another way."""
  where = calculator.machine("v5p", 8)
  config = base.get_config("lm", "single")
  config.model.update(model_of(1e9, 4096))
  plans = search(settings.program(config, where.platform).sizes, 64, where, ["hsdp", "two_d"])
  seen = 0
  for row in known["rows"]["tpu 1e9 8 minimal 8"]:
    mesh = {f"mesh.{axis}": int(size) for axis, size in re.findall(r"(\w+)=(\d+)", row[1])}
    for plan in plans:
      if plan.strategy == row[0] and dict(plan.fields) == mesh | {"model.remat": "minimal"}:
        assert row[2] == amount(plan.memory)
        assert row[5].startswith(duration(plan.times.seconds))
        seen += 1
  assert seen >= 2


def test_a_layout_in_a_file_of_its_own_is_tried_on_its_own_axes(known: dict[str, Any]):
  rows = {(row[0], row[1]): row for row in known["rows"]["gpu 1e9 8 minimal 1"]}
  for mesh in ("x=2 × fsdp=4", "x=8"):
    assert "over x" in rows["own_axes", mesh][3]
  assert rows["own_sizes", "data=3 × model=5"][2] == (
    "mesh.data=3, mesh.model=5 do not multiply to the 8 devices here; "
    "use sizes whose product is 8, or -1 for one of them"
  )


def test_what_a_run_refuses_is_a_sentence(known: dict[str, Any]):
  said = lambda key, name: [row[2] for row in known["rows"][key] if row[0] == name and len(row) == 3]
  assert set(said("tpu 1e9 8 offload 8", "pipeline")) == {
    "model.remat='offload' is not possible here, because the stages of a pipeline keep what they save in slots on the "
    "device; use 'full'"
  }
  (too_many,) = [row for row in calculator.rows(["h100"], "1e9", 256, "minimal", 1) if row[0] == "tensor_parallel"]
  assert too_many[2].startswith("mesh.model=256 does not divide model.heads=16; use 1, 2, 4, 8 or 16")


def test_every_kind_has_every_number_of_devices():
  for kind, devices in itertools.product(calculator.ALL.kind, calculator.ALL.devices):
    assert calculator.machine(kind, devices).count == devices
  assert [calculator.machine(kind, 256).shape for kind in ("v5e", "v5p", "tpu7x")] == [(16, 16), (4, 8, 8), (4, 4, 8)]
  assert [calculator.machine(kind, 64).hosts for kind in ("h100", "gb200")] == [8, 16]


def shown(page: Any) -> list[list[str]]:
  """The rows of the answer."""
  return [row.locator("th, td").all_inner_texts() for row in page.locator("#calculator-answer tbody tr").all()]


def test_the_page_shows_the_rows_of_what_is_chosen(page: Path, known: dict[str, Any], browser: Browser):
  def act(opened: Any) -> list[tuple[tuple[str, ...], list[list[str]]]]:
    found = []
    for chosen in itertools.product(*FEW):
      for name, value in zip(FEW._fields, chosen, strict=True):
        opened.locator(f"[name={name}]").select_option(str(value))
      found.append((chosen, shown(opened)))
    return found

  seen = browser.look(page, act)
  assert seen.errors == seen.requests == []
  assert len(seen.value) == 3 * 2 * 2
  for (kind, *chosen), rows in seen.value:
    platform, column = known["kinds"][kind]
    expected = known["rows"][" ".join(map(str, (platform, *chosen)))]
    assert rows == [row if len(row) == 3 else [*row[:4], row[4 + column]] for row in expected], (kind, chosen)


@pytest.mark.full
def test_the_first_rows_are_there_without_a_script_and_at_every_width(page: Path, browser: Browser):
  plain = browser.look(page, shown, java_script_enabled=False).value
  assert plain == browser.look(page, shown, 360).value
  assert len(plain) >= len(strategies.names())
  for width in (360, 1440):
    assert browser.look(page, width=width).overflow == 0
