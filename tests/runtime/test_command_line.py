"""The command line: sizes of mesh axes that only a user's layout has. tests/test_train.py tests the error messages."""

import sys

import pytest

from runtime import command_line


def parse(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[list[str], dict[str, int]]:
  """The arguments left for ml_collections, and the sizes of the user's own mesh axes."""
  argv, own_axes = ["train.py", "--config=configs/fsdp.py:tiny", *arguments], {}
  monkeypatch.setattr(sys, "argv", list(argv))
  rest = command_line._take_own_axes(argv, own_axes)
  assert sys.argv == rest
  return rest[2:], own_axes


def test_only_sizes_of_own_mesh_axes_are_taken(monkeypatch: pytest.MonkeyPatch):
  given = ["--config.mesh.x=4", "--config.mesh.data=2", "--config.mesh.fsdp=-1", "--config.steps=3"]
  assert parse(monkeypatch, *given) == (["--config.mesh.data=2", "--config.steps=3"], {"x": 4, "fsdp": -1})


def test_a_mesh_size_that_is_not_a_number_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
  argv = ["train.py", "--config=configs/fsdp.py:tiny", "--config.mesh.x=two"]
  with pytest.raises(SystemExit) as ended:
    command_line.parse(argv, own_axes={})
  assert ended.value.code == 2
  assert "mesh.x='two' is not a size" in capsys.readouterr().err
