"""Filters orbax's logs of storage errors, which we report ourselves in one line."""

import logging
import sys
from collections.abc import Callable
from typing import Any

import jax

from errors import first_line


def shorten_storage_logs() -> None:
  """From now on, drops orbax's long logs of errors that it also raises, and of tasks that an error has ended.

  In a job of several processes, each error keeps one line, because the other processes learn of it minutes later.
  """
  for logger in (logging.getLogger("absl"), logging.getLogger("asyncio")):
    logger.addFilter(_brief)  # adding it twice has no effect
  if sys.unraisablehook is not _hook:
    _others.append(sys.unraisablehook)
    sys.unraisablehook = _hook


_others: list[Callable[[Any], Any]] = []  # the hooks installed before ours; the last one handles other errors


def _hook(raised: Any) -> None:
  if not _of_storage(raised):
    _others[-1](raised)


def _brief(log: logging.LogRecord) -> bool:
  if log.name == "asyncio":
    return "never retrieved" not in log.getMessage()
  if "orbax" in log.pathname:
    if log.exc_info and log.exc_info[1]:
      log.msg, log.args, log.exc_info = f"{log.getMessage()}: {first_line(log.exc_info[1])}", (), None
    quiet = ("overriding", "size logging disabled")
    return not any(words in log.getMessage() for words in quiet) and (
      log.levelno < logging.ERROR or jax.process_count() > 1
    )
  return True


def _of_storage(raised: Any) -> bool:
  """Whether an unraisable exception comes from a read or write that was cancelled."""
  return "Event loop is closed" in str(raised.exc_value) or "_read_array_index" in str(raised.object)
