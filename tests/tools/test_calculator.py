"""The calculator of docs/index.html computes what analysis/memory.py and analysis/theory.py compute."""

import collections
import dataclasses
import itertools
import json
import math
import re
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from browser import Browser
from helpers import config, program

import strategies
from analysis import memory, theory
from analysis.case import Case
from analysis.search import model_of
from analysis.weights import weights
from errors import ConfigError
from models.config import REMAT
from pages.units import amount
from strategies.pipeline import schedule as schedules
from tools import calculator, calculator_form, site

RELATIVE = 1e-9  # of sums in another order; each rounds by 1e-16
SIZES = [(1.3e9, 2048), (7e9, 4096), (70e9, 1024)]  # none has the sizes from which the terms of saved bytes follow
MESH = {"replica": 2, "stage": 4, "data": 4, "model": 2}
ASKED = calculator_form.FIRST


def cases(name: str) -> Iterator[dict[str, Any]]:
  """Sizes × devices' kind × remat, on small and large meshes, in one part and in several."""
  kinds = ("TPU v5p", "NVIDIA H100")
  parts = [(1, "auto", 8, "1f1b"), (4, "auto", 4, "gpipe"), (2, "step", 1, "1f1b")]
  axes = [axis for axis in strategies.layout_of(name).mesh if name != "single"]
  meshes = [{axis: MESH[axis] for axis in axes}, {axis: 2 * MESH[axis] for axis in axes if axis != "stage"}]
  for (params, length), kind, remat in itertools.product(SIZES, kinds, REMAT):
    for mesh, (accumulation, gather, microbatches, schedule) in zip(itertools.cycle(meshes), parts, strict=False):
      if remat == "offload" and mesh.get("stage", 1) > 1:
        continue
      yield ASKED | {
        "params": params, "seq_len": length, "strategy": name, "mesh": mesh, "remat": remat, "chip": kind,
        "batch_size": 1024, "accumulation": accumulation, "gather": gather, "microbatches": microbatches,
        "schedule": schedule,
      }  # fmt: skip


def others() -> Iterator[dict[str, Any]]:
  """Cases that need a rule of their own."""
  make = lambda **fields: ASKED | fields
  yield make(strategy="single", mesh={}, batch_size=1)
  yield make(strategy="tensor_parallel", mesh={"model": 8}, seq_len=384, batch_size=1)
  yield make(strategy="tensor_parallel", mesh={"model": 16}, seq_len=128, params=1e9, batch_size=3)
  yield make(strategy="two_d", mesh={"data": 1, "model": 4}, batch_size=5)
  yield make(strategy="two_d", mesh={"data": 8, "model": 1}, batch_size=8, accumulation=1, gather="step")
  yield make(strategy="pipeline", mesh={"stage": 1, "data": 8}, batch_size=64)
  yield make(strategy="pipeline", mesh={"stage": 2, "data": 1}, batch_size=64, microbatches=1)
  yield make(strategy="pipeline", mesh={"stage": 16, "data": 2}, batch_size=64, microbatches=32, accumulation=1)
  yield make(strategy="three_d", mesh={"stage": 6, "data": 2, "model": 4}, params=1e12, batch_size=128, chip="TPU7x")
  yield make(strategy="fsdp", mesh={"data": 1}, batch_size=2)
  yield make(strategy="zero1", mesh={"data": 512}, params=2e8, batch_size=512)
  yield make(strategy="fsdp", mesh={"data": 16}, params=1e7 * 17, batch_size=16, seq_len=128 * 77)


def by_python(asked: dict[str, Any]) -> Case:
  """The case in Python. A pmap needs devices, so it is here data_parallel, summed by hand."""
  if asked["strategy"] == "pmap_ddp":
    return dataclasses.replace(calculator.case_of(asked | {"strategy": "data_parallel"}), sums_by_hand=True)
  return calculator.case_of(asked)


def answers(browser: Browser, asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
  """What the page's script computes."""
  seen = browser.look(site.FILE, lambda page: page.evaluate("all => all.map(calculator.answer)", asked))
  assert seen.errors == []
  return seen.value


@pytest.mark.filterwarnings("ignore:pipeline.microbatches", "ignore:model.attention")
@pytest.mark.parametrize("name", [*strategies.names(), "others"])
def test_the_page_computes_what_python_computes(name: str, browser: Browser):
  asked = list(others() if name == "others" else cases(name))
  assert len(asked) >= 12
  for fields, answer in zip(asked, answers(browser, asked), strict=True):
    case = by_python(fields)
    predicted, sent = memory.of(case), theory.sent(case)
    where = json.dumps(fields)
    assert "refused" not in answer, (where, answer)
    assert answer["count"] == sum(weight.size for weight in weights(case.model)), where
    assert answer["devices"] == case.layout.device_count, where
    assert answer["memory"] == pytest.approx(dataclasses.asdict(predicted), rel=RELATIVE, abs=0), where
    assert answer["total"] == pytest.approx(predicted.total, rel=RELATIVE), where
    names = lambda rows: [(row["kind"], tuple(row["axes"]), row["what"]) for row in rows]
    assert names(answer["sent"]) == names(row._asdict() for row in sent), where
    for row, expected in zip(answer["sent"], sent, strict=True):
      assert math.isclose(row["bytes"], expected.bytes, rel_tol=RELATIVE), (where, row, expected)


def test_models_have_the_sizes_of_plan(browser: Browser):
  """From too small to too large, and where half a block is rounded."""
  sizes = [10 ** (7 + i / 40) for i in range(250)]
  asked = [ASKED | {"params": params, "strategy": "single", "mesh": {}} for params in sizes]
  for params, answer in zip(sizes, answers(browser, asked), strict=True):
    if "refused" in answer:
      with pytest.raises(ConfigError) as error:
        model_of(params, ASKED["seq_len"])
      assert answer["refused"] == str(error.value)
    else:
      assert model_of(params, ASKED["seq_len"]).items() <= answer["model"].items(), params


def test_a_pmap_is_the_case_that_stands_for_it():
  sizes = {"model__width": 256, "model__heads": 2, "model__kv_heads": 2, "model__mlp_width": 512}
  made = [strategies.create(config(name, **sizes), program(**sizes), jax.devices()) for name in ("pmap_ddp", "fsdp")]
  cases = [Case.of(one, 16, "gpu") for one in made]
  assert [case.sums_by_hand for case in cases] == [True, False]
  assert calculator._strategy("pmap_ddp")["by_hand"]


MISTAKES = {
  "mesh.data=3 does not divide model.width=4096; use 1, 2, 4, ": {"mesh": {"data": 3}},
  "mesh.model=64 does not divide model.heads=32; use 1, 2, 4, ": {"strategy": "tensor_parallel", "mesh": {"model": 64}},
  "mesh.stage=3 does not divide model.depth=32; use 1, 2, 4, 8, 16 or 32, or model.depth=33": {
    "strategy": "pipeline", "mesh": {"stage": 3, "data": 1},
  },
  "batch_size=100 is not a multiple of 64 (devices that split the batch); use 128": {"batch_size": 100},
  "batch_size=64 is not a multiple of 64 (devices that split the batch) × 3 (accumulation); use 192": {
    "batch_size": 64, "accumulation": 3,
  },
  "batch_size=12 is not a multiple of 2 (devices that split the batch) × 8 (pipeline.microbatches); use 16": {
    "strategy": "pipeline", "mesh": {"stage": 4, "data": 2}, "batch_size": 12,
  },
  "model.remat='offload' does not fit a pipeline, whose stages keep what they save in slots": {
    "strategy": "three_d", "mesh": {"stage": 2, "data": 2, "model": 2}, "remat": "offload",
  },
  "params=1e+06 does not fit a model with Llama's proportions; use 1e8 to 1e12": {"params": 1e6},
  "params=1.2e+07 does not fit a model with Llama's proportions; use 1e8 to 1e12": {"params": 1.2e7},
  "pipeline.microbatches=0 must be at least 1": {
    "strategy": "pipeline", "mesh": {"stage": 2, "data": 2}, "microbatches": 0,
  },
}  # fmt: skip


def test_the_page_refuses_what_python_refuses(browser: Browser):
  """With the same sentences."""
  asked = [ASKED | fields for fields in MISTAKES.values()]
  for fields, sentence, answer in zip(asked, MISTAKES, answers(browser, asked), strict=True):
    with pytest.raises(ConfigError) as error:
      calculator.case_of(fields)
    assert answer == {"refused": str(error.value)}
    assert answer["refused"].startswith(sentence)


def test_the_page_refuses_what_it_does_not_know(browser: Browser):
  none = float("nan")  # an empty field
  asked = [{"seq_len": 100}, {"mesh": {"data": 1.5}}, {"batch_size": none}, {"accumulation": 0}, {"params": none}]
  assert [answer["refused"] for answer in answers(browser, [ASKED | fields for fields in asked])] == [
    "seq_len=100 is not a multiple of 128, as the kernels of attention need; use 128",
    "mesh.data must be a whole number",
    "batch_size must be a whole number",
    "accumulation=0 must be at least 1",
    "params must be a number, such as 7e9",
  ]


def test_schedules_in_closed_form_are_those_that_are_simulated(browser: Browser):
  asked = list(itertools.product(calculator.SCHEDULES, (2, 3, 4, 8, 12, 32), (1, 2, 3, 5, 8, 15, 16, 17, 64)))
  run = "all => all.map(([order, stages, count]) => calculator.build(order, stages, count))"
  seen = browser.look(site.FILE, lambda page: page.evaluate(run, asked))
  for (order, stages, microbatches), found in zip(asked, seen.value, strict=True):
    made = schedules.build(schedules.ORDERS[order], stages, microbatches)
    assert found == {
      "microbatches": microbatches,
      "residuals": made.slots["residuals"],
      "exchanges": sum(phase.ticks * len(phase.routes) for phase in made.phases),
    }
    assert made.chunks == 1
    assert not made.splits


def test_what_is_saved_must_be_proportional(monkeypatch: pytest.MonkeyPatch):
  """Otherwise the page is not written."""
  real = calculator.saved.bytes_per_example
  monkeypatch.setattr(calculator.saved, "bytes_per_example", lambda m, **given: real(m, **given) + m.seq_len * m.depth)
  with pytest.raises(ValueError, match="not proportional"):
    calculator.terms("tpu", "full")


def words(page: Any) -> list[str]:
  """The texts of the answer."""
  cells = page.locator("#calculator-answer :is(dt, dd, .card.wide td, .card.wide th, figcaption, svg[role=img] text)")
  return cells.all_inner_texts()


def test_the_script_answers_as_python_does_at_first(browser: Browser):
  """Python has drawn the answer for the first values, for those without a script."""
  plain = browser.look(site.FILE, words, java_script_enabled=False, width=1440)
  assert browser.look(site.FILE, words).value == plain.value
  assert len(plain.value) > 20


@pytest.mark.filterwarnings("ignore:model.attention")
def test_the_picture_says_the_bytes_of_every_axis(browser: Browser):
  """As tools.explain writes them, from bytes to gigabytes."""
  mesh = {"stage": 4, "data": 2, "model": 2}
  asked = ASKED | {"strategy": "three_d", "mesh": mesh, "params": 2e8}
  sent: collections.Counter[str] = collections.Counter()
  for row in theory.sent(by_python(asked)):
    sent["+".join(row.axes)] += row.bytes

  def act(page: Any) -> str:
    page.evaluate("location.hash = 'calculator'")
    page.locator("[name=strategy]").select_option("three_d")
    for name, value in {"params": 2e8, **{f"mesh.{axis}": size for axis, size in mesh.items()}}.items():
      page.locator(f"[name='{name}']").fill(str(value))
    return page.locator("#calculator-answer figcaption").last.inner_text()

  said = browser.look(site.FILE, act).value
  assert said == "; ".join(f"over {axes}: by theory {amount(size)}" for axes, size in sorted(sent.items())) + "."
  assert " kB" in said


def test_changing_a_field_changes_the_answer(browser: Browser):
  def act(page: Any) -> list[Any]:
    page.evaluate("location.hash = 'calculator'")
    form, answer = page.locator("#calculator-form"), page.locator("#calculator-answer")
    visible = lambda: [
      field.get_attribute("name") for field in form.locator("input, select").all() if field.is_visible()
    ]
    found = [visible(), answer.inner_text()]
    form.locator("[name='mesh.data']").fill("128")
    found.append(answer.inner_text())
    form.locator("[name=strategy]").select_option("three_d")
    found += [visible(), answer.inner_text()]
    form.locator("[name='mesh.data']").fill("")
    found.append(answer.inner_text())
    form.locator("[name='mesh.data']").press("Enter")
    return [*found, page.url]

  seen = browser.look(site.FILE, act)
  assert seen.errors == seen.requests == []
  fields, first, more, all_fields, three_d, empty, url = seen.value
  always = ["params", "seq_len", "batch_size", "strategy"]
  assert fields == [*always, "mesh.data", "chip", "remat", "accumulation", "gather"]
  assert all_fields == [
    *always, "mesh.stage", "mesh.data", "mesh.model", "chip", "remat", "accumulation", "gather", "schedule",
    "microbatches",
  ]  # fmt: skip
  assert len({first, more, three_d}) == 3
  assert "over stage" in three_d
  assert empty == "mesh.data must be a whole number"
  assert url.endswith("#calculator")  # the form is not sent anywhere


@pytest.mark.parametrize(("chip", "verdict"), [("TPU v5e", "does not fit"), ("TPU v5p", "fits")])
def test_the_memory_is_compared_with_the_devices(chip: str, verdict: str, browser: Browser):
  def act(page: Any) -> str:
    page.evaluate("location.hash = 'calculator'")
    page.locator("[name=chip]").select_option(chip)
    return page.locator("#calculator-answer dd").nth(4).inner_text()

  assert re.fullmatch(rf"[\d.]+ GB: {verdict}", browser.look(site.FILE, act).value)


def test_the_calculator_is_usable_at_every_width(browser: Browser):
  def act(page: Any) -> int:
    page.evaluate("location.hash = 'calculator'")
    page.locator("[name=strategy]").select_option("three_d")
    return page.evaluate("document.documentElement.scrollWidth")

  for width in (360, 1440):
    assert browser.look(site.FILE, act, width).value <= width
