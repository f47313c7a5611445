"""The page of tools.site: complete, and usable by mouse, by keyboard, without a script and on paper."""

import collections
import html
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from browser import Browser
from helpers import one_sentence

import strategies
from lab.benchmarks import guide, moves
from lab.views import calculator, guide_pages
from reporting import pages
from reporting.pages.devices import DRAWN
from tools import explain, site

ROOT = Path(__file__).parents[2]
# Bytes, besides the calculator's other choices, which take a quarter of a megabyte. The guide's prose takes a sixteenth
# more as HTML than as Markdown. Its tables and code, the index of the search, and Start take the constant, and a
# strategy's pictures and rows take 12 kB, with a step's moves up to 27 kB.
GUIDE = sum(file.stat().st_size for file in (ROOT / "docs").glob("*.md"))
LARGEST = int(1.06 * GUIDE) + 310_000 + 27_000 * len(strategies.names())
RECORDED = json.loads(moves.FILE.read_text())["strategies"]
OWN = """\"\"\"A strategy of a user: one file and no other edit.\"\"\"

from strategies.layout import Layout

LAYOUT = Layout(mesh={"x": 2, "fsdp": -1}, batch=("x", "fsdp"), embed="fsdp")
"""
# Once the browser has drawn the page: only then does it scroll to what the address names.
SCROLLED = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(scrollY))))"
# Words of headings that the search has for other parts of the page alone.
MISPLACED = """() => {
  const parts = [...document.querySelectorAll(".view, .view [id]")], words = new Map(), wrong = [];
  for (const line of document.getElementById("search-index").textContent.split("\\n")) {
    const [word, ...steps] = line.split(" ");
    let at = 0;
    words.set(word, new Set(steps.map((step) => (at += parseInt(step, 36)))));
  }
  parts.forEach((part, n) => {
    if (/^H\\d$/.test(part.tagName))
      for (const word of part.textContent.toLowerCase().match(/[\\p{L}\\p{N}]+/gu))
        if (words.has(word) && !words.get(word).has(n)) wrong.push([part.id, word]);
  });
  return words.size > 1000 ? wrong : ["few words"];
}"""
SHOWN = "[...document.querySelectorAll('.view')].filter(v => v.checkVisibility()).map(v => v.id)"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory):
  """The page, with few choices in the calculator and a strategy that nothing else mentions. No test makes another."""
  folder = tmp_path_factory.mktemp("site")
  (folder / "own.py").write_text(OWN)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(strategies, "__path__", [*strategies.__path__, str(folder)])
    pages.write(folder / "index.html", site.page(calculator.Choices(("v5p",), ("1e9",), (8,), ("full",), (1,))))
    yield folder / "index.html"


@pytest.fixture(scope="module")
def content(file: Path) -> str:
  return file.read_text()


def test_the_page_is_small_and_complete(content: str):
  assert len(content.encode()) < LARGEST < 1_500_000 - 250_000
  ids = re.findall(r'<section id="([\w-]+)" class="view"', content)
  assert {f"strategy-{name}" for name in strategies.names()} < set(ids)
  assert {f"strategy-{name}" for name in strategies.names()} == set(
    re.findall(r'<td><a href="#(strategy-\w+)"', content)
  )
  assert {f"guide-{file.stem}" for file in (ROOT / "docs").glob("*.md")} < set(ids)
  navigation = content.partition("<nav")[2].partition("</nav>")[0]
  listed = re.findall(r'href="#([\w-]+)"', navigation)
  assert sorted(listed) == sorted(ids)
  in_readme = re.findall(r"^\| \[`(\w+)`\]\(strategies/", (ROOT / "README.md").read_text(), re.MULTILINE)
  assert [id for id in listed if id.startswith("strategy-")] == [f"strategy-{name}" for name in (*in_readme, "own")]


def test_ids_are_unique_and_links_lead_somewhere(content: str):
  counts = collections.Counter(re.findall(r'<[^>]* id="([^"]+)"', content))
  assert [name for name, count in counts.items() if count > 1] == []
  for target in map(html.unescape, re.findall(r'<a [^>]*href="([^"]+)"', content)):
    file, _, anchor = target.partition("#")
    if not file:
      assert anchor in counts, target
    elif not re.match(r"[a-z]+:", file):
      assert (ROOT / "docs" / file).exists(), target
  assert not re.findall(r'(?:src|srcset|action)="(?!data:)|<link [^>]*href=(?!.data:)|url\(|@import', content)


def test_links_between_pages_of_the_guide_stay_in_the_page():
  source = "[a](memory.md) [b](data.md#mixtures) [c](#here) [d](../train.py) [e](https://x.org/y.md) ![f](report.png)"
  entries = "**Here.** An entry\n\n**`Here`** and\n**here**\n"
  found = guide_pages.rendered(f"# Here\n\n{source}\n\n## Here\n\n{entries}", ROOT / "docs", "guide-x")
  assert re.findall(r'href="([^"]+)"', found) == [
    "#guide-memory", "#guide-data--mixtures", "#guide-x--here", "../train.py", "https://x.org/y.md",
  ]  # fmt: skip
  ids = ["guide-x--here", "guide-x--here-1", "guide-x---here", "guide-x---here-1"]
  assert re.findall(r'id="([^"]+)"', found) == ids
  assert '<img src="data:image/png;base64,iVBOR' in found


def test_a_chart_is_drawn_and_other_code_stays_text():
  chart = 'flowchart TD\n  a{"So?"} -- "yes" --> fsdp\n'
  found = guide_pages.rendered(f"```mermaid\n{chart}```\n\n<!-- made -->\n\n```dot\n{chart}```\n", ROOT)
  assert '<li><span class="question">So?</span><ul><li><span class="answer">yes</span>' in found
  assert '<a href="#strategy-fsdp">fsdp</a>' in found
  assert '<pre tabindex="0">flowchart TD\n  a{&quot;So?&quot;} -- &quot;yes&quot; --&gt; fsdp</pre>' in found
  assert "made" not in found


def test_start_has_commands_the_chart_and_every_problem(content: str):
  start = content.partition('<section id="start"')[2].partition('<section id="strategies"')[0]
  assert "make train" in start
  assert start.count('href="#strategy-') == len(strategies.names()) - 3  # single, pmap_ddp and own
  questions = (ROOT / "docs/questions.md").read_text().partition("\n## ")[2]
  assert len(set(re.findall(r'href="(#guide-questions---[^"]*)"', start))) == len(re.findall(r"^\*\*", questions, re.M))


def test_every_strategy_has_its_pictures(content: str):
  """What its file says, its layout, devices and arrays, memory, messages, and in a pipeline the schedule."""
  for name in strategies.names():
    view = html.unescape(content.partition(f'<section id="strategy-{name}"')[2].partition("<section id=")[0])
    config = guide.shown(name)
    made = explain.create(config, None)
    assert "LAYOUT" in view
    assert made.describe(name) in view
    assert view.count("data-device=") == min(DRAWN, made.layout.device_count)
    assert "saved activations" in view
    assert ("The schedule of the pipeline" in view) == bool(made.schedule)
    assert ("Sent by a device in a step" in view) == (name != "single")
    assert ("What moves in a step" in view) == (name in RECORDED)


def test_the_recorded_timeline_is_drawn(content: str):
  """The whole step, and a round of each long loop, with the default options and with the recommended ones."""
  view = content.partition('<section id="timeline"')[2].partition("<section id=")[0]
  assert len(re.findall("<h3>[^<]*, default options</h3>", view)) == 3
  assert len(re.findall("<h3>[^<]*, recommended options</h3>", view)) == 3
  assert "sent while kernels wait" in view


@pytest.mark.full
@pytest.mark.parametrize("width, scheme", itertools.product([360, 1440], ["light", "dark"]))
def test_no_view_overflows_and_nothing_leaves_the_file(width: int, scheme: str, file: Path, browser: Browser):
  def act(page: Any) -> dict[str, tuple[list[str], int, int]]:
    found = {}
    for view in page.evaluate("[...document.querySelectorAll('.view')].map(v => v.id)"):
      page.evaluate("id => { location.hash = id }", view)
      page.wait_for_function("id => document.getElementById(id).checkVisibility()", arg=view)
      wider = page.evaluate("document.documentElement.scrollWidth - innerWidth")
      found[view] = page.evaluate(SHOWN), wider, page.evaluate(SCROLLED)
    return found

  seen = browser.look(file, act, width, color_scheme=scheme)
  assert seen.errors == seen.requests == []
  assert len(seen.value) > len(strategies.names())
  for view, (shown, wider, scrolled) in seen.value.items():
    assert shown == [view]
    assert scrolled == 0, view
    assert wider <= 0, view


@pytest.mark.full
def test_pointing_and_picking_work_for_every_strategy(file: Path, browser: Browser):
  """In each strategy's view: the devices of the picked array, the parts of a bar, the units of a schedule."""

  def act(page: Any) -> list[tuple[str, list[str]]]:
    found = []
    for name in strategies.names():
      page.evaluate("id => { location.hash = id }", f"strategy-{name}")
      view = page.locator(f"#strategy-{name}")
      placement, said = view.locator("[data-placement]"), []
      arrays = placement.locator("option").all_inner_texts()
      for array in ("blocks/mlp/up", "norm/scale"):
        placement.locator("select").select_option(str(arrays.index(array)))
        placement.locator("[data-device]").last.hover()
        said.append(placement.locator("output").inner_text())
      for marks in view.locator("svg.marks").all():
        marks.locator("[data-label]").first.hover(force=True)
        said.append(marks.locator("xpath=ancestor::figure").locator("output").inner_text())
        marks.focus()
        page.keyboard.press("End")
        said.append(marks.locator("xpath=ancestor::figure").locator("output").inner_text())
      found.append((name, said))
    return found

  seen = browser.look(file, act)
  assert seen.errors == []
  for name, (up, scale, *marks) in seen.value:
    layout = strategies.layout_of(name)
    split, in_stages = any(map(layout.axes, ("embed", "mlp", "layers", "experts"))), bool(layout.axes("layers"))
    assert re.match(rf"Device \d \(.*\) holds {'piece' if split else 'the whole'} .*of blocks/mlp/up: layers", up), name
    assert "the whole of norm/scale: · 0:64" in scale  # the width of the preset tiny
    if name in RECORDED:
      *marks, first, last = marks
      assert first.startswith("1 of "), name
      assert re.match(r"(\d+) of \1: ", last), name
    assert len(marks) == 2 * (1 + (name != "single") + in_stages)
    assert marks[0].startswith("predicted: parameters")
    assert marks[1].startswith("predicted: working memory")
    if in_stages:
      assert marks[-2] == "stage 0, tick 0: forward, microbatch 0"
      assert re.match(r"stage \d, tick \d+: (waits|backward)", marks[-1])


def test_picking_in_one_picture_leaves_the_others_alone(file: Path, browser: Browser):
  """All strategies' placements are in one page, and each has its own devices and text."""

  def act(page: Any) -> list[Any]:
    figures = "[...document.querySelectorAll('[data-placement]')]"
    look = lambda: page.evaluate(f"{figures}.map(f => f.innerHTML + f.querySelector('select').value)")
    before = look()
    page.evaluate("location.hash = 'strategy-fsdp'")
    page.wait_for_function("document.getElementById('strategy-fsdp').checkVisibility()")
    page.locator("#strategy-fsdp select").select_option("1")
    page.locator("#strategy-fsdp [data-device]").last.hover()
    at = page.evaluate(f"{figures}.findIndex(f => f.closest('#strategy-fsdp'))")
    return [at, [i for i, (old, new) in enumerate(zip(before, look(), strict=True)) if old != new], len(before)]

  at, changed, count = browser.look(file, act).value
  assert changed == [at]
  assert count == len(strategies.names())


def test_links_and_the_keyboard_change_the_view(file: Path, browser: Browser):
  def act(page: Any) -> list[Any]:
    found = [page.evaluate(SHOWN)]
    for _ in range(4):  # "Skip to the content", the search, Start, Strategies
      page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_function("document.getElementById('strategies').checkVisibility()")
    found += [page.evaluate(SHOWN), page.evaluate("document.activeElement.textContent"), page.title()]
    page.locator("#strategies a", has_text="hsdp").click()
    page.wait_for_function("document.getElementById('strategy-hsdp').checkVisibility()")
    found += [
      page.evaluate(SHOWN),
      page.evaluate("[...document.querySelectorAll('[aria-current]')].map(a => a.textContent)"),
    ]
    page.evaluate("location.hash = 'guide-data--mixtures'")
    page.wait_for_function("document.getElementById('guide-data').checkVisibility()")
    page.wait_for_timeout(100)
    box = page.locator("[id='guide-data--mixtures']").bounding_box()
    found += [page.evaluate(SHOWN), 0 < box["y"] < 450]
    page.go_back()
    page.wait_for_function("document.getElementById('strategy-hsdp').checkVisibility()")
    return [*found, page.evaluate("scrollY")]

  assert browser.look(file, act).value == [
    ["start"],
    ["strategies"], "Strategies", "Strategies – Meshwright",
    ["strategy-hsdp"], ["Strategies", "hsdp"],
    ["guide-data"], True,
    0,
  ]  # fmt: skip


def test_search_start_chart_and_steps_work_by_keyboard_and_on_a_phone(file: Path, browser: Browser):
  """One session for all, because a browser takes long to open the page."""
  shown = lambda page, id: page.wait_for_function("id => document.getElementById(id).checkVisibility()", arg=id)
  results = "[...document.querySelectorAll('#found a')].map(a => a.getAttribute('href'))"

  def act(page: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"misplaced": page.evaluate(MISPLACED)}
    page.keyboard.press("/")
    page.keyboard.type("checkpo")  # a word may be longer
    found["results"] = page.evaluate(results)
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "ArrowUp", "Enter"):
      page.keyboard.press(key)
    page.wait_for_function("location.hash")
    found["second"] = page.evaluate("location.hash"), page.locator("#found").is_visible()
    page.keyboard.press("/")
    page.keyboard.type("RESOURCE_EXHAUSTED")
    page.keyboard.press("Enter")
    shown(page, "guide-questions")
    found["first"] = page.evaluate("location.hash")
    page.keyboard.press("/")
    page.keyboard.type("zzzz")
    found["nothing"] = page.locator("#found").inner_text()
    page.keyboard.press("Escape")
    found["closed"] = page.locator("#found").is_visible(), page.evaluate("document.activeElement.id")
    page.evaluate("location.hash = 'start'")
    shown(page, "start")
    page.locator("#start summary", has_text="Speed").click()
    page.locator("#start .problems a", has_text="step recompiles").click()
    shown(page, "guide-questions")
    problem = page.locator("[id^='guide-questions---the-step-recompiles']")
    page.wait_for_timeout(100)
    found["problem"] = 0 <= problem.bounding_box()["y"] < 450
    page.evaluate("location.hash = 'guide-explain--choosing-a-strategy'")
    page.locator("#guide-explain .chart").get_by_role("link", name="fsdp", exact=True).click()
    shown(page, "strategy-fsdp")
    moves = page.locator("#strategy-fsdp figure:has([data-move])")
    for button in ("next", "next", "previous", "next"):
      moves.get_by_role("button", name=button).press("Enter")
    found["step"] = moves.locator("output").inner_text()
    page.set_viewport_size({"width": 360, "height": 780})
    links, menu = page.locator(".pages"), page.locator(".menu")
    found["menu"] = [links.is_visible()]
    menu.press("Enter")
    found["menu"] += [links.is_visible(), page.evaluate("document.documentElement.scrollWidth")]
    links.locator("a").first.press("Escape")
    found["menu"] += [links.is_visible(), menu.evaluate("menu => menu === document.activeElement")]
    menu.click()
    links.get_by_text("zero1").click()
    shown(page, "strategy-zero1")
    found["menu"].append(links.is_visible())
    return found

  seen = browser.look(file, act)
  assert seen.errors == seen.requests == []
  _, second, *_ = seen.value.pop("results")
  assert seen.value.pop("first").startswith("#guide-questions---out-of-memory-oom-resource_exhausted")
  step = seen.value.pop("step")
  assert step.startswith("2 of ")
  assert step.endswith(" in memory")
  assert seen.value == {
    "misplaced": [],
    "second": (second, False),
    "nothing": "Nothing found",
    "closed": (False, "search"),
    "problem": True,
    "menu": [False, True, 360, False, True, False],
  }


@pytest.mark.full
def test_without_a_script_and_in_print_all_views_follow_one_another(file: Path, browser: Browser, content: str):
  views = re.findall(r'<section id="([\w-]+)" class="view"', content)
  assert browser.look(file, lambda page: page.evaluate(SHOWN), java_script_enabled=False).value == views

  def act(page: Any) -> tuple[list[str], bool]:
    page.emulate_media(media="print")
    return page.evaluate(SHOWN), page.locator(".navigation").is_visible()

  assert browser.look(file, act).value == (views, False)


def test_the_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(site, "page", lambda: "made")
  site.main([f"--html={tmp_path / 'new' / 'page.html'}"])
  assert (tmp_path / "new" / "page.html").read_text() == "made"
  assert capsys.readouterr().out == f"wrote {tmp_path / 'new' / 'page.html'}\n"
  with one_sentence("html", "is a folder"):
    site.main([f"--html={tmp_path}"])
