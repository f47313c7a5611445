"""What a running job tells those who watch it: metrics.prom, the lines of its account, the sentence at the end."""

import json
import math
import re
from pathlib import Path

import pytest

from reporting import metrics
from reporting.account import CATEGORIES, Account, Attempt, account, attempts, sentence
from reporting.journal import Journal
from reporting.metrics import Writer
from reporting.prometheus import PREFIX, Metric, exposition
from reporting.recorded import events
from reporting.speed import Clock
from reporting.status import Status
from runtime import processes
from training.loop import LoopState

SAMPLE = re.compile(r'([a-z_][a-z0-9_]*)\{((?:[a-z_]+="(?:[^"\\\n]|\\["\\n])*",?)+)\} (\S+)')
LABEL = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)"')


def parsed(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
  """Values by name and labels, as Prometheus reads them. Fails if a line is not as its format demands."""
  found, described, typed = {}, "", ""
  assert text.endswith("\n")
  for line in text.splitlines():
    if line.startswith("# HELP "):
      described = line.split(" ", 3)[2]
    elif line.startswith("# TYPE "):
      typed, kind = line.split(" ")[2:]
      assert typed == described
      assert kind in ("gauge", "counter")
      assert (kind == "counter") == typed.endswith("_total")
    else:
      name, labels, value = SAMPLE.fullmatch(line).groups()
      assert name == described == typed
      assert name.startswith(PREFIX)
      unescape = lambda text: re.sub(r"\\(.)", lambda m: "\n" if m[1] == "n" else m[1], text)
      key = (name.removeprefix(PREFIX), frozenset((n, unescape(v)) for n, v in LABEL.findall(labels)))
      assert key not in found
      found[key] = float(value)
  return found


def values_of(workdir: Path) -> dict[str, float]:
  """The values of metrics.prom by name, or by category."""
  found = parsed((workdir / metrics.PROMETHEUS).read_text())
  assert all(("run", workdir.name) in labels for _, labels in found)
  return {dict(labels).get("category", name): value for (name, labels), value in found.items()}


def status(
  workdir: Path, step: int = 0, newest: int = 0, ago: float = 0, evaluated: bool = True
) -> tuple[Status, Clock]:
  """The status of a run that started from a step, and the clock of its process, which began some seconds ago."""
  workdir.mkdir(exist_ok=True)
  clock = Clock()
  clock.began -= ago
  writer = Writer(workdir, LoopState(step, evaluated), 100)
  journal = Journal(workdir, clock, True, pytest.fail)
  journal.add("start", step)
  return Status(workdir, writer, journal, lambda: newest), clock


def test_metrics_prom_has_the_last_line_and_the_account(tmp_path: Path):
  ours, clock = status(tmp_path, newest=20)
  clock.spent |= {"train": 30.0, "checkpoint": 5.0}
  clock.born -= 40
  ours.update(20, {"loss": 2.5, "step_ms": 250.0, "tokens_per_second": 4096.0})
  found = values_of(tmp_path)
  assert {name: found[name] for name in found if name not in CATEGORIES} == {
    "step": 20, "loss": 2.5, "step_seconds": 0.25, "tokens_per_second": 4096.0, "restarts_total": 0,
    "checkpoint_step": 20, "goodput_ratio": pytest.approx(0.75, abs=0.01),
  }  # fmt: skip
  assert tuple(name for name in found if name in CATEGORIES) == CATEGORIES
  assert (found["training"], found["saving"]) == (30.0, 5.0)
  ours.update(30)  # without a new line of training
  assert values_of(tmp_path)["loss"] == 2.5
  assert not list(tmp_path.glob("*.part"))


def test_others_read_metrics_prom_too(tmp_path: Path):
  parser = pytest.importorskip("prometheus_client.parser")
  ours, _ = status(tmp_path / 'a "run"\\n')
  ours.update(3, {"loss": 2.5, "images_per_second": 1.0})
  families = parser.text_string_to_metric_families(ours.path.read_text())
  theirs = {(sample.name, frozenset(sample.labels.items())): sample.value for f in families for sample in f.samples}
  found = {(PREFIX + name, labels): value for (name, labels), value in parsed(ours.path.read_text()).items()}
  assert theirs == found


def test_labels_and_numbers_of_any_kind_are_read_back():
  name = 'C:\\new "x"\nline'
  values = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1e-30, "e": 10**20}
  metric = Metric("m", "A line\nand \\ more.", [({"of": of}, value) for of, value in values.items()])
  text = exposition([metric], {"run": name})
  found = {dict(labels)["of"]: value for (_, labels), value in parsed(text).items()}
  assert found.pop("a") != found
  assert found == {of: float(value) for of, value in values.items() if of != "a"}
  assert {dict(labels)["run"] for _, labels in parsed(text)} == {name}
  assert exposition([Metric("m", "", [])], {}) == ""


def test_a_file_that_cannot_be_written_warns_once(tmp_path: Path, capsys: pytest.CaptureFixture):
  (tmp_path / metrics.PROMETHEUS).mkdir()
  ours = status(tmp_path)[0]
  (tmp_path / metrics.PROMETHEUS).mkdir()  # the other one was moved away, as results of an earlier run
  for step in range(3):
    ours.update(step)
  assert (tmp_path / "previous-1" / metrics.PROMETHEUS).exists()
  assert capsys.readouterr().err.count("metrics.prom cannot be written") == 1


def test_lines_of_the_account_go_to_the_file_and_count_earlier_attempts(tmp_path: Path, capsys: pytest.CaptureFixture):
  first, clock = status(tmp_path, ago=100)
  clock.spent["train"], clock.born = 8.0, clock.born - 10
  first.journal.add("stop", 40)
  second = status(tmp_path, 40)[0]
  said = second.write(50)
  (line,) = (line for line in metrics.read(tmp_path / "metrics.jsonl") if line["split"] == "job")
  assert (line["step"], line["restarts"]) == (50, 1)
  assert line["seconds/training"] == 8.0
  assert line["seconds/down"] == pytest.approx(90.0, abs=1.0)
  assert line["wall_time"] == pytest.approx(sum(line[f"seconds/{name}"] for name in CATEGORIES))
  assert line["goodput"] == pytest.approx(8.0 / line["wall_time"])
  assert re.match(r"goodput 8\.0%: 8\.0 s of 100\.\d s, with 1 restart, trained new steps; down (89|90)\.", said)
  assert "job" not in capsys.readouterr().out
  assert account(attempts(events(tmp_path))).seconds["training"] == 8.0


def test_a_line_after_many_restarts_adds_up_only_its_own_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  """The account of earlier attempts does not change any more."""
  starts = [{"event": "start", "step": 1, "began": float(i), "wall_time": {"train": 0.75}} for i in range(1, 1001)]
  (tmp_path / "journal.jsonl").write_text("".join(json.dumps(event) + "\n" for event in starts))
  ours, added = status(tmp_path, 40)[0], []
  real = Attempt.categories
  monkeypatch.setattr(Attempt, "categories", lambda attempt: added.append(attempt) or real(attempt))
  found = ours.update(50)
  assert len(added) == 1
  assert (found.restarts, found.seconds["training"]) == (1000, 750.0)
  now = ours.journal.now()
  assert found.seconds["down"] == pytest.approx(999 * 0.25 + now.began - 1000.75, abs=1)


@pytest.mark.parametrize("evaluated, kept", [(True, ["train", "validation", "job"]), (False, ["train"])])
def test_a_resumed_run_writes_the_line_after_an_evaluation_again(evaluated: bool, kept: list[str], tmp_path: Path):
  lines = [{"step": 4, "split": split, "x": 1.0} for split in ("train", "validation", "job")]
  lines += [{"step": 5, "split": split, "x": 1.0} for split in ("train", "job")]
  (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
  status(tmp_path, 4, evaluated=evaluated)
  assert [line["split"] for line in metrics.read(tmp_path / "metrics.jsonl")] == kept


def test_an_evaluation_names_a_slow_process(
  tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
  """Processes exchange their paces, so none needs the files of another one, which may be on another machine."""
  paces = [{"host": f"node{rank}", "on_host": on, "step_time": 0.5} for rank, on in enumerate((0.1, 0.1, 0.4))]
  monkeypatch.setattr(processes, "all_gather", lambda mine: [mine, *paces[1:]])
  ours = status(tmp_path)[0]
  ours.evaluated(10, paces[0])
  assert "slowest   process 2 on node2: 4.0 x the median of 0.1 s" in capsys.readouterr().out
  found = parsed((tmp_path / metrics.PROMETHEUS).read_text())
  who = frozenset({("run", tmp_path.name), ("process", "2"), ("host", "node2")})
  assert found["slowest_host_seconds", who] == 0.4
  assert found["median_host_seconds", frozenset({("run", tmp_path.name)})] == 0.1
  assert [line["split"] for line in metrics.read(tmp_path / "metrics.jsonl")] == ["job"]


def test_a_sentence_leaves_out_what_took_no_time():
  seconds = dict.fromkeys(CATEGORIES, 0.0) | {"training": 1200.0, "saving": 100.0, "down": 200.0, "reporting": 0.01}
  assert sentence(Account(seconds, 2)) == (
    "goodput 80.0%: 1,200.0 s of 1,500.0 s, with 2 restarts, trained new steps; down 200.0 s, saving 100.0 s"
  )
