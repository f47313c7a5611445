"""Folders whose experts are stored in four bits each."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import model_folders
import numpy as np
import pytest
from helpers import one_sentence
from safetensors.numpy import load_file, save_file

from checkpointing import pretrained
from checkpointing.pretrained import mxfp4

GATES = "model.layers.1.mlp.experts.gate_up_proj"


def test_numbers_are_those_of_the_standard():
  """The lower bits come first, and a scale of 127 is 1 (OCP Microscaling Formats 1.0, tables 3 and 6)."""
  blocks = np.arange(16, dtype=np.uint8)[None] * 16 + np.arange(16, dtype=np.uint8)[::-1]
  found = mxfp4.numbers(np.stack([blocks, blocks]), np.array([[127], [125]], np.uint8))
  positive = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
  every = [*positive, *(-x for x in positive)]
  assert found.shape == (2, 32)
  assert found[0, ::2].tolist() == every[::-1]
  assert found[0, 1::2].tolist() == every
  assert (found[1] * 4).tolist() == found[0].tolist()


def changed(change: Callable[[dict[str, np.ndarray]], object]) -> Callable[[Path], None]:
  def run(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")

  return run


def with_method(folder: Path, method: str) -> None:
  said = json.loads((folder / "config.json").read_text())
  (folder / "config.json").write_text(json.dumps(said | {"quantization_config": {"quant_method": method}}))


@pytest.mark.parametrize(
  "damage, parts",
  [
    (changed(lambda t: t.pop(f"{GATES}_scales")), ["gate_up_proj_scales'", "does not hold it", "copy all files"]),
    (changed(lambda t: t.pop(f"{GATES}_blocks")), ["gate_up_proj_blocks'", "does not hold it", "copy all files"]),
    (
      changed(lambda t: t.update({f"{GATES}_scales": t[f"{GATES}_scales"][:, :8]})),
      ["gate_up_proj_scales'", "U8 [2, 64, 1]", "holds U8 [2, 8, 1]"],
    ),
    (
      changed(lambda t: t.update({f"{GATES}_blocks": t[f"{GATES}_blocks"].astype(np.float16)})),
      ["gate_up_proj_blocks'", "holds F16"],
    ),
    (changed(lambda t: t[f"{GATES}_scales"].fill(255)), ["gate_up_proj_scales'", "a scale that is not a number"]),
    (lambda folder: with_method(folder, "gptq"), ["quantization_config", "cannot compute"]),
  ],
)
def test_a_folder_that_is_damaged_gets_one_sentence(damage: Callable[[Path], None], parts: list[str], tmp_path: Path):
  shutil.copytree(model_folders.FOLDER / "gpt_oss_mxfp4", tmp_path / "model")
  sizes = model_folders.program_of("gpt_oss_mxfp4").sizes
  pretrained.Folder(str(tmp_path / "model")).check(sizes)
  damage(tmp_path / "model")
  with one_sentence("init_from=", *parts):
    folder = pretrained.Folder(str(tmp_path / "model"))
    folder.check(sizes)
    pretrained.read_weight(folder, sizes, "blocks/mlp/up")
