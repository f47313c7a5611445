"""Standard streams: silences what C++ libraries write to standard error, and prints where nobody may be reading.

Libtpu writes pages to standard error where there is no TPU.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
