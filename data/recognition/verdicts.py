"""The verdict on each file at a path: what it is read as and in which split, or why it is skipped.

A folder is read in one form. Token ids, if it has files that say they are; else rows, if there are tables or JSON
lines; else text. What belongs to another form is skipped. If that is more than is read, the folder is refused, so that
nobody trains on a small part of his data; `data.form` then says what is meant.
"""

import collections
import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from data.recognition.content import plain_name
from data.recognition.datasets import Place, places_of
from data.recognition.kinds import FORMS, KINDS, ROWS, TEXT, TOKENS
from data.recognition.places import TEST, TRAIN, VALIDATION, is_code, named, split_of
from data.recognition.survey import Found, Survey
from errors import ConfigError

AUTO = "auto"
WANTED = {TEXT: "text", ROWS: "rows", TOKENS: "token ids"}
SURE = ("llmc", "megatron")  # token ids that say so themselves
COMPANIONS = (".md", ".rst", ".json", ".pkl", ".py")  # what people put beside data, whatever its size,
FEW = 10  # if there are not more such files
AS_TEXT, ALSO_TEXT = {"json", "json_values", "csv", "tsv"}, {"json_value", "metadata"}
AS_MARKUP = {"mediawiki"}  # text, if the user says so
NOWHERE = Place()
NAMES = ("LICENSE", "LICENCE", "README", "NOTICE", "CITATION", "CHANGELOG", "_SUCCESS")


class Verdict(NamedTuple):  # as Found
  """What happens to a file.

  Attributes:
    file: the file, with its kind.
    split: what a name says it is for: `train`, `validation` or `test`; None if no name says it.
    why: the reason why it is skipped; "" if it is read.
    is_other: whether it is skipped as something else than what is read, and may be data that is missed.
  """

  file: Found
  split: str | None = None
  why: str = ""
  is_other: bool = False


@dataclasses.dataclass(frozen=True)
class Verdicts:
  """The verdicts on all files at a path.

  Attributes:
    form: `text`, `rows` or `tokens`.
    all: in the order of their paths.
    hidden: how many hidden files and folders there are, which nobody looked at.
  """

  form: str
  all: tuple[Verdict, ...]
  hidden: int = 0

  @property
  def read(self) -> list[Verdict]:
    return [verdict for verdict in self.all if not verdict.why]

  @property
  def skipped(self) -> list[Verdict]:
    return [verdict for verdict in self.all if verdict.why]


def judge(found: Survey, form: str = AUTO, alone: bool = True) -> Verdicts:
  """The verdicts on the files of a survey, which are read in this `form`; `auto` chooses one.

  A file that the user names is read whatever its name says, unless he names others, too: then it is not `alone`.

  Raises ConfigError if there is nothing to read, if more is skipped than read, or if the data of a file is missing.
  """
  places = places_of(found)
  files = _with_kinds(_with_partners(found.files), places)
  if form == AUTO and not found.is_file and any(KINDS[kind].is_missing for kind in {file.kind for file in files}):
    _refuse_missing(found, files)
  left_out = {relative for relative, place in places.items() if place.why}
  usable = [file for file in files if file.relative not in left_out] if left_out else files
  chosen = form if form in FORMS else _form(usable)
  readable = _readable(chosen, {file.kind for file in usable}) | (AS_MARKUP if form == TEXT else set())
  names_count = not (found.is_file and alone)
  verdicts = []
  for file in files:
    place = places.get(file.relative, NOWHERE)
    if place.why or file.kind not in readable:
      why, is_other = (place.why, False) if place.why else _why(file, chosen)
      verdicts.append(Verdict(file, None, why, is_other))
    elif not place.split:
      verdicts.append(Verdict(file, named(file.relative) if names_count else None))
    elif split := split_of(place.split):
      verdicts.append(Verdict(file, split))
    else:
      verdicts.append(Verdict(file, None, f"split {place.split!r}, which is not one to train, validate or test on"))
  if sum(_is_companion(verdict.file) for verdict in verdicts if verdict.why) > FEW:
    verdicts = [_as_other(verdict) for verdict in verdicts]
  verdicts = _without_twins(found, verdicts, chosen)
  verdicts.sort(key=lambda verdict: order(verdict.file.relative))
  judged = Verdicts(chosen, tuple(verdicts), len(found.hidden))
  _check(found, judged, form)
  return judged


def _without_twins(found: Survey, verdicts: list[Verdict], form: str) -> list[Verdict]:
  """Without the links to files that are read, too. Raises ConfigError if the two are for different splits."""
  read = {one.file.relative: one for one in verdicts if not one.why} if found.links else {}
  twins, first = {}, dict[str, Verdict]()
  for link, target in found.links.items():
    one, other = read.get(link), read.get(target) or first.get(target)
    if one and not other:
      first[target] = one
    if one and other and one.split != other.split and form != TEXT:  # in text, names may mean something else
      raise ConfigError(
        f"{found.said} holds a file twice, for different splits, as {other.file.relative!r} and as the link {link!r}; "
        "name a folder that holds only one of the two, or remove one"
      )
    if one and other:
      twins[link] = one._replace(split=None, why=f"the same file as {other.file.relative}, which is read")
  return [twins.get(one.file.relative, one) for one in verdicts] if twins else verdicts


def _with_kinds(files: list[Found], places: dict[str, Place]) -> list[Found]:
  """The files with the kinds that their places say. A file whose content is missing stays that."""
  kinds = {relative: place.kind for relative, place in places.items() if place.kind}
  if not kinds:
    return files
  is_there = lambda file: file.relative in kinds and not KINDS[file.kind].is_missing
  return [file._replace(kind=kinds[file.relative]) if is_there(file) else file for file in files]


def order(relative: str) -> str:
  """Sorts paths by folder, and a compressed file as if it were not."""
  return plain_name(relative).replace("/", "\0")


def _with_partners(files: Sequence[Found]) -> list[Found]:
  """The files, with those that have an index of Megatron-LM beside them as its tokens."""
  indexed = {file.relative.removesuffix(".idx") for file in files if file.relative.endswith(".idx")}
  if not indexed:
    return list(files)
  is_tokens = lambda file: file.relative.endswith(".bin") and file.relative.removesuffix(".bin") in indexed
  return [file._replace(kind="megatron") if is_tokens(file) else file for file in files]


def _form(files: list[Found]) -> str:
  """The form in which a folder is read."""
  forms = {KINDS[kind].form for kind in {file.kind for file in files}}
  if TOKENS not in forms:  # as most
    return ROWS if ROWS in forms else TEXT
  size = collections.Counter[str]()
  for file in files:
    size[KINDS[file.kind].form] += file.size
  if size[TOKENS] and any(file.kind in SURE for file in files):
    return TOKENS
  has_split = any(KINDS[file.kind].form == TOKENS and named(file.relative) == TRAIN for file in files)
  if size[TOKENS] and (has_split or size[TOKENS] > size[TEXT]) and size[TOKENS] >= size[ROWS]:
    return TOKENS
  return ROWS if size[ROWS] else TEXT


def _readable(form: str, kinds: set[str]) -> set[str]:
  """The kinds that are read in this form, where files of these `kinds` are."""
  own = {kind for kind in kinds if KINDS[kind].form == form}
  if form != TEXT:
    return own
  # Rows are text only if the user says so. A description of other files is text only among others, as in source code.
  return own | (kinds & AS_TEXT) | (kinds & ALSO_TEXT if own else set())


def _why(file: Found, form: str) -> tuple[str, bool]:
  """Why a file is not read in this form, and whether it may be data that is missed."""
  kind = KINDS[file.kind]
  if file.kind in ("empty", "metadata", "index"):
    return kind.words, False
  if kind.form:
    is_companion = _is_companion(file) or (form == TOKENS and kind.form == TEXT)  # the text that they were made of
    return f"{kind.words}, beside {form}", not is_companion
  return kind.words, not (_is_companion(file) or file.kind == "compiled")


def _as_other(verdict: Verdict) -> Verdict:
  """The same, of a file that is skipped as beside the data, as one of data that may be missed."""
  is_beside = verdict.why and _is_companion(verdict.file) and KINDS[verdict.file.kind].form
  return verdict._replace(is_other=True) if is_beside else verdict


def _is_companion(file: Found) -> bool:
  name = file.name.lower()
  return name.endswith(COMPANIONS) or name.upper().startswith(NAMES)


def _refuse_missing(found: Survey, files: list[Found]) -> None:
  missing = [file for file in files if KINDS[file.kind].is_missing]
  kind = KINDS[missing[0].kind]
  more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
  raise ConfigError(
    f"{found.said} lacks data: {missing[0].relative!r}{more} cannot be read ({kind.words}); {kind.fix}, or set "
    "data.form to 'text', 'rows' or 'tokens' to go on without it"
  )


def _check(found: Survey, judged: Verdicts, form: str) -> None:
  """Raises ConfigError if nothing is read, or more is skipped than that."""
  read, skipped = judged.read, [verdict for verdict in judged.skipped if verdict.file.size]
  others, wanted = [verdict for verdict in skipped if verdict.is_other], WANTED.get(form, "text")
  if not any(verdict.file.size for verdict in read):
    if found.is_file and skipped:
      words = KINDS[skipped[0].file.kind].words
      raise ConfigError(f"{found.said} cannot be read as {wanted} ({words}); {_fix(skipped[0])}")
    if skipped:
      largest = _largest(others or skipped)
      raise ConfigError(f"{found.said} holds no {wanted}, but {_counted(others or skipped)}; {_fix(largest[0])}")
    raise ConfigError(f"{found.said} holds no {wanted}; use a file or folder with text")
  size, missed = (sum(verdict.file.size for verdict in some) for some in (read, others))
  if form == AUTO and missed > size:
    largest = _largest(others)
    fix = f"{KINDS[largest[0].file.kind].fix}; or " if KINDS[largest[0].file.kind].fix else ""
    raise ConfigError(
      f"{found.said} holds {_counted(read)}, but more of what would be skipped: {_counted(largest)}, such as "
      f"{largest[0].file.relative!r}; {fix}name the files that you mean, separated by commas, or set data.form to "
      f"{_choices(others, judged.form)}"
    )


def _fix(verdict: Verdict) -> str:
  kind = KINDS[verdict.file.kind]
  by_form = kind.form and verdict.why.startswith(kind.words)  # and not for what a folder says about it
  return kind.fix or (f"set data.form={kind.form!r}, or name other files" if by_form else "name the data itself")


def _choices(others: Sequence[Verdict], form: str) -> str:
  """What to set data.form to, for people who mean the others, or do not."""
  forms = sorted({KINDS[verdict.file.kind].form for verdict in others} - {""})
  return "".join(f"{other!r} to read the {WANTED[other]}, or " for other in forms) + f"{form!r} to skip them"


def _largest(verdicts: Iterable[Verdict]) -> list[Verdict]:
  """Those of the kind that has the most bytes."""
  by_kind: dict[str, list[Verdict]] = {}
  for verdict in verdicts:
    by_kind.setdefault(verdict.file.kind, []).append(verdict)
  return max(by_kind.values(), key=lambda some: sum(one.file.size for one in some))


def _counted(verdicts: Sequence[Verdict]) -> str:
  """How many files there are of each kind, and their size: "3 × Parquet (1.2 MB)"."""
  by_kind: dict[str, list[int]] = {}
  for verdict in verdicts:
    by_kind.setdefault(KINDS[verdict.file.kind].words, []).append(verdict.file.size)
  parts = [f"{len(sizes)} × {words} ({megabytes(sum(sizes))})" for words, sizes in by_kind.items()]
  return ", ".join(parts[:3]) + (f" and {len(parts) - 3} more kinds" if len(parts) > 3 else "")


def megabytes(size: int) -> str:
  return f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e3:,.1f} kB"


def settled(verdicts: Iterable[Verdict], said: str) -> list[Verdict]:
  """The same with what each file is for: `train`, `validation`, or None to hold out a part of it.

  Test files validate if nothing else does, and are else skipped. Files without a split in their names are trained on.
  Raises ConfigError if nothing is left to train on.
  """
  verdicts = _without_readme(_without_code(list(verdicts)))
  read = [verdict for verdict in verdicts if not verdict.why]
  own = _held_out_split(read)
  if not any(verdict.split in (TRAIN, None) for verdict in read):
    raise ConfigError(
      f"{said} has nothing to train on, only files of the split {own!r}, such as {read[0].file.relative!r}; name a "
      "file itself to train on it"
    )
  train = TRAIN if own else None
  uses = {TRAIN: train, None: train, own: VALIDATION} if own else {TRAIN: train, None: train}
  final = []
  for verdict in verdicts:
    if not verdict.why and verdict.split not in uses:
      why = f"split {verdict.split!r}, while {own!r} is validated on"
      final.append(verdict._replace(split=None, why=why))
    elif verdict.why or uses[verdict.split] == verdict.split:  # there may be millions
      final.append(verdict)
    else:
      final.append(verdict._replace(split=uses[verdict.split]))
  return final


def validating(verdicts: Verdicts) -> list[Verdict]:
  """The files of `data.validation_path` that are validated on: its validation or test files, or else all of it."""
  read = _without_code(verdicts.read)
  own = _held_out_split(read)
  return [verdict._replace(split=VALIDATION) for verdict in read if own in (None, verdict.split)]


def _held_out_split(read: list[Verdict]) -> str | None:
  """The split of the files that are validated on, if names say one: test files, if no others do."""
  return next((split for split in (VALIDATION, TEST) if any(verdict.split == split for verdict in read)), None)


def _without_code(verdicts: list[Verdict]) -> list[Verdict]:
  """Without the splits of plain text whose name means something else: source code, or none is named `train`."""
  is_plain = lambda one: KINDS[one.file.kind].form in (TEXT, "")
  with_train = _has_train(verdicts)
  no_split = lambda one: one.split and is_plain(one) and (is_code(one.file.name) or not with_train)
  return [one._replace(split=None) if no_split(one) else one for one in verdicts]


def _has_train(verdicts: list[Verdict]) -> bool:
  return any(one.split == TRAIN and not is_code(one.file.name) for one in verdicts)


def _without_readme(verdicts: list[Verdict]) -> list[Verdict]:
  """Without the README, LICENSE and so on of a text whose files are named for their splits."""
  if not _has_train(verdicts):
    return verdicts
  is_about = lambda one: not one.why and not one.split and re.split(r"[._-]", one.file.name.upper())[0] in NAMES
  why = "about the data, beside files of splits"
  return [one._replace(why=why) if is_about(one) else one for one in verdicts]
