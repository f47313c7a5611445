"""The tool that lists and verifies the checkpoints of a run."""

import errno
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import config, measured, one_sentence, program, strategy

import data
import train
from checkpointing import reading, record
from checkpointing.save import Checkpoints
from runtime.storage.answers import StorageError
from tools import checkpoint, export
from training.loop import LoopState
from training.program import TrainState


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """A run with the programs of test_train.py."""
  workdir = tmp_path_factory.mktemp("ended")
  fields = {"steps": 4, "eval_every": 2, "sample_length": 0}
  train.train(config("two_d", **fields), workdir)
  return workdir


@pytest.mark.full
def test_the_list_shows_step_loss_strategy_and_health(ended: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
  run = tmp_path / "run"
  shutil.copytree(ended, run)
  shutil.copytree(run / "checkpoints" / "2", run / "checkpoints" / "3.orbax-checkpoint-tmp")
  shutil.copytree(run / "checkpoints" / "2", run / "checkpoints" / "damaged-1-1")
  (run / "checkpoints" / "2" / "run" / "metadata").unlink()
  assert checkpoint.main([str(run)]) == 1
  lines = capsys.readouterr().out.splitlines()
  assert [line.split()[0] for line in lines[1:]] == ["1", "2", "3", "4"]
  assert [line.rpartition("; ")[2] for line in lines[1:]] == [
    "set aside", "damaged: its record cannot be read", "unfinished", "whole",
  ]  # fmt: skip
  assert "two_d on mesh data=4 × model=2" in lines[4]
  loss = measured(run)[-1]["loss"]
  assert f"{loss:.4f}" in lines[4]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """The checkpoints of such a run, but of random numbers."""
  asked, workdir = config("two_d"), tmp_path_factory.mktemp("saved")
  runner, dataset = strategy("two_d", program()), data.load(asked)

  def state(step: int) -> TrainState:
    random = np.random.default_rng(step)
    draw = lambda x: random.normal(size=x.shape).astype(x.dtype) if x.ndim else np.full((), step, x.dtype)
    return jax.device_put(jax.tree.map(draw, runner.abstract_state()), runner.state_sharding)

  with Checkpoints(workdir / "checkpoints", 2, 0, lambda _: None, pytest.fail) as writer:
    for step in (2, 4):
      writer.save(state(step), record.make(asked, dataset, runner), LoopState(step))
  return workdir


def test_verifying_reads_every_array(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
  assert checkpoint.main([str(saved), "--verify"]) == 0
  assert capsys.readouterr().out.count("arrays verified") == 2
  run = tmp_path / "run"
  shutil.copytree(saved, run)
  # The files are whole but of another step. Only the digests reveal that.
  shutil.rmtree(run / "checkpoints" / "4" / "params")
  shutil.copytree(run / "checkpoints" / "2" / "params", run / "checkpoints" / "4" / "params")
  assert checkpoint.main([str(run), "--step=4"]) == 0
  assert checkpoint.main([str(run), "--step=4", "--verify"]) == 1
  assert "damaged: params/blocks/attention/key is not what was saved" in capsys.readouterr().out
  for file in (run / "checkpoints" / "2").glob("optimizer/ocdbt.process_0/d/*"):
    file.write_bytes(b"")
  assert checkpoint.main([str(run), "--step=2", "--verify"]) == 1
  newest = run / "checkpoints" / "4"
  read = export.reader(newest, reading.read_record(newest))
  for damage in (lambda: None, lambda: shutil.rmtree(newest / "params")):  # of another step; without files
    damage()
    with one_sentence("workdir=", "4' is damaged: params/blocks/attention/key", "use another checkpoint"):
      read("blocks/attention/key")


def test_a_missing_folder_or_step_is_one_sentence(saved: Path, tmp_path: Path):
  with one_sentence("workdir=", "has no folder checkpoints"):
    checkpoint.main([str(tmp_path)])
  with one_sentence("step=3", "[2, 4]"):
    checkpoint.main([str(saved), "--step=3"])


def test_the_parameters_can_be_read_elsewhere_as_the_page_says(saved: Path):
  """By a process with one device, where eight wrote them, and without the code of this repository."""
  page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
  code = re.search(r"```python\n(.*?)```", page, re.DOTALL).group(1)
  code = code.replace("/path/to/runs/mine/checkpoints/252", str(saved / "checkpoints" / "4"))
  code += "print(len(jax.devices()), params['embedding'].shape, params['blocks']['mlp']['up'].dtype)"
  done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, env={}, timeout=100)
  vocab, width = config().model.vocab_size, config().model.width
  assert done.stdout.strip() == f"1 ({vocab}, {width}) float32", done.stderr


def test_storage_that_does_not_answer_is_not_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  def read(*_: object) -> None:
    raise StorageError(errno.EACCES, "gs://a/b: the credentials have expired")

  monkeypatch.setattr(checkpoint.reading, "read_array", read)
  with pytest.raises(StorageError, match="the credentials have expired"):
    checkpoint.verify(checkpoint.Found(tmp_path / "3", 1, {"arrays": {"step": []}}, "whole"))
