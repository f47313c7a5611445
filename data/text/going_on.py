"""Whether a preparation may go on from what an earlier one has left, although files or fields have changed since.

What was prepared of the rows before a position stays right if these rows are the same, and if none of them is read in
another way. So a preparation that stopped at a bad row goes on when the row is corrected, or when the fields let it
pass: `data.on_bad_row` and a larger `data.limit_mb` change no row that was good.

- All files before the position must be unchanged: their paths, sizes, times and splits.
- So must be the file of the position; or its bytes up to there, if it is a text of rows that is not compressed. A table
  is written anew as a whole, and of a plain text the part that is held out depends on its size.
- Rows that were skipped must still be skipped.
"""

import functools
import hashlib
import os
from pathlib import Path
from typing import Any

import limits
from data.cache import ToGoOn
from data.growing import change_state, state_of
from data.text.files import Files, check_unchanged, stamps
from data.text.readers import Piece
from data.text.rows import Fields
from errors import ConfigError

TEXTS = ("json", "json_values", "csv", "tsv")  # kinds of files whose positions are bytes
BLOCK = 1 << 20  # bytes that are read at a time
SHOWN = 3  # bad rows that a note names


def same(name: str, files: Files, *others: Any) -> Any:
  """A key for all that may go on from one another: without the files' sizes and times (`Sources`)."""
  return (name, os.path.abspath(files[0].root), *others)


class Sources:
  """Says where the rows that have been prepared are from, in a state that is saved with them."""

  def __init__(self, files: Files, fields: Fields):
    self.files, self.fields = files, fields
    self._digest, self._count = hashlib.sha256(), 0  # of the files before a position

  def of(self, position: Any) -> dict[str, Any]:
    """What must be the same to go on from a position. Positions must not go back."""
    number = position[0]
    return {"before": self._before(number), "file": _stamp(self.files, number), "prefix": None}

  def prefix(self, position: Any) -> str | None:
    """The hash of the file of a position up to there; None for one that is not read byte by byte."""
    if position[0] >= len(self.files):
      return None
    file, left = self.files[position[0]], position[1]
    if file.kind not in TEXTS or file.compression:
      return None
    digest = hashlib.sha256()
    with open(file.path, "rb", buffering=0) as text:
      while left and (block := text.read(min(BLOCK, left))):
        digest.update(block)
        left -= len(block)
    return digest.hexdigest() if not left else None

  def allow(self, state: dict[str, Any]) -> bool:
    """Whether a preparation with this state may go on."""
    position, given = state["position"], state.get("sources")
    if state.get("skipped") and not self.fields.skip:
      return False
    if not position[0] and not position[1]:
      return True
    if given is None or position[0] > len(self.files) or self._before(position[0]) != given["before"]:
      return False
    now, before = _stamp(self.files, position[0]), given["file"]
    if now == before:
      return True
    same_file = (
      now is not None and before is not None and [now[i] for i in (0, 1, 4, 5)] == [before[i] for i in (0, 1, 4, 5)]
    )
    return same_file and given["prefix"] is not None and self.prefix(position) == given["prefix"]

  def to_go_on(self, folder: Path, error: ConfigError) -> ConfigError:
    """The error of a preparation that stops. If a part was saved, notes which rows it has, and says that it stays."""
    saved = state_of(folder)
    if not saved or not saved.get("sources"):
      return error
    number = saved["position"][0]
    check_unchanged(self.files[number : number + 1])
    saved["sources"]["prefix"] = self.prefix(saved["position"])
    change_state(folder, saved)
    return ToGoOn(f"{error}; the next start goes on after the first {saved['done'] / 1e6:,.0f} MB, which are prepared")

  @functools.cached_property
  def size(self) -> int:
    """The bytes of all files."""
    return sum(file.size for file in self.files)

  def check_ratio(self, size: int, ratio: int) -> None:
    """Raises ConfigError if what is written is much larger than the files, and large."""
    if size > limits.FREE and size > ratio * self.size:
      raise ConfigError(
        f"{self.files[0].path!r} and the other files of data.path have {self.size:,} bytes and become more than "
        f"{size / 1e9:,.1f} GB, {size // max(1, self.size):,} times as much; use other files, or set "
        f"data.limit_ratio to more than {ratio}"
      )

  def _before(self, number: int) -> str:
    """The hash of what identifies the first files."""
    for stamp in stamps(self.files[self._count : number]):
      self._digest.update(f"{stamp}\n".encode(errors="surrogateescape"))
    self._count = max(self._count, number)
    return self._digest.hexdigest()


def _stamp(files: Files, number: int) -> list[Any] | None:
  """What identifies the content of a file: its path, name, size, time, split and kind."""
  if number >= len(files):
    return None
  path, name, size, changed, split = stamps(files[number : number + 1])[0][:5]
  return [path, name, size, changed, split, files[number].kind]


def note_skipped(state: dict[str, Any], batch: list[Piece]) -> None:
  """Counts the bad rows among pieces, and keeps what is wrong with the first ones."""
  if bad := [piece.wrong for piece in batch if piece.wrong is not None]:
    state["skipped"] = state.get("skipped", 0) + len(bad)
    state["first_skipped"] = [*state.get("first_skipped", []), *bad][:SHOWN]


def left_out(state: dict[str, Any]) -> dict[str, Any]:
  """What meta.json says of rows that were skipped; {} without any."""
  return {name: state[name] for name in ("skipped", "first_skipped")} if state.get("skipped") else {}


def skipped(meta: dict[str, Any]) -> list[str]:
  """A sentence on the rows that were skipped, if there are any."""
  if not meta.get("skipped"):
    return []
  return [
    f"data.on_bad_row='skip' has left out {meta['skipped']:,} rows, such as: {'; '.join(meta.get('first_skipped', ()))}"
  ]
