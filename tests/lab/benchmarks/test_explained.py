"""The record of what `tools.explain` says: its steps are those of the command, and its tables show them."""

import json
import sys
from pathlib import Path

import pytest

from configs import base
from lab.benchmarks import explained, header

RECORD = json.loads(explained.RECORD.read_text())


def test_the_record_has_every_step_as_the_command_would_make_it():
  assert list(RECORD["steps"]) == list(explained.STEPS)
  for name, run in RECORD["steps"].items():
    assert run["command"] == f"python -m tools.explain {explained.STEPS[name]}"


@pytest.mark.parametrize("name", explained.STEPS)
def test_the_fields_and_folders_of_a_step_exist(name: str):
  fields = base.get_config().to_dict()
  for flag, _, value in (word.partition("=") for word in explained.STEPS[name].split()):
    path = flag.removeprefix("--config.").split(".")
    if flag == "--config.init_from":
      assert (explained.PUBLISHED / value / "config.json").exists()
    elif flag.startswith("--config."):
      assert path[0] == "mesh" or (path[1] in fields[path[0]] if len(path) > 1 else path[0] in fields), flag
    else:
      assert flag in ("--config", "--topology"), flag


def test_a_step_runs_explain_and_keeps_its_figures(monkeypatch: pytest.MonkeyPatch):
  asked = []

  def run(command: list[str], **_):
    asked.extend(command)
    file = Path(command[-1].removeprefix("--json="))
    sent = [{"kind": "all-gather", "sent_in_step": 3e9}, {"kind": "all-reduce", "sent_in_step": 1e9}]
    found = {name: {} for name in ("mesh", "device", "batch_size", "memory", "time", "compile_seconds")}
    file.write_text(json.dumps(found | {"communication": sent, "theory": [{"bytes": 4e9}], "excess": [], "more": 1}))
    return type("Done", (), {"returncode": 0})

  monkeypatch.setattr(explained.subprocess, "run", run)
  monkeypatch.setattr(explained.metadata, "version", lambda package: "1")
  monkeypatch.setattr(header, "checked_out", lambda: ("0123456789ab", False))
  made = explained.measure("mixtures/Mixtral-h100", explained.STEPS["mixtures/Mixtral-h100"])
  assert asked[:3] == [sys.executable, "-m", "tools.explain"]
  assert f"--config.init_from={explained.PUBLISHED / explained.MIXTRAL}" in asked
  assert header.problems({"steps": {"one": made}}) == []
  assert str(explained.PUBLISHED) not in json.dumps(made)
  assert (made["figures"]["sent"], made["figures"]["gathered"], made["figures"]["theory"]) == (4e9, 3e9, 4e9)
  assert "more" not in made["figures"]


def test_the_tables_show_the_figures():
  made = explained.tables(RECORD)
  assert "| h100:1x1 | `all` | 365.6 GB | 29.45 GB | 31.02 GB |" in made["unroll"]
  assert "| Mixtral-8x7B | h100:8x8 (64) | 128 | data=8 × expert=8 | 19.7 GB | 62.1 GB | 1.00 |" in made["mixtures"]
  assert made["long"].count("context=64") == 2
  assert "arithmetic" in made["mixtures"]
