"""Records carry their origin: every record says its commit, date, command, machine and load, or why it does not."""

import copy
import datetime
import json
import re
from pathlib import Path
from typing import Any

import pytest

from lab.benchmarks import header, pages

FILES = sorted(pages.RESULTS.glob("*.json"))
HEADER = {"commit": "0123456789ab", "date": "2030-01-31", "command": "python x", "machine": "one", "load": 0.5}


def test_there_are_records():
  assert len(FILES) >= 22


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_record_says_where_it_comes_from(file: Path):
  record = json.loads(file.read_text())
  assert header.problems(record) == []
  for run in header.runs(record).values():
    assert run["commit"] is None or re.fullmatch(r"[0-9a-f]{7,40}", run["commit"])
    assert datetime.date.fromisoformat(run["date"]) <= datetime.date.today() + datetime.timedelta(days=1)
    commands = r"python -m (\w+\.)?tools\.(benchmark|explain) |make "
    assert record.get("kind") == "observed" or re.match(commands, run["command"])
    assert isinstance(run["load"], float | None)
    assert set(run.get("header_notes", {})) <= set(header.FIELDS)


@pytest.mark.parametrize("field", header.FIELDS)
def test_a_field_of_the_header_that_is_missing_or_null_is_found(field: str, tmp_path: Path):
  without = {name: value for name, value in HEADER.items() if name != field}
  both: list[dict[str, Any]] = [{"stacks": [HEADER, without]}, {"steps": {"one": HEADER, "two": without}}]
  for record, where in zip(both, ("1", "two"), strict=True):
    assert header.problems(record) == [f"{where}: {field} is missing"]
    with pytest.raises(ValueError, match=f"x.json has no whole header: {where}: {field} is missing"):
      header.write(tmp_path / "x.json", record)
  assert not (tmp_path / "x.json").exists()
  unknown = HEADER | {field: None}
  assert header.problems({"stacks": [unknown]}) == [f"0: {field} is null, and header_notes says no reason"]
  assert header.problems({"stacks": [unknown | {"header_notes": {field: "nobody wrote it down"}}]}) == []


def test_what_begins_now_has_a_header_but_command_and_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  begun = header.started()
  assert begun["load"] >= 0
  assert begun["date"] == datetime.date.today().isoformat()
  record = header.host() | begun | {"command": "python x", "values": [1.0]}
  header.write(tmp_path / "x.json", copy.deepcopy(record))
  assert json.loads((tmp_path / "x.json").read_text())["values"] == [1.0]
  monkeypatch.setattr(header, "ROOT", tmp_path)  # not a checkout of git
  outside = header.host() | header.started() | {"command": "python x"}
  assert outside["commit"] is None
  header.write(tmp_path / "x.json", outside)
  assert json.loads((tmp_path / "x.json").read_text())["header_notes"] == {
    "commit": "measured outside a checkout of git"
  }


def test_every_record_is_written_with_its_header():
  """No measurement writes JSON into its record by itself."""
  folder = Path(header.__file__).parent
  files = [file for file in folder.rglob("*.py") if file.name != "header.py"]
  own = [
    file.name for file in files if re.search(r"(RECORD\w*(\[.*\])?|FILE|file|path)\.write_text\(json", file.read_text())
  ]
  assert own == []
  writers = [file for file in files if re.search(r"\b(header\.)?write\(\w*(RECORD|FILE|file|path)", file.read_text())]
  kept = [file for file in files if re.search(r"import .*\b(keep|command)\b", file.read_text())]
  assert {"throughput.py", "rates.py", "upgrade.py", "record.py", "timeline.py"} <= {file.name for file in writers}
  assert all(
    "started()" in file.read_text() for file in {*writers, *kept} if file.name not in ("pages.py", "record.py")
  )
