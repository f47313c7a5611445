"""Strings that look like markup stay text on every kind of page.

They may come from a config, a source's or a folder's name, a sample, an error, a device's name or a strategy's file.
"""

import dataclasses
import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
from browser import Browser
from helpers import program, strategy
from reporting_runs import made

from lab.analysis import explanation, search
from lab.analysis.topology import machine_of
from lab.views import calculator, guide_pages, plan_page, search_index, strategy_page
from reporting import pages, report
from reporting.pages.devices import Array, placement
from reporting.pages.document import HERE
from reporting.pages.element import json_of, tag
from reporting.recorded import load
from tools import plan, site

SCRIPT = "</script><script>window.hit = 1</script>"
EVIL = f"{SCRIPT}<img src=x onerror='window.hit = 1'>\" onfocus=\"window.hit = 1' onfocus='</pre></title><!--"


def hostile(value: Any) -> Any:
  """A value with this after each of its strings."""
  if isinstance(value, dict):
    return {key: hostile(inner) for key, inner in value.items()}
  if isinstance(value, list | tuple):
    return type(value)(map(hostile, value))
  return f"{value}{EVIL}" if isinstance(value, str) else value


def run(folder: Path) -> Path:
  """A workdir whose name, config, sources, events and sample are hostile."""
  name = EVIL.replace("/", "∕")[:60]  # a folder's name has no slash
  workdir = made(folder / name, **{EVIL: EVIL, "data": {"path": {EVIL: 1.0}}})
  for file in ("metrics.jsonl", "journal.jsonl"):
    lines = []
    for line in map(json.loads, (workdir / file).read_text().splitlines()):
      fixed = {key: line[key] for key in ("step", "split", "event", "time") if key in line}
      lines.append(hostile(line) | {f"loss/{EVIL}": 1.5} | fixed)
    (workdir / file).write_text("\n".join(map(json.dumps, lines)))
  return workdir


def of_a_run(folder: Path) -> str:
  return report.page([load(run(folder))])


def of_runs(folder: Path) -> str:
  return report.page([load(run(folder)), load(made(folder / "other"))])


def of_explain(folder: Path) -> str:
  made = strategy("fsdp", program())
  found = dict(explanation.explain("fsdp", made, 16, compiled=False))
  for key in ("strategy", "about", "device", "network"):
    found[key] = hostile(found[key])
  for key in ("weights", "activations"):
    found[key] = [row | {name: hostile(row[name]) for name in ("name", "what") if name in row} for row in found[key]]
    found[key] = [row | {"dims": [EVIL for _ in row["shape"]]} for row in found[key]]
  return strategy_page.page(found, made)


def of_plan(folder: Path) -> str:
  where = machine_of("h100:1x8")
  sizes = program(model__dtype="bfloat16").sizes
  found = search.search(sizes, 16, where, ["data_parallel"])[:3]
  found = [dataclasses.replace(one, strategy=EVIL) for one in found]
  rows = hostile(plan.rows_of(found, sizes, where, 16))
  return plan_page.page(EVIL, found, found, rows, EVIL, [EVIL], where)


def of_the_calculator(folder: Path) -> str:
  choices = calculator.Choices(("h100",), ("1e9",), (8,), ("minimal",), (1,))
  real = calculator.data(choices)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(calculator, "data", lambda _: real | {"rows": hostile(real["rows"])})
    view = calculator.view(choices)
  looked_up = re.findall(r'id="calculator-data">(.*?)</script>', view)
  assert json.loads(looked_up[0]) == calculator.packed(real | {"rows": hostile(real["rows"])})
  return pages.document("", "", view, script=calculator.script())


def of_the_site(folder: Path) -> str:
  """Its parts that render Markdown: docstrings of strategies, pages of the guide, titles."""
  says = f"{EVIL}\n\n# {EVIL}\n\n| {EVIL} |\n|---|\n| `{EVIL}` |\n\n[a](javascript:window.hit=1)\n\n```\n{EVIL}\n```\n"
  view = site.view("start", EVIL, guide_pages.rendered(says, guide_pages.ROOT, "guide-x"), *site.links([("x", EVIL)]))
  index = tag("script", search_index.index([view]), type="text/plain", id="search-index")
  script = "".join((HERE / name).read_text() for name in ("search.js", "site.js"))
  return pages.document(
    EVIL, EVIL, view, index, script=script, navigation=site.navigation([("x", EVIL)], [("y", EVIL)])
  )


KINDS = [of_a_run, of_runs, of_explain, of_plan, of_the_calculator, of_the_site]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_hostile_text_stays_text(kind: Any, tmp_path: Path):
  page = kind(tmp_path)
  assert "window.hit = 1" in html.unescape(page.replace("\\u003c", "<"))
  assert SCRIPT not in page
  own = re.findall(r"<script[^>]*>", page)
  data = ('type="application/json" id="calculator-data"', 'type="text/plain" id="search-index"')
  assert set(own) <= {"<script>", *(f"<script {attributes}>" for attributes in data)}
  assert page.count("</script>") == len(own) == 1 + 2 * (kind in (of_the_site, of_the_calculator))
  assert not re.search(r"<[^>]*\son(error|focus)=", re.sub(r'"[^"]*"', '""', page))
  assert "javascript:window" not in re.findall(r'href="([^"]*)"', page)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_browser_runs_nothing_of_hostile_text(kind: Any, browser: Browser, tmp_path: Path):
  pages.write(tmp_path / "page.html", kind(tmp_path))
  assert_harmless(browser, tmp_path / "page.html")


def test_a_browser_runs_nothing_of_an_arrays_dimensions(browser: Browser, tmp_path: Path):
  """They are drawn by a script when an array is picked."""
  array = Array("weights", EVIL, (4, 4), (EVIL, EVIL), ("data",), "16 B")
  pages.write(tmp_path / "page.html", pages.document("", "", placement("", {"data": 2}, [0, 1], [array])))
  assert_harmless(browser, tmp_path / "page.html")


def assert_harmless(browser: Browser, file: Path) -> None:
  def act(page: Any) -> Any:
    for chosen in page.locator("button, select, [tabindex]").all()[:40]:
      chosen.focus()
    for field in page.locator("#search").all():
      field.fill("window hit")
    return page.evaluate("[window.hit ?? 0, document.querySelectorAll('img').length]")

  seen = browser.look(file, act)
  assert seen.value == [0, 0]
  assert (seen.errors, seen.requests) == ([], [])


def test_json_for_a_page_is_the_value_and_holds_no_tag():
  value = {EVIL: [EVIL, "<!--", 1.5, None, "▁é\u2028"]}
  assert json.loads(json_of(value)) == value
  assert "<" not in json_of(value)


def test_a_name_that_is_not_unicode_does_not_keep_a_page_from_being_written(tmp_path: Path):
  """Python reads the bytes of such a file's name as lone surrogates, which UTF-8 cannot write."""
  workdir = made(tmp_path / "run", data={"path": b"texts-\xff".decode(errors="surrogateescape")})
  pages.write(tmp_path / "page.html", report.page([load(workdir)]))
  assert "texts-" in (tmp_path / "page.html").read_text(encoding="utf-8")
