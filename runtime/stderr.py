"""Standard streams: silences C++ libraries, prints where nobody may be reading, and shows foreign text as text.

Libtpu writes pages to standard error where there is no TPU.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from errors import visible

# Waits for one line. If the process that should send it has died instead, prints the captured file.
_WATCH = 'read -r line || { cat "$0" >&2; rm -f "$0"; }'


@contextlib.contextmanager
def silenced() -> Iterator[list[str]]:
  """Captures standard error, at the level of the file descriptor, while the body runs.

  Yields a list, which has the captured text as its one entry when the body has ended.

  An exception that leaves the body carries the captured text as a note: a traceback shows it, a one-line error does
  not. C++ code may also abort the process before anything here can run, so a shell watches and then prints the text.
  """
  said: list[str] = []
  try:
    captured = tempfile.NamedTemporaryFile()  # noqa: SIM115  # entered below
  except OSError:  # no folder for temporary files can be written: then it is shown
    yield said
    return
  with captured, contextlib.ExitStack() as cleanup:
    watch = subprocess.Popen(["sh", "-c", _WATCH, captured.name], stdin=subprocess.PIPE)
    cleanup.callback(watch.wait)
    cleanup.callback(_release, watch)
    kept = os.dup(2)
    os.dup2(captured.fileno(), 2)
    try:
      yield said
    except BaseException as error:
      if text := Path(captured.name).read_text(errors="replace").strip():
        error.add_note(f"standard error until then:\n{text}")
      raise
    finally:
      os.dup2(kept, 2)
      os.close(kept)
      said.append(Path(captured.name).read_text(errors="replace"))


class Visible:
  """A stream on which foreign text is only text (errors.visible). It keeps lines, and what tqdm draws bars with."""

  UP = "\x1b[A"  # the line before, where several bars are shown

  def __init__(self, stream: Any, bars: bool):
    self._stream, self._bars = stream, bars

  def write(self, text: str) -> int:
    keep, parts = ("\n\t\r", text.split(self.UP)) if self._bars else ("\n\t", [text])
    self._stream.write(self.UP.join(visible(part, keep) for part in parts))
    return len(text)

  def __getattr__(self, name: str) -> Any:
    return getattr(self._stream, name)


@contextlib.contextmanager
def visible_streams() -> Iterator[None]:
  """While the body runs, what is printed is shown by `Visible`; so is a traceback that ends the program."""
  out, error = Visible(sys.stdout, bars=False), Visible(sys.stderr, bars=True)

  def shown(*raised: Any) -> None:
    sys.stderr.write(visible("".join(traceback.format_exception(*raised)), "\n\t"))

  sys.excepthook = shown
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):  # type: ignore[type-var]
    yield


def print_if_read(print_it: Callable[[], Any], then: str) -> None:
  """Prints to standard output. If nobody takes that any more (`| head`, a full disk), says so once, and drops the rest.

  `then`: what happens now, as the end of a sentence.
  """
  try:
    print_it()
  except OSError as error:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    with contextlib.suppress(OSError):
      print(f"error: standard output cannot be written ({error.strerror}); {then}", file=sys.stderr, flush=True)


def _release(watch: subprocess.Popen) -> None:
  assert watch.stdin
  with contextlib.suppress(BrokenPipeError):  # an interrupt from the keyboard has ended it too
    watch.stdin.write(b"\n")
    watch.stdin.close()
