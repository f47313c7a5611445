"""What C++ code says while it is silenced is kept from the user, until it is needed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.stderr import silenced

ROOT = Path(__file__).parents[2]


def test_what_is_said_is_not_shown(capfd: pytest.CaptureFixture):
  with silenced():
    os.write(2, b"pages of it\n")
  os.write(2, b"after\n")
  assert capfd.readouterr().err == "after\n"


def test_an_error_has_what_was_said_as_a_note(capfd: pytest.CaptureFixture):

  @silenced()
  def fail() -> None:
    os.write(2, b"the reason\n")
    raise RuntimeError("failed")

  with pytest.raises(RuntimeError) as caught:
    fail()
  assert str(caught.value) == "failed"
  assert caught.value.__notes__ == ["standard error until then:\nthe reason"]
  assert capfd.readouterr().err == ""


def test_last_words_before_an_abort_are_shown():
  """As C++ ends where one of its checks fails: no Python runs after it."""
  program = "import os; from runtime.stderr import silenced\nwith silenced():\n  os.write(2, b'last words'); os.abort()"
  done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
  assert done.returncode < 0
  assert done.stderr == "last words"
