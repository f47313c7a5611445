"""The command line: sizes of mesh axes that only a user's layout has. tests/test_train.py tests the error messages."""

import pytest
from helpers import command_line_of

from runtime import command_line

CONFIG = "--config=configs/fsdp.py:tiny"


def test_sizes_of_own_mesh_axes_are_fields():
  given = ["--config.mesh.x=4", "--config.mesh.data=2", "--config.mesh.fsdp=-1", "--config.steps=3"]
  config = command_line_of(lambda flags: None, CONFIG, *given).config
  assert {axis: size for axis, size in config.mesh.items() if size} == {"data": 2, "x": 4, "fsdp": -1}
  assert config.steps == 3
  with pytest.raises(KeyError):
    config.update(stepz=3)


def test_a_mesh_size_that_is_not_a_number_is_refused(capsys: pytest.CaptureFixture):
  with pytest.raises(SystemExit) as ended:
    command_line.parse(["train.py", CONFIG, "--config.mesh.x=two"])
  assert ended.value.code == 2
  assert "mesh.x='two' is not a size" in capsys.readouterr().err
