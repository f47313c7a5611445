"""What C++ code prints while silenced is hidden from the user, and shown if the program fails."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.stderr import silenced

ROOT = Path(__file__).parents[2]


def test_silenced_output_is_not_shown(capfd: pytest.CaptureFixture):
  with silenced():
    os.write(2, b"pages of it\n")
  os.write(2, b"after\n")
  assert capfd.readouterr().err == "after\n"


def test_an_exception_has_the_silenced_output_as_a_note(capfd: pytest.CaptureFixture):

  @silenced()
  def fail() -> None:
    os.write(2, b"the reason\n")
    raise RuntimeError("failed")

  with pytest.raises(RuntimeError) as caught:
    fail()
  assert str(caught.value) == "failed"
  assert caught.value.__notes__ == ["standard error until then:\nthe reason"]
  assert capfd.readouterr().err == ""


def test_silenced_output_is_shown_on_an_abort():
  """A failed C++ check aborts the process, and no Python code runs afterwards."""
  program = "import os; from runtime.stderr import silenced\nwith silenced():\n  os.write(2, b'last words'); os.abort()"
  done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
  assert done.returncode < 0
  assert done.stderr == "last words"
