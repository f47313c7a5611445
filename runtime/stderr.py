"""Silences what C++ libraries write to standard error, such as libtpu's pages where there is no TPU."""

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Waits for one line. If the process that should send it has died instead, prints the captured file.
_WATCH = 'read -r line || { cat "$0" >&2; rm -f "$0"; }'


@contextlib.contextmanager
def silenced() -> Iterator[None]:
  """Captures standard error, at the level of the file descriptor, while the body runs.

  An exception that leaves the body carries the captured text as a note: a traceback shows it, a one-line error does
  not. C++ code may also abort the process before anything here can run, so a shell watches and then prints the text.
  """
  with tempfile.NamedTemporaryFile() as captured, contextlib.ExitStack() as cleanup:
    watch = subprocess.Popen(["sh", "-c", _WATCH, captured.name], stdin=subprocess.PIPE)
    cleanup.callback(watch.wait)
    cleanup.callback(_release, watch)
    kept = os.dup(2)
    os.dup2(captured.fileno(), 2)
    try:
      yield
    except BaseException as error:
      if text := Path(captured.name).read_text(errors="replace").strip():
        error.add_note(f"standard error until then:\n{text}")
      raise
    finally:
      os.dup2(kept, 2)
      os.close(kept)


def _release(watch: subprocess.Popen) -> None:
  assert watch.stdin
  with contextlib.suppress(BrokenPipeError):  # an interrupt from the keyboard has ended it too
    watch.stdin.write(b"\n")
    watch.stdin.close()
