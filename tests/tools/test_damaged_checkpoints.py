"""Every tool that reads a damaged checkpoint says so in a sentence, and leaves nothing half-written."""

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import one_sentence
from kept import make

from checkpointing import reading
from errors import ConfigError
from reporting import source
from tools import checkpoint, export


def lacking_an_array(newest: Path) -> str:
  saved = json.loads((newest / reading.RECORD).read_text())
  del saved["arrays"]["params/blocks/mlp/up"]
  (newest / reading.RECORD).write_text(json.dumps(saved))
  return "its record lacks params/blocks/mlp/up"


def without_parameters(newest: Path) -> str:
  shutil.rmtree(newest / "params")
  return "params/blocks/attention/key"


def without_a_record(newest: Path) -> str:
  (newest / reading.RECORD).unlink()
  return "its record cannot be read"


def with_half_a_record(newest: Path) -> str:
  (newest / reading.RECORD).write_text('{"step": 2')
  return "its record cannot be read"


DAMAGE = [lacking_an_array, without_parameters, without_a_record, with_half_a_record]


@pytest.fixture
def workdir(tmp_path: Path) -> Path:
  """A run with two checkpoints, 10 and 20."""
  at = tmp_path / "run"
  with zipfile.ZipFile(make.FOLDER / "runs" / "windows" / "workdir.zip") as archive:
    archive.extractall(at)
  shutil.copytree(reading.newest(at), at / "checkpoints" / "10")
  return at


@pytest.mark.parametrize("damage", DAMAGE)
def test_an_export_of_a_damaged_checkpoint_names_another_one(damage: Callable[[Path], str], workdir: Path):
  why = damage(reading.newest(workdir))
  says = [
    f"{str(workdir / 'checkpoints/20')!r} is damaged",
    why,
    f"use another checkpoint, as {workdir}/checkpoints/10",
  ]
  with one_sentence(*says):
    export.main([str(workdir), f"--out={workdir.parent / 'out'}"])
  assert [file.name for file in workdir.parent.iterdir()] == ["run"]


@pytest.mark.parametrize("damage", [without_a_record, with_half_a_record])
def test_so_does_what_opens_a_model(damage: Callable[[Path], str], workdir: Path):
  why = damage(reading.newest(workdir))
  for path in (workdir, workdir / "checkpoints" / "20"):
    with one_sentence("is damaged", why, f"as {workdir}/checkpoints/10"):
      source.open_model(str(path))
  shutil.rmtree(workdir / "checkpoints" / "10")
  with one_sentence("is damaged", why, "restore it from a copy"):
    source.open_model(str(workdir))


@pytest.mark.parametrize("damage", DAMAGE[1:])
def test_verify_finds_the_same(damage: Callable[[Path], str], workdir: Path, capsys: pytest.CaptureFixture):
  damage(reading.newest(workdir))
  assert checkpoint.main([str(workdir), "--verify", "--step=20"]) == 1
  assert "damaged: " in capsys.readouterr().out


def test_a_folder_that_is_no_checkpoint_is_not_said_to_be_damaged(tmp_path: Path):
  with pytest.raises(ConfigError, match="names no workdir with a checkpoint"):
    source.open_model(str(tmp_path))
