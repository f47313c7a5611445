"""Signs of life: what a killed process did is known to the next one, and nothing is known twice."""

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from reporting import heartbeat
from reporting.heartbeat import Heartbeat
from reporting.journal import Journal
from reporting.recorded import load
from reporting.speed import Clock


def beat_of(workdir: Path, rank: int = 0) -> heartbeat.Beat:
  return heartbeat.of_job(workdir)[rank]


def killed(workdir: Path, steps: int, rank: int = 0, start: int = 0, seconds: float = 0.1) -> Heartbeat:
  """A process that is killed after so many steps: it never leaves its heartbeat."""
  clock = Clock()
  process = Heartbeat(workdir, rank, clock, 1000.0).__enter__()
  journal = Journal(workdir, clock, rank == 0, pytest.fail, process)
  journal.add("start", start)
  for step in range(start + 1, start + steps + 1):
    with clock(process.work(step)):
      clock._start -= seconds  # so long ago
    process.after(step)
  process.write()
  return process


def test_a_beat_says_what_a_process_does_and_since_when(tmp_path: Path):
  clock = Clock()
  with Heartbeat(tmp_path, 3, clock, 0.01) as process, clock("eval"):
    process.step = 7
    while not (seen := heartbeat.of_job(tmp_path)) or seen[3]["doing"] != "eval" or seen[3]["step"] != 7:
      time.sleep(0.01)
    first = beat_of(tmp_path, 3)
    while beat_of(tmp_path, 3)["time"] <= first["time"]:
      time.sleep(0.01)
    second = beat_of(tmp_path, 3)
  assert first["pid"] == os.getpid()
  assert second["since"] == first["since"] <= first["time"]  # nothing has changed since
  assert 0 < second["wall_time"]["eval"] == pytest.approx(second["time"] - first["since"], abs=0.5)
  assert not heartbeat.of_job(tmp_path)  # it ended in order


def test_the_next_run_writes_down_what_a_killed_one_did(tmp_path: Path):
  process = killed(tmp_path, steps=5)
  last = beat_of(tmp_path)
  assert last["slowest"] == pytest.approx(0.1, abs=0.05)
  with Heartbeat(tmp_path, 0, clock := Clock(), 1000.0) as again:
    with Journal(tmp_path, clock, True, pytest.fail, again) as journal:
      journal.add("start", 3)
    assert [again.work(step) for step in (4, 5, 6)] == ["repeat", "repeat", "train"]
  (found,) = (event for event in load(tmp_path).events if event["event"] == "killed")
  assert (found["step"], found["began"]) == (5, process.clock.began)
  assert found["wall_time"]["train"] == pytest.approx(0.5, abs=0.1)


def test_kills_in_a_row_are_each_written_once(tmp_path: Path):
  """The second one is killed before it has done as much as the first; the third before its journal begins."""
  first, second = killed(tmp_path, steps=5), killed(tmp_path, steps=1, start=2)
  third = Heartbeat(tmp_path, 0, Clock(), 1000.0).__enter__()
  fourth = killed(tmp_path, steps=1, start=2)
  assert fourth.furthest == 5
  killed(tmp_path, steps=9, start=2)
  began = [event["began"] for event in load(tmp_path).events if event["event"] == "killed"]
  assert began == [process.clock.began for process in (first, second, third, fourth)]


def test_kills_before_the_first_checkpoint_are_in_the_journal_that_goes_on(tmp_path: Path):
  first, second = killed(tmp_path, steps=2), None
  (tmp_path / "journal.jsonl").unlink()  # a run that starts from step 0 moves away what is there
  second = killed(tmp_path, steps=2)
  (tmp_path / "journal.jsonl").unlink()
  killed(tmp_path, steps=2)
  began = [event["began"] for event in load(tmp_path).events if event["event"] == "killed"]
  assert began == [process.clock.began for process in (first, second)]


def test_kills_are_known_if_the_journal_is_lost(tmp_path: Path):
  """Of a lost machine, the bucket has an older journal and a newer heartbeat."""
  first = killed(tmp_path, steps=5, start=2)
  sent = (tmp_path / "journal.jsonl").read_bytes()
  second = killed(tmp_path, steps=1, start=2)
  (tmp_path / "journal.jsonl").write_bytes(sent)
  third = killed(tmp_path, steps=1, start=2)
  assert [beat["began"] for beat in beat_of(tmp_path)["killed"]] == [p.clock.began for p in (first, second)]
  killed(tmp_path, steps=1, start=2)
  began = [event["began"] for event in load(tmp_path).events if event["event"] == "killed"]
  assert began == [process.clock.began for process in (first, second, third)]
  assert [beat["began"] for beat in beat_of(tmp_path)["killed"]] == [third.clock.began]


def test_a_run_that_failed_is_not_written_twice(tmp_path: Path):
  clock = Clock()

  def fail() -> None:
    with Heartbeat(tmp_path, 0, clock, 1000.0) as process, Journal(tmp_path, clock, True, pytest.fail, process) as kept:
      kept.add("start", 0)
      raise OSError("broken")

  with pytest.raises(OSError, match="broken"):
    fail()
  last = beat_of(tmp_path)
  assert load(tmp_path).event("failure")["since"] <= last["time"]  # how long nothing had changed
  assert last["began"] == clock.began  # its account is kept even if its journal is moved away
  killed(tmp_path, steps=1)
  assert [event["event"] for event in load(tmp_path).events] == ["start", "failure", "start"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"step": 1', '{"step": 1}', '{"killed": [3]}'])
def test_a_damaged_beat_is_none(tmp_path: Path, content: str):
  (tmp_path / heartbeat.FOLDER).mkdir()
  (tmp_path / heartbeat.FOLDER / "0.json").write_text(content)
  assert heartbeat.of_job(tmp_path) == {}
  assert Heartbeat(tmp_path, 0, Clock(), 1000.0).__enter__().killed == []


def test_a_folder_that_cannot_be_written_ends_nothing(tmp_path: Path):
  (tmp_path / heartbeat.FOLDER).write_text("a file")
  with Heartbeat(tmp_path, 0, Clock(), 0.01):
    time.sleep(0.05)


def test_no_beats_if_none_are_wanted(tmp_path: Path):
  with Heartbeat(tmp_path, 0, Clock(), 0):
    assert not list(tmp_path.iterdir())
  assert json.dumps(heartbeat.of_job(tmp_path)) == "{}"


def test_a_beat_says_how_long_the_host_works_in_a_step(tmp_path: Path):
  """Of the time of a step, without what it waits for devices, as a mean of the last steps."""
  clock = Clock()
  process = Heartbeat(tmp_path, 1, clock, 1000.0)
  process.after(0)
  for step in range(1, 301):
    clock.spent["data"] += 0.25 if step > 200 else 5.0
    clock.spent["train"] += 0.5
    process.after(step, waited=0.375)
  process.write()
  assert (beat_of(tmp_path, 1)["step_time"], beat_of(tmp_path, 1)["on_host"]) == (0.75, 0.375)


def beat(ago: float = 0.0, since: float = 0.0, step: int = 5, doing: str = "train") -> heartbeat.Beat:
  """The last beat of a process, written so many seconds ago, without progress for so many."""
  return {"time": 1000.0 - ago, "since": 1000.0 - since, "step": step, "doing": doing, "slowest": 0.1}


@pytest.mark.parametrize(
  "beats, writable, found",
  [
    ([beat(), beat()], True, None),
    ([beat(since=40), beat(ago=40, since=40)], True, 1),  # one is stopped, and the other waits for it
    ([beat(since=40), beat(since=40, step=4)], True, 1),  # one is behind
    ([beat(), beat(ago=40, since=40)], True, None),  # one cannot write its beats, but the job makes progress
    ([beat(ago=40, since=40), beat(ago=40, since=41)], False, None),  # the disk is full
    ([beat(ago=40, since=40), beat(ago=40, since=41)], True, 1),  # all are stopped
    ([beat(since=40), beat(ago=20, since=41)], False, 1),  # it is not, for the first one
    ([heartbeat.starting(1000.0 - 1700)], True, None),
    ([heartbeat.starting(1000.0 - 1900)], True, 0),
    ([beat(since=1900, doing="set-up"), heartbeat.starting(1000.0 - 1900)], True, 1),
  ],
)
def test_a_process_that_hangs_is_told_from_a_disk_that_is_full(beats: list, writable: bool, found: int | None):
  assert heartbeat.hanging(dict(enumerate(beats)), 1000.0, 1800.0, 30.0, lambda: writable) == found


def test_it_is_seen_whether_beats_can_be_written(tmp_path: Path):
  assert heartbeat.can_be_written(tmp_path / "run")
  assert heartbeat.of_job(tmp_path / "run") == {}
  (tmp_path / "file").touch()
  assert not heartbeat.can_be_written(tmp_path / "file")


def test_a_workdir_that_is_away_for_a_while_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  """A file system may not answer, and a disk may be full. Processes then need a moment to write a beat."""
  killed(tmp_path, steps=2)
  watcher, now, stale = heartbeat.Watcher(tmp_path), [50.0], OSError(errno.ESTALE, "stale file handle")
  monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now[0])
  assert watcher.takes_beats()
  found = watcher.beats()
  with monkeypatch.context() as away:
    away.setattr(heartbeat, "of_job", lambda workdir: (_ for _ in ()).throw(stale))
    away.setattr(heartbeat, "can_be_written", lambda workdir: False)
    assert watcher.beats() == found != {}
    assert not watcher.takes_beats()
  now[0] += heartbeat.SILENT - 1
  assert not watcher.takes_beats()
  now[0] += 2
  assert watcher.takes_beats()


def probe(workdir: Path, monkeypatch: pytest.MonkeyPatch, began: float) -> int:
  """The exit status of the liveness probe of process 3 in a container that began then."""
  monkeypatch.setattr(heartbeat, "process_start", lambda pid: began)
  monkeypatch.setattr(heartbeat, "AGAIN", 0.0)
  monkeypatch.setattr("sys.argv", ["heartbeat", str(workdir), "3"])
  try:
    heartbeat.main()
  except SystemExit as ended:
    return int(ended.code or 0)
  return 0


@pytest.mark.parametrize(
  "doing, ago, slowest, status",
  [
    ("train", 20.0, 0.1, 0),
    ("train", 40.0, 0.1, heartbeat.HANGS),
    ("train", 40.0, 8.0, 0),  # not ten times as long as the slowest step
    ("compile", 1700.0, 0.1, 0),
    ("compile", 1900.0, 0.1, heartbeat.HANGS),
  ],
)
def test_the_probe_of_a_container_finds_a_process_that_hangs(
  doing: str, ago: float, slowest: float, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
  """docs/launch/jobset.yaml runs it. An older beat is of an earlier container, and says nothing about this one."""
  killed(tmp_path, 5, rank=3)
  file = tmp_path / heartbeat.FOLDER / "3.json"
  now = time.time()
  beat = {"doing": doing, "since": now - ago, "slowest": slowest, "began": now - 3000, "step": 5}
  file.write_text(json.dumps(json.loads(file.read_text()) | beat))
  assert probe(tmp_path, monkeypatch, began=now - 3010) == status
  said = f"process 3 made no progress for {ago:.0f} s ({doing}) after step 5\n" if status else ""
  assert capsys.readouterr().out == said
  assert probe(tmp_path, monkeypatch, began=now - 100) == 0
  file.write_text(json.dumps(json.loads(file.read_text()) | {"time": now - ago}))  # it writes no beats any more
  with monkeypatch.context() as full:
    full.setattr(heartbeat, "can_be_written", lambda workdir: False)
    assert probe(tmp_path, full, began=now - 3010) == 0
  assert probe(tmp_path, monkeypatch, began=now - 3010) == status
  file.unlink()  # nothing since the container began
  assert probe(tmp_path, monkeypatch, began=now - 1700) == 0
  assert probe(tmp_path, monkeypatch, began=now - 1900) == heartbeat.HANGS
