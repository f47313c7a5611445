"""What a file is: the one place that says it, for training, `tools.prepare`, the run's `data` line and errors.

survey.py finds the files at a path. content.py says what is in each, by its first bytes. places.py and datasets.py say
which split has it, by names and by what a data set says of itself, and leftovers.py what is no data. verdicts.py then
decides which files are read, and why the others are not. kinds.py has the words for all of it. table.py shows it.
"""

import dataclasses
import os

from data.recognition.kinds import FORMS, ROWS, TEXT, TOKENS
from data.recognition.places import TRAIN, VALIDATION
from data.recognition.survey import surveyed
from data.recognition.table import table
from data.recognition.verdicts import AUTO, Verdict, Verdicts, judge, settled, validating
from errors import ConfigError, one_of

__all__ = [
  "AUTO",
  "FORMS",
  "ROWS",
  "TEXT",
  "TOKENS",
  "Verdict",
  "Verdicts",
  "check",
  "check_held_out",
  "recognise",
  "settled",
  "validating",
]


def recognise(path: str, field: str, cache_dir: str = "", form: str = AUTO) -> Verdicts:
  """The verdicts on the files at a path: a file, a folder, or several separated by commas, in one form.

  The splits are those that names say; `settled` decides what each file is for. `field` names the path in errors. With a
  `cache_dir`, files that did not change are not opened again.

  Raises ConfigError for a path that does not exist, that holds nothing of this form, or the same file twice.
  """
  one_of("data.form", form, (AUTO, *FORMS))
  names = list(filter(None, map(str.strip, path.split(","))))
  parts = []
  for name in names:
    place = os.path.abspath(os.path.expanduser(name))
    if not os.path.exists(place):
      raise ConfigError(f"{field}={name!r} does not exist; use a file, a folder, or several separated by commas")
    parts.append(judge(surveyed(place, f"{field}={name!r}", cache_dir), form, alone=len(names) == 1))
  if not parts:
    raise ConfigError(f"{field}={path!r} names no file; use a file, a folder, or several separated by commas")
  whose: dict[str, int] = {}
  for number, part in enumerate(parts):
    for verdict in part.read:
      if whose.setdefault(verdict.file.path, number) != number:
        raise ConfigError(
          f"{field}={path!r} holds {verdict.file.path!r} twice; name it once, or give it a weight in a mixture"
        )
  forms = {part.form for part in parts}
  if len(parts) > 1 and TOKENS in forms:
    raise ConfigError(
      f"{field}={path!r} lists token files; give each a weight instead, such as {dict.fromkeys(names, 1.0)}"
    )
  if len(parts) == 1:
    return parts[0]
  together = tuple(verdict for part in parts for verdict in part.all)
  return dataclasses.replace(parts[0], all=together, hidden=sum(part.hidden for part in parts))


def check(path: str, cache_dir: str = "", form: str = AUTO, held_out: bool = False) -> str:
  """What happens to the files at a path, as a table for people. Raises ConfigError as a run would.

  `held_out`: whether data.validation_path is validated on.
  """
  verdicts = recognise(path, "data.path", cache_dir, form)
  final = settled(verdicts.all, f"data.path={path!r}")
  return _shown(path, list(map(_to_train_on, final)) if held_out else final, verdicts)


def check_held_out(path: str, cache_dir: str = "", form: str = AUTO) -> str:
  """The same for data.validation_path."""
  verdicts = recognise(path, "data.validation_path", cache_dir, form)
  return _shown(path, validating(verdicts), verdicts)


def _shown(path: str, final: list[Verdict], verdicts: Verdicts) -> str:
  read = [verdict for verdict in final if not verdict.why]
  summary = f"{path}: {len(read):,} of {len(verdicts.all):,} files are read as {verdicts.form}"
  return f"{summary}\n{table(final, verdicts.hidden)}"


def _to_train_on(verdict: Verdict) -> Verdict:
  """A verdict where `data.validation_path` is validated on."""
  if verdict.why:
    return verdict
  why = "data.validation_path is validated on" if verdict.split == VALIDATION else ""
  return verdict._replace(split=None if why else TRAIN, why=why)
