"""The classes of a labelled text: numbered as they appear while it is read, and in their final order afterwards."""

from pathlib import Path
from typing import Any

import numpy as np

from data.text.files import TRAIN, Files
from data.text.rows import MAX_CLASSES, class_names
from errors import ConfigError

BLOCK = 1 << 18  # labels that are rewritten at a time


class Classes:
  """The labels of a text.

  `seen` is a list of (label, whether a training document has it), in order of appearance. It is changed in place.
  """

  def __init__(self, field: str, seen: list[Any]):
    self._field, self._seen = field, seen
    self._numbers = {label: number for number, (label, _) in enumerate(seen)}

  def number(self, label: int | str | None, split: int) -> int:
    """The number of a label in order of appearance, which a document of this split has."""
    assert label is not None
    number = self._numbers.setdefault(label, len(self._numbers))
    if number == len(self._seen):
      self._seen.append([label, split == TRAIN])
      if number == MAX_CLASSES:
        raise self._error(f"has more than {MAX_CLASSES:,} different values; use a field that holds classes")
    elif split == TRAIN:
      self._seen[number][1] = True
    return number

  def finish(self, folder: Path, splits: tuple[str, ...], files: Files) -> dict[str, Any]:
    """Writes `s.labels` from `s.numbers`, for each split s.

    Returns how many `classes` there are, their `labels`, and how many are `distinct`: fewer, if the numbers have gaps.

    Integers stay as they are. Names are sorted and numbered. Raises ConfigError if the training text lacks a class.
    """
    labels = [label for label, _ in self._seen]
    if len({type(label) for label in labels}) > 1:
      raise self._error("holds names and integers; use one of the two")
    for label, train in self._seen:
      if not train:
        raise self._error(f"is {label!r} in validation text only; add training text of this class, or drop the class")
    names = sorted(labels) if labels and isinstance(labels[0], str) else class_names(files[0], self._field)
    place = {name: number for number, name in enumerate(names)}
    final = np.array([place[label] if isinstance(label, str) else label for label in labels], "<i4")
    for split in splits:
      with (folder / f"{split}.numbers").open("rb") as numbers, (folder / f"{split}.labels").open("wb") as out:
        while len(block := np.fromfile(numbers, "<i4", BLOCK)):
          out.write(final[block].tobytes())
    classes = max(int(final.max(initial=-1)) + 1, len(names))
    distinct = max(len(set(labels)), len(names))  # named classes may have no text
    return {"classes": classes, "labels": names if len(names) == classes else [], "distinct": distinct}

  def _error(self, what: str) -> ConfigError:
    return ConfigError(f"data.label_field={self._field!r} {what}")
