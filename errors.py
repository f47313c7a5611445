"""The one error a user can cause, and the helper that suggests what they meant.

Every check on user input raises `ConfigError` with one sentence: the field, the value and the mend. `train.py`
prints that sentence and exits with status 2; nothing has been compiled by then.
"""

import difflib
from collections.abc import Iterable
from typing import Any


class ConfigError(ValueError):
  """Bad input: the message names the field, its value and how to mend it."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
  """Returns "; did you mean 'x'?" for the known name nearest to `name`, or a list of the known names."""
  known = sorted(known)
  nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
  return f"; did you mean '{nearest[0]}'?" if nearest else f"; use one of: {', '.join(known)}"


def one_of(field: str, value: str, known: Iterable[str]) -> str:
  """Returns `value` if it is one of `known`, else raises ConfigError naming `field`."""
  known = list(known)
  if value not in known:
    raise ConfigError(f"{field}={value!r} does not exist{did_you_mean(str(value), known)}")
  return value


def positive(field: str, value: Any) -> Any:
  """Returns `value` if it is at least 1, else raises ConfigError naming `field`."""
  if value < 1:
    raise ConfigError(f"{field}={value} must be at least 1")
  return value
