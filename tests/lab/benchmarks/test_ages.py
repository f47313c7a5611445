"""How old records are: the list of headers on the page, and what `python -m tools.benchmark ages` prints."""

import datetime
import subprocess
from pathlib import Path

import pytest

from lab.benchmarks import ages, header, pages

RUN = {"commit": "0123456789ab", "date": "2030-01-31", "command": "python x", "machine": "one", "load": 0.5}
TODAY = datetime.date(2030, 2, 2)


def test_the_page_lists_the_headers_of_all_records():
  page = ages.PAGE.read_text()
  assert pages.fill(page, ages.tables(ages.read())) == page, "run python -m tools.benchmark ages --tables"


def test_every_measured_path_exists():
  roots = pages.ROOT, Path(header.__file__).parents[2]  # of a fork that is one package, the code is in a folder
  for name, paths in {**ages.MEASURES, "others": ages.STEP}.items():
    assert all(any((root / path).exists() for root in roots) for path in paths), name
  assert set(ages.MEASURES) <= {name.split()[0] for name in ages.read()}


def test_a_record_whose_code_changed_is_marked():
  asked = []

  def changes(commit: str, paths: tuple[str, ...]) -> int | None:
    asked.append((commit, paths))
    return {"data": 1, "checkpointing": 0, "models": None}[paths[0]]

  shown = ages.report({"input": RUN, "checkpoint": RUN, "other": RUN | {"date": "2030-02-01"}}, TODAY, changes)
  assert [" ".join(line.split()) for line in shown.splitlines()] == [
    "input 2 days 1 commit since in data",
    "checkpoint 2 days no commits since in checkpointing",
    "other 1 day",  # git cannot say
  ]
  assert asked[0] == ("0123456789ab", ("data",))


def test_the_list_marks_what_is_unknown_and_why():
  unknown = RUN | {"load": None, "header_notes": {"load": "nobody wrote it down"}}
  shown = ages.tables({"one": RUN | {"dirty": True}, "two": unknown})["ages"]
  assert "| one | 2030-01-31 | 0123456, with changes | 0.5 |" in shown
  assert "| two | 2030-01-31 | 0123456 | –<sup>1</sup> |" in shown
  assert "<sup>1</sup> nobody wrote it down." in shown


def test_commits_are_counted_only_where_git_knows_the_commit(monkeypatch: pytest.MonkeyPatch):
  assert ages.commits(None, ("models",)) is None
  assert ages.commits("0" * 12, ("models",)) is None

  def git(*words: str) -> str:
    if words[0] == "merge-base" and words[2] == "gone":
      raise subprocess.CalledProcessError(1, words)
    return "3\n" if words[:3] == ("rev-list", "--count", "here..HEAD") and words[3:] == ("--", "models") else ""

  monkeypatch.setattr(header, "git", git)
  assert (ages.commits("here", ("models",)), ages.commits("gone", ("models",))) == (3, None)
