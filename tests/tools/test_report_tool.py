"""The command that makes the page of one run or of several."""

from pathlib import Path

import pytest
from helpers import one_sentence
from reporting_runs import made

from reporting.metrics import RESULTS
from tools import report


def test_one_run_gets_the_page_that_it_wrote_itself(tmp_path: Path, capsys: pytest.CaptureFixture):
  workdir = made(tmp_path / "run")
  report.main([str(workdir)])
  assert capsys.readouterr().out == f"wrote {workdir / 'report.html'}\n"
  assert "<h1>run</h1>" in (workdir / "report.html").read_text()
  assert {"report.html", "journal.jsonl"} <= set(RESULTS)  # which a new run in the workdir moves away


def test_several_runs_share_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.chdir(tmp_path)
  runs = [str(made(tmp_path / name, seed=i)) for i, name in enumerate(("a", "b", "c"))]
  report.main(runs)
  assert "<h1>3 runs</h1>" in (tmp_path / "comparison.html").read_text()
  report.main([*runs, "--html=new/folder/page.html"])
  assert (tmp_path / "new" / "folder" / "page.html").read_text() == (tmp_path / "comparison.html").read_text()


def test_what_is_no_run_gets_one_sentence(tmp_path: Path):
  with one_sentence("RUN", "is not a folder", "give the workdir of a run"):
    report.main([str(tmp_path / "missing")])
  with one_sentence("RUN", "holds no metrics.jsonl", "give a run's workdir"):
    report.main([str(tmp_path)])
  with one_sentence("html", "is a folder"):
    report.main([str(made(tmp_path / "run")), f"--html={tmp_path}"])
