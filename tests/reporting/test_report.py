"""The page of a run: its numbers are those of the files, damage is left out, and it never ends a run."""

import itertools
import json
import random
import re
from collections.abc import Callable, Iterable
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from browser import Browser
from helpers import each_once
from reporting_runs import made

from reporting import heartbeat, journal, json_lines, recorded, report
from reporting.journal import Journal
from reporting.recorded import load
from reporting.speed import Clock
from tools import report as command

LARGEST = 2_000_000  # bytes of a page


def charts(page: str) -> dict[str, dict[str, list]]:
  """title → name of a line → its points."""
  found = {}
  for figure in re.findall(r"<figure.*?</figure>", page, re.DOTALL):
    if data := re.search('data-chart="([^"]*)"', figure):
      series = json.loads(unescape(data[1]))["series"]
      found[unescape(re.search("<h3>(.*?)</h3>", figure)[1])] = {line["name"]: line["points"] for line in series}
  return found


def test_the_numbers_of_a_page_are_those_of_the_metrics(tmp_path: Path):
  workdir = made(tmp_path / "run")
  drawn = charts(report.page([load(workdir)]))
  lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  titles = {name: title for name, title, _ in report.CHARTS}
  values = {key for line in lines for key in line} - {"step", "split", "skipped_updates"}
  for key in values:
    name, _, part = key.partition("/")
    if name == "loss_at":
      continue  # by position, below
    for split in ("train", "validation"):
      points = [[line["step"], line[key]] for line in lines if line["split"] == split and key in line]
      if points:
        assert drawn[titles[name]][f"{split} {part}".strip()] == points


def test_losses_by_position_are_those_of_the_first_and_the_last_evaluation(tmp_path: Path):
  one, other = load(made(tmp_path / "a")), load(made(tmp_path / "b", steps=20))
  at = lambda step: [[position, 4 - position / step] for position in (1, 2, 4, 8, 16)]
  assert charts(report.page([one]))["Loss by position"] == {"step 20": at(20), "step 100": at(100)}
  both = charts(report.page([one, other]))["Loss by position"]
  assert both == {"a step 20": at(20), "a step 100": at(100), "b step 20": at(20)}


def test_a_page_says_what_happened_and_how_it_ended(tmp_path: Path):
  page = report.page([load(made(tmp_path / "run"))])
  for expected in (
    "fsdp on mesh data=8; 8 × CPU device, simulated", "Finished at 2001-09-09", "step 100 of 100",
    "step 40: stopped by SIGTERM 2001-09-09", "step 40: started again 2001-09-09", "step 80: checkpoint",
    "step 20: params/head on device 3", "step 30: 2 updates skipped", "step 60: loss 3.0167",
    "run, from step 0: 33.0 s", "run, from step 40: 33.0 s",
    "def f(&lt;x&gt;):", "1.2.3", "model.kv_heads", "best validation loss", "median tokens/s",
  ):  # fmt: skip
    assert expected in page, expected
  assert len(page.encode()) < LARGEST


def whole(**values: Any) -> dict[str, Any]:
  """A beat with these values."""
  return dict.fromkeys(heartbeat.READ, 0) | {"host": "", "doing": "", "wall_time": {}} | values


def test_a_page_has_the_account_of_a_job_and_its_kills(tmp_path: Path):
  """Of 84 s, of which it was down for 40, a job has trained for 31.5. Its last attempt still runs, or was killed."""
  workdir = made(tmp_path / "run")
  parts = [{"set-up": 2.0, "train": 30.5, "data": 0.5}, {"set-up": 3.0}, {"set-up": 2.0, "repeat": 5.0, "train": 1.0}]
  events = [
    {"event": "start", "step": 0, "time": 1e9 + 2, "began": 1e9, "wall_time": {"set-up": 2.0}},
    {"event": "killed", "step": 60, "time": 1e9 + 33, "began": 1e9, "wall_time": parts[0], "doing": "data"},
    {"event": "killed", "step": 0, "time": 1e9 + 46, "began": 1e9 + 43, "wall_time": parts[1], "doing": "other"},
    {"event": "start", "step": 50, "time": 1e9 + 78, "began": 1e9 + 76, "wall_time": {"set-up": 2.0}},
  ]
  (workdir / "journal.jsonl").write_text("\n".join(map(json.dumps, events)))
  (workdir / "heartbeats").mkdir()
  (workdir / "heartbeats" / "0.json").write_text(json.dumps(whole(began=1e9 + 76, wall_time=parts[2])))
  page = report.page([load(workdir)])
  for expected in (
    "step 60: killed while waiting for data 2001-09-09", "step 0: killed 2001-09-09", "run: goodput 37.5%: 84.0 s",
    "Of run: goodput 37.5%: 31.5 s of 84.0 s, with 2 restarts, trained new steps; down 40.0 s",
    "repeating 5.0 s", "run, from step 0: 33.0 s", "run, before its first step: 3.0 s",
    "run, from step 50: 8.0 s",
  ):  # fmt: skip
    assert expected in page, expected
  assert "failed" not in page


def test_a_run_of_many_lines_has_a_small_page_with_all_that_is_rare(tmp_path: Path):
  """Of 50,000 lines one in five is kept: the lowest and highest losses, evaluations, skipped and not finite ones."""
  workdir, count = made(tmp_path / "run"), 50_000
  lines = [{"step": step, "split": "train", "loss": 1 + random.random(), "grad_norm": 1.0} for step in range(count)]
  lines[1000]["loss"], lines[2000]["skipped_updates"] = None, 3
  lines[3000] = {"step": 3000, "split": "validation", "loss": 7.25}
  lines[20_001]["loss"], lines[30_001]["loss"] = 9.5, 0.5
  (workdir / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
  run = load(workdir)
  page = report.page([run])
  assert len(page.encode()) < LARGEST
  assert len(run.lines["train"]) < 20_000
  assert run.step == count - 1
  assert "About one in 5 lines of run&#x27;s training is shown." in page
  assert {(1000, None), (20_001, 9.5), (30_001, 0.5)} <= set(map(tuple, charts(page)["Loss"]["train"]))
  assert charts(page)["Loss"]["validation"] == [[3000, 7.25]]
  assert "step 2000: 3 updates skipped" in page


@pytest.mark.parametrize("pieces", [1, 7, 300])
def test_however_a_long_run_is_read_little_is_kept_and_the_extremes(
  pieces: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
  monkeypatch.setattr(recorded, "LINES", 200)
  monkeypatch.setattr(recorded, "FEW", 5000)
  monkeypatch.setattr(json_lines, "BLOCK", 10_000)
  lines: list[dict[str, Any]] = [{"step": s, "split": "train", "loss": 1 + random.random()} for s in range(3000)]
  rare = {700: {"loss": None}, 1500: {"skipped_updates": 1}, 2100: {"split": "validation", "loss": 1.5}}
  extremes = {401: {"loss": 9.5}, 1201: {"loss": 0.5}, 2002: {"loss": 1e-7}}
  for step, values in (rare | extremes).items():
    lines[step] |= values
  file, reader = tmp_path / "metrics.jsonl", recorded.Reader(tmp_path)
  text = "".join(json.dumps(line) + "\n" for line in lines)
  for number in range(pieces):
    with file.open("a") as out:
      out.write(text[len(text) * number // pieces : len(text) * (number + 1) // pieces])
    run = reader.load()
  kept = dict(run.lines["train"])
  assert len(run.lines["train"]) == len(kept) <= 210
  assert {0, 2999, *extremes, 700, 1500} <= kept.keys()
  assert max(b - a for a, b in itertools.pairwise(sorted(kept))) < 150  # no time is left out
  assert all(values == {n: x for n, x in lines[s].items() if n not in ("step", "split")} for s, values in kept.items())
  assert run.lines["validation"] == [(2100, {"loss": 1.5})]
  assert run.every == round(2999 / len(kept))


def test_a_page_of_many_evaluations_is_small_and_shows_the_best(tmp_path: Path):
  workdir, count = made(tmp_path / "run"), 20_000
  lines = [{"step": step, "split": "validation", "loss": 2 + random.random()} for step in range(count)]
  lines[7777]["loss"], lines[8888]["loss"] = 1.25, None
  (workdir / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
  page = report.page([load(workdir)])
  assert len(page.encode()) < LARGEST / 4
  assert re.search(r"evaluated: 20000, of which \d+ are shown", page)
  for expected in ("step 7777: loss 1.2500", "step 8888: loss not finite", "step 0: loss", "step 19999: loss"):
    assert expected in page, expected


def test_the_page_of_a_run_that_goes_on_reads_only_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  """Whatever is written between two pages, the page is that of the files."""
  parsed = [0]

  def counted(lines: Iterable[bytes], parse: Callable = json_lines.objects) -> list[dict]:
    lines = list(lines)
    parsed[0] += len(lines)
    return parse(lines)

  workdir, line = made(tmp_path / "run"), '{"step": %d, "split": "train", "loss": 1.5}\n'
  file = (workdir / "metrics.jsonl").open("a")
  with file, Journal(workdir, Clock(), True, pytest.fail) as kept:
    file.writelines(line % step for step in range(101, 9000))
    file.flush()
    kept.add("start", 9000)
    monkeypatch.setattr(json_lines, "objects", counted)
    for step in range(9000, 9005):
      file.write((line % step)[:-10])  # half a line, and the rest of it
      file.flush()
      kept.add("end", step)
      file.write((line % step)[-10:])
      file.flush()
      kept.add("end", step)
    assert parsed[0] <= 20
    assert (workdir / "report.html").read_text() == report.page([load(workdir)])


def test_several_runs_show_their_differences_first(tmp_path: Path):
  one = made(tmp_path / "a" / "run")
  other = made(tmp_path / "b" / "run", steps=60, seed=7)
  page = report.page([load(one), load(other)])
  drawn = charts(page)["Loss"]
  assert {"run (1) train", "run (2) train", "run (1) validation code"} <= drawn.keys()
  assert [step for step, _ in drawn["run (2) train"]] == [10, 20, 30, 40, 50, 60]
  differences = page[page.index("Config: differences") : page.index("<h2>Curves")]
  assert re.findall('<th scope="row">(.*?)</th>', differences) == ["seed", "steps"]
  same = page[page.index("<h2>Config") :]
  assert ">model.width<" in same
  assert ">seed<" not in same


@pytest.mark.parametrize("name", ["metrics.jsonl", "journal.jsonl", "config.json"])
def test_damaged_files_leave_a_page_of_the_rest(name: str, tmp_path: Path):
  workdir = made(tmp_path / "run")
  file = workdir / name
  whole, make = file.read_bytes(), random.Random(0)
  for cut in [0, 1, len(whole) // 2, *make.sample(range(len(whole)), 20)]:
    file.write_bytes(whole[:cut])
    assert "Software and hardware" in report.page([load(workdir)]) or name == "journal.jsonl"
  for _ in range(20):
    damaged = bytearray(whole)
    for at in make.sample(range(len(whole)), 10):
      damaged[at] = make.randrange(256)
    file.write_bytes(bytes(damaged))
    report.page([load(workdir)])
  file.unlink()
  assert report.page([load(workdir)])


def test_lines_of_the_wrong_kind_are_left_out(tmp_path: Path):
  workdir = made(tmp_path / "run")
  good = (workdir / "metrics.jsonl").read_text()
  wrong: list[Any] = [
    1, "x", None, [], {}, {"step": 5}, {"step": "5", "split": "train", "loss": 1}, {"step": True, "split": "train"},
    {"step": 5, "split": 3, "loss": 1.0}, {"step": 5, "split": "train", "loss": "low", "grad_norm": [1]},
    {"step": -1, "split": "train", "loss": 1.0}, {"step": 1e99, "split": "train", "loss": 1.0},
    {"step": 5, "split": "train", "loss": 10**400},
  ]  # fmt: skip
  before = charts(report.page([load(workdir)]))
  text = "".join(json.dumps(line) + "\n" for line in wrong) + '{"step": 5, "split": "train", "loss": NaN}\n{"step": 6'
  (workdir / "metrics.jsonl").write_text(good + text)
  events = [
    *wrong,
    {"event": "start"},
    {"event": 3, "step": 1},
    {"event": "end", "step": 9, "time": "now", "wall_time": 4},
    {"event": "end", "step": 9, "time": 10**400, "wall_time": {"train": 10**400}},
  ]
  with (workdir / "journal.jsonl").open("a") as journal_file:
    journal_file.write("".join(json.dumps(event) + "\n" for event in events))
  after = charts(report.page([load(workdir)]))
  assert after["Loss"]["train"][0] == [5, None]  # NaN is a value that was not finite
  after["Loss"]["train"].pop(0)
  assert after == before


def test_the_journal_records_a_run_and_its_failure(tmp_path: Path):
  warnings: list[str] = []

  def run() -> None:
    with Journal(tmp_path, Clock(), True, warnings.append) as kept:
      kept.add("start", 0, devices="8 × CPU")
      kept.add("evaluation", 20)
      raise ValueError("it broke\nbecause")

  with pytest.raises(ValueError, match="it broke"):
    run()
  events = load(tmp_path).events
  assert [(event["event"], event["step"]) for event in events] == [("start", 0), ("evaluation", 20), ("failure", 20)]
  assert events[-1]["why"] == "it broke"
  assert "other" in events[0]["wall_time"]
  page = (tmp_path / "report.html").read_text()
  assert "Failed at" in page
  assert "it broke" in page
  assert not warnings


def test_a_page_that_cannot_be_made_warns_once_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  def broken(*_: object) -> None:
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(report, "write", broken)
  warnings: list[str] = []
  with Journal(tmp_path, Clock(), True, warnings.append) as kept:
    for step in range(3):
      kept.add("start", step)
  assert len(warnings) == 1
  assert "report.html" in warnings[0]
  assert "No space left" in warnings[0]
  assert len(load(tmp_path).events) == 3


def test_evaluations_write_the_page_only_if_that_takes_little_of_the_time(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
  """A page takes 1 s of a clock that stands still otherwise. It is written again 100 s later, and always at the end."""
  now, written = [0.0], []

  def write(*_: object) -> None:
    written.append(now[0])
    now[0] += 1

  monkeypatch.setattr(report, "write", write)
  monkeypatch.setattr(journal.time, "perf_counter", lambda: now[0])
  with Journal(tmp_path, Clock(), True, pytest.fail) as kept:
    for at, event in ((0, "start"), (50, "evaluation"), (100, "evaluation"), (102, "evaluation"), (103, "end")):
      now[0] = max(now[0], at)
      kept.add(event, at)
  assert written == [0, 102, 103]


def test_other_processes_write_nothing(tmp_path: Path):
  with Journal(tmp_path, Clock(), False, pytest.fail) as kept:
    kept.add("start", 0)
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("width, count", each_once([360, 1440], [1, 3]))
def test_a_page_fits_the_window_and_asks_for_nothing(width: int, count: int, browser: Browser, tmp_path: Path):
  runs = [load(made(tmp_path / f"{60 * 'long'}{i}", seed=i)) for i in range(count)]
  report.write(tmp_path / "page.html", runs)
  for scheme in ("light", "dark"):
    open_all = lambda page: page.evaluate("document.querySelectorAll('details').forEach((d) => (d.open = true))")
    seen = browser.look(tmp_path / "page.html", open_all, width, color_scheme=scheme)
    assert seen == (None, [], [], 0)


def test_the_cross_hair_reads_values_by_pointer_and_by_keys(browser: Browser, tmp_path: Path):
  workdir = made(tmp_path / "run")
  report.write(tmp_path / "page.html", [load(workdir)])

  def act(page: Any) -> list[str]:
    figure = page.locator("figure", has_text="Loss").first
    read = lambda: figure.locator("output").inner_text()
    svg = figure.locator("svg").first
    box = svg.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.96, box["y"] + 40)
    said = [read()]
    svg.focus()
    for key in ("Home", "ArrowRight", "ArrowRight", "End"):
      page.keyboard.press(key)
      said.append(read())
    figure.get_by_label("train", exact=True).focus()
    page.keyboard.press("Space")
    said.append(figure.locator("[data-series='0']").evaluate("(g) => getComputedStyle(g).display"))
    return said

  seen = browser.look(tmp_path / "page.html", act)
  assert not seen.errors
  last, first, second, third, end, hidden = seen.value
  assert first == "step 10: train 2.7165 nats"
  assert second == "step 20: train 2.5134, validation 3.05, validation code 2.5, validation prose 3.5 nats"
  assert third == "step 30: train not finite nats"
  assert last == end == "step 100: train 2.0357, validation 3.01, validation code 2.5, validation prose 3.5 nats"
  assert hidden == "none"


def test_marks_are_read_by_pointer_and_by_keys(browser: Browser, tmp_path: Path):
  report.write(tmp_path / "page.html", [load(made(tmp_path / "run"))])

  def act(page: Any) -> list[str]:
    figure = page.locator("figure", has_text="Time line").first
    read = lambda: figure.locator("output").inner_text()
    figure.locator("[data-label*='SIGTERM']").hover()
    said = [read()]
    figure.locator("svg").first.focus()
    for key in ("Home", "ArrowRight"):
      page.keyboard.press(key)
      said.append(read())
    return said

  stopped, first, second = browser.look(tmp_path / "page.html", act).value
  assert stopped.startswith("step 40: stopped by SIGTERM")
  assert first.startswith("step 0: started 2001")
  assert second.startswith("step 40: started again")


def test_colours_follow_the_scheme_and_a_page_without_scripts_is_whole(browser: Browser, tmp_path: Path):
  report.write(tmp_path / "page.html", [load(made(tmp_path / "run"))])
  back = lambda page: page.evaluate("getComputedStyle(document.body).backgroundColor")
  light, dark = (browser.look(tmp_path / "page.html", back, color_scheme=s).value for s in ("light", "dark"))
  assert light != dark
  count = lambda page: (page.locator("svg path.line").count(), page.locator("output:visible").count())
  drawn, hints = browser.look(tmp_path / "page.html", count, java_script_enabled=False).value
  assert drawn > 8
  assert not hints  # they would promise what only the script does


@pytest.mark.parametrize("by", ["the field", "the command"])
def test_a_page_to_pass_on_says_nothing_of_the_machine(by: str, tmp_path: Path):
  secrets = {
    "data": {"path": "/home/qzx/secret/corpus.txt", "cache_dir": "/scratch/qzx/cache", "validation_path": "gs://own/b/v.txt"},
    "distributed": {"coordinator": "node17.internal:8476"}, "init_from": "~/secret/model",
  }  # fmt: skip
  workdir = made(tmp_path / "run", **secrets, reporting={"share": by == "the field"})
  event = {"time": 1e9, "step": 0, "command": "python train.py --workdir=/home/qzx/run", "host": "node17.internal"}
  ended = {"event": "failure", "why": "data.path='/home/qzx/secret/corpus.txt' cannot be read", "sample": "a/b c/d"}
  lines = [event | {"event": "start", "data": "text of /home/qzx/secret/corpus.txt, 5 tokens/s"}, event | ended]
  with (workdir / "journal.jsonl").open("a") as journal:
    journal.writelines(json.dumps(line) + "\n" for line in lines)
  beat = {name: {str: "node17.internal", dict: {}}.get(kind, 1) for name, kind in heartbeat.READ.items()}
  (workdir / heartbeat.FOLDER).mkdir()
  (workdir / f"{heartbeat.FOLDER}/0.json").write_text(json.dumps(beat))
  assert load(workdir).beat.get("host") == (None if by == "the field" else "node17.internal")
  command.main([str(workdir), *(["--share"] if by == "the command" else [])])
  page = (workdir / "report.html").read_text()
  for secret in ("qzx", "node17", "train.py", "gs://own", "secret", "/scratch"):
    assert secret not in page, secret
  for kept in ("5 tokens/s", "corpus.txt", "v.txt", "a/b c/d"):
    assert kept in page, kept
  command.main([str(made(tmp_path / "other", **secrets)), f"--html={tmp_path}/own.html"])
  assert "/home/qzx/secret/corpus.txt" in (tmp_path / "own.html").read_text()
