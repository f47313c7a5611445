"""Keeps from the user what libraries print in pages, such as about an error in storage that we tell in one line."""

import contextlib
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax


def quiet() -> None:
  """From now on leaves out what orbax prints about errors that it also raises, and about tasks that an error ended.

  In a job of several processes a line of each stays: an error of one is raised in the others minutes later.
  """
  for logger in (logging.getLogger("absl"), logging.getLogger("asyncio")):
    logger.addFilter(_brief)  # once: a filter that is there is not added again
  if sys.unraisablehook is not _hook:
    _others.append(sys.unraisablehook)
    sys.unraisablehook = _hook


_others: list[Callable[[Any], Any]] = []  # the hooks before ours, the last of which is called for all else


def _hook(raised: Any) -> None:
  if not _of_storage(raised):
    _others[-1](raised)


def _brief(log: logging.LogRecord) -> bool:
  if log.name == "asyncio":
    return "never retrieved" not in log.getMessage()
  if "orbax" in log.pathname:
    if log.exc_info and log.exc_info[1]:
      log.msg, log.args, log.exc_info = f"{log.getMessage()}: {reason(log.exc_info[1])}", (), None
    return "overriding" not in log.getMessage() and (log.levelno < logging.ERROR or jax.process_count() > 1)
  return True


def _of_storage(raised: Any) -> bool:
  """Whether an exception that nobody can catch comes of a reading or writing that was given up."""
  return "Event loop is closed" in str(raised.exc_value) or "_read_array_index" in str(raised.object)


def reason(error: BaseException) -> str:
  """The first line of an error, shortened."""
  text = (str(error).strip() or type(error).__name__).partition("\n")[0]
  return text if len(text) <= 300 else text[:140] + " … " + text[-140:]


# Waits for a line; where the process that should send it is gone, prints the file that it leaves.
_WATCH = 'read -r line || { cat "$0" >&2; rm -f "$0"; }'


@contextlib.contextmanager
def silenced() -> Iterator[None]:
  """Keeps what C++ code writes to standard error from the user, such as what libtpu says where there is no TPU.

  An exception that leaves the block has it as a note, which a traceback shows and an error of one line does not. C++
  may also abort, after its last words and before anything here can run. So a shell watches, and prints them then.
  """
  with tempfile.NamedTemporaryFile() as written, contextlib.ExitStack() as undone:
    watch = subprocess.Popen(["sh", "-c", _WATCH, written.name], stdin=subprocess.PIPE)
    undone.callback(watch.wait)
    undone.callback(_release, watch)
    kept = os.dup(2)
    os.dup2(written.fileno(), 2)
    try:
      yield
    except BaseException as error:
      if said := Path(written.name).read_text(errors="replace").strip():
        error.add_note(f"standard error until then:\n{said}")
      raise
    finally:
      os.dup2(kept, 2)
      os.close(kept)


def _release(watch: subprocess.Popen) -> None:
  assert watch.stdin
  with contextlib.suppress(BrokenPipeError):  # an interrupt from the keyboard has ended it too
    watch.stdin.write(b"\n")
    watch.stdin.close()
