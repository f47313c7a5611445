"""Which split a file belongs to, by its name, its folder, or what a data set says of itself.

A name says it by one of the words of WORDS, as in `train-00000-of-00012.parquet`, `c4-validation.json.gz` and
`val/part-0.jsonl`. What is declared comes first: the splits of a saved DatasetDict of Hugging Face's `datasets`, and
the `configs` at the top of a README.md of its hub.
"""

import dataclasses
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

from errors import ConfigError, first_line, shown

TRAIN, VALIDATION, TEST = "train", "validation", "test"
WORDS = {
  "train": TRAIN, "training": TRAIN, "validation": VALIDATION, "valid": VALIDATION, "val": VALIDATION,
  "dev": VALIDATION, "development": VALIDATION, "heldout": VALIDATION, "holdout": VALIDATION,
  "test": TEST, "testing": TEST, "eval": TEST, "evaluation": TEST,
}  # fmt: skip
WORD = re.compile(rf"(?<![a-z ])(?:{'|'.join(WORDS)})(?![a-z ])", re.IGNORECASE)  # "a photo of a train" names none
STEMS = ("train", "val", "dev", "test", "held", "hold")  # a part of each of WORDS
CAUTION = (TEST, VALIDATION, TRAIN)  # of several words in one name, the first of these counts
# Names of source code, where such words mean something else: test.py is no test split.
CODE = re.compile(
  r"\.(py|pyi|ipynb|c|h|cc|cpp|cxx|hh|hpp|cu|cuh|m|mm|java|kt|scala|js|jsx|mjs|ts|tsx|go|rs|rb|php|pl|pm|sh|bash|ps1"
  r"|swift|lua|r|jl|cs|fs|hs|ml|ex|exs|erl|clj|dart|sql|css|scss|html|htm|vue|yaml|yml|toml|cfg|ini|xml|cmake|mk"
  r"|gradle|proto|asm|s|v|sv|vhd)$",
  re.IGNORECASE,
)
SHOWN = 3  # configs that an error names
WILDCARDS = 4  # `*` and `**` of a pattern, at most
FRONT = re.compile(r"\A---[ \t]*\n(.*?)^---[ \t]*$", re.DOTALL | re.MULTILINE)  # YAML at the top of a README


def named(relative: str) -> str | None:
  """The split that a path within a folder names. The first part of the path that names one decides, so folders do."""
  lower = relative.lower()
  if not any(map(lower.__contains__, STEMS)):  # as most
    return None
  for part in relative.split("/"):
    if found := split_of(part):
      return found
  return None


def split_of(name: str) -> str | None:
  """The split that the name of a file or a folder says; None if it says none."""
  found = {WORDS[word.lower()] for word in WORD.findall(name)}
  return next((split for split in CAUTION if split in found), None)


def is_code(name: str) -> bool:
  return CODE.search(name) is not None


@dataclasses.dataclass(frozen=True)
class Card:
  """What a README.md of the hub says about files.

  Attributes:
    config: the name of the config.
    patterns: the name of each split, with the patterns of its files; "" where the name of a file says its split.
  """

  config: str
  patterns: tuple[tuple[str, re.Pattern[str]], ...]

  def split(self, relative: str) -> str | None:
    """The name of the split that holds a file; None if no split does."""
    found = next((name for name, pattern in self.patterns if pattern.fullmatch(relative)), None)
    return (named(relative) or TRAIN) if found == "" else found


def card(path: str, said: str, names: Iterable[str]) -> Card | None:
  """What the README.md at `path` says about files with these `names`, relative to its folder. None if it says nothing.

  Several configs are several data sets. Raises ConfigError if none of them is the default one.
  """
  names, cards = list(names), list(_cards(path, said))
  for one in cards:
    if one.config == "default" and any(one.split(name) for name in names):
      return one
  by_files: dict[tuple[str | None, ...], Card] = {}
  for one in cards:
    files = tuple(map(one.split, names))
    if any(files):
      by_files.setdefault(files, one)
    if len(by_files) > SHOWN:  # there may be thousands of configs and files
      break
  found = list(by_files.values())
  if len(found) > 1:
    more = " and more" if len(found) > SHOWN else ""
    raise ConfigError(
      f"{said} has a README.md with several configs, {', '.join(one.config for one in found[:SHOWN])}{more}; name the "
      "folder or the files of one, separated by commas"
    )
  return found[0] if found else None


def _cards(path: str, said: str) -> Iterator[Card]:
  import yaml

  with open(path, encoding="utf-8-sig", errors="replace") as file:
    front = FRONT.match(file.read(1 << 20))
  try:
    given = yaml.safe_load(front[1]) if front else None
  except (yaml.YAMLError, RecursionError, ValueError) as error:
    raise ConfigError(
      f"{said} has a README.md whose head is not valid YAML ({first_line(error)}), so its splits are not known; "
      "correct it, or remove that file"
    ) from error
  configs = given.get("configs") if isinstance(given, dict) else None
  for config in configs if isinstance(configs, list) else ():
    if isinstance(config, dict):
      is_default = config.get("default") is True
      name = "default" if is_default else str(config.get("config_name", "default"))
      folder = str(config.get("data_dir") or "")
      data_files = config.get("data_files") or ({"": "**"} if folder else None)
      yield Card(name, tuple(_patterns(data_files, folder, said)))


def _patterns(data_files: Any, folder: str, said: str) -> Iterator[tuple[str, re.Pattern[str]]]:
  """The splits of `data_files`: a pattern, several, or some for each split."""
  if isinstance(data_files, dict):
    data_files = [{"split": split, "path": path} for split, path in data_files.items()]
  for entry in data_files if isinstance(data_files, list) else [data_files]:
    split, paths = (entry.get("split"), entry.get("path")) if isinstance(entry, dict) else (TRAIN, entry)
    for path in paths if isinstance(paths, list) else [paths]:
      if isinstance(path, str):
        yield str(split), _glob(os.path.normpath(os.path.join(folder, path)), said)


def _glob(pattern: str, said: str) -> re.Pattern[str]:
  """A pattern of paths as a regular expression: `*`, `?` and `[...]` within a name, `**` over folders.

  Raises ConfigError for one with so many wildcards that to match it could take for ever.
  """
  parts = re.split(r"((?:\*\*/)+|\*+|\?|\[!?\]?[^\]/]*\])", pattern)
  if sum("*" in part for part in parts) > WILDCARDS:
    raise ConfigError(
      f"{said} has a README.md with the pattern {shown(pattern)}, of more than {WILDCARDS} wildcards; correct it, or "
      "remove that file"
    )
  try:
    return re.compile("".join(map(_as_regex, parts)), re.DOTALL)
  except re.error:  # such as [z-a]
    return re.compile(re.escape(pattern))


def _as_regex(part: str) -> str:
  if part.startswith("**"):
    return "(?:.*/)?" if part.endswith("/") else ".*"
  if part.startswith("[") and part.endswith("]"):
    characters = re.escape(part[1:-1].removeprefix("!")).replace(r"\-", "-")
    return f"[{'^' * (part[1] == '!')}{characters}]"
  return {"*": "[^/]*", "?": "[^/]"}.get(part, re.escape(part))
