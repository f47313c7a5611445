"""The command line: sizes of mesh axes that only a user's layout has, and locales. test_train.py tests the messages."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT, command_line_of, one_sentence

from errors import ConfigError, Unavailable
from runtime import command_line
from runtime.storage.answers import StorageError

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


@pytest.mark.parametrize(
  "text, says",
  [
    ("def get_config(preset=''):\n  raise RuntimeError('no\\nsuch')", "RuntimeError: no, line 2"),
    ("def get_config(", "SyntaxError: '(' was never closed"),
    ("get_config = 3", "TypeError: 'int' object is not callable"),
    ("def get_config():\n  return {}", "takes 0 positional arguments"),
    ("def get_config(preset):\n  return {}", "gives a dict"),
    ("steps = 3", "has no attribute 'get_config'"),
  ],
)
def test_a_config_file_that_is_wrong_is_refused(text: str, says: str, tmp_path: Path):
  file = tmp_path / "own.py"
  file.write_text(text)
  with one_sentence(f"config={str(file)!r}", says):
    command_line.load_config(f"{file}:tiny")


@pytest.mark.parametrize(
  "error, status",
  [
    (ConfigError("workdir='a' is a file"), command_line.BAD_INPUT),
    (Unavailable("workdir='a' is in use"), command_line.FAILED),
    (StorageError(errno.EIO, "gs://a/b: storage cannot be reached"), command_line.FAILED),
    (StorageError(errno.EACCES, "gs://a/b: the credentials have expired"), command_line.BAD_INPUT),
  ],
)
def test_an_error_that_users_can_act_on_is_one_line(error: Exception, status: int, capsys: pytest.CaptureFixture):
  with pytest.raises(SystemExit) as ended, command_line.bad_input_ends_the_program():
    raise error
  assert (ended.value.code, capsys.readouterr().err) == (status, f"error: {error}\n")


def test_text_is_utf8_whatever_the_locale(tmp_path):
  """What is printed, and what is written to a file. Without the restart an ASCII locale has no ×."""
  program = tmp_path / "program.py"
  program.write_text(
    "import pathlib, sys\n"
    f"sys.path.insert(0, {str(ROOT)!r})\n"
    "from runtime import command_line\n"
    "with command_line.bad_input_ends_the_program():\n"
    "  pathlib.Path(sys.argv[1]).write_text('data=2 × model=4')\n"
    "  print(pathlib.Path(sys.argv[1]).read_text())\n",
    encoding="utf-8",
  )
  ascii_locale = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
  ran = subprocess.run(
    [sys.executable, str(program), str(tmp_path / "é")], env=os.environ | ascii_locale, capture_output=True, check=False
  )
  assert (ran.returncode, ran.stdout.decode()) == (0, "data=2 × model=4\n"), ran.stderr.decode()


@pytest.mark.parametrize("stream", [1, 2])
def test_what_is_printed_to_a_closed_stream_gets_into_no_file(stream: int, tmp_path: Path):
  program, file = tmp_path / "program.py", tmp_path / "metrics"
  program.write_text(
    "import os, sys\n"
    f"sys.path.insert(0, {str(ROOT)!r})\n"
    "from runtime import command_line\n"
    "with command_line.bad_input_ends_the_program():\n"
    "  kept = open(sys.argv[1], 'w')\n"
    f"  os.write({stream}, b'a library prints')\n"
    "  print('we print', sys.stdout.isatty(), sys.stderr.isatty())\n"
  )
  shell = ["sh", "-c", f'exec "$0" "$@" {stream}>&-', sys.executable, str(program), str(file)]
  ran = subprocess.run(shell, capture_output=True, text=True, check=False)
  assert (ran.returncode, file.read_text()) == (0, ""), ran.stderr


def test_a_refused_utf8_mode_starts_the_program_only_once():
  """`-X utf8=0` wins over PYTHONUTF8, so starting again would never end."""
  code = "from runtime import command_line\nwith command_line.bad_input_ends_the_program():\n  print('ran')"
  ascii_locale = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
  command = [sys.executable, "-X", "utf8=0", "-c", code]
  ran = subprocess.run(command, cwd=ROOT, env=os.environ | ascii_locale, capture_output=True, check=False, timeout=60)
  assert (ran.returncode, ran.stdout) == (0, b"ran\n")
