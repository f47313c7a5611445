"""Rows of token ids, which another program made of text: lists of integers in a field, a document a row.

They are copied once, in bounded memory, and then used as the token files of others are (foreign.py). The rows are the
documents, so their ends are known, and no token is added. The folder holds, for each split s, `s.tokens`, all documents
in a row, uint32, and `s.ends`, the position just after each, int64.
"""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from data import described
from data.cache import prepared
from data.dataset import Part
from data.files import array_file
from data.growing import GrowingFiles, write_atomically
from data.text import foreign, going_on, prepare
from data.text.files import Files, stamps
from data.text.prepare import SPLITS
from data.text.readers import Piece, Position, read
from data.text.rows import Fields
from data.text.scan import Scan

FORMAT = 1  # version of what is kept; increase it when that changes
WITHOUT = ("plain", "csv", "tsv")  # kinds of files that hold text only


@dataclasses.dataclass(frozen=True)
class TokenRows:
  """The files of a source whose rows hold token ids, and the fields of a row."""

  files: Files
  fields: Fields


def find(files: Files, fields: Fields, cache_dir: str) -> TokenRows | None:
  """The files as rows of token ids, if the first row that is not empty holds some. Remembers that in the cache."""

  def look(folder: Path) -> None:
    piece = next((piece for piece in read((file,), fields) if piece.wrong is None), None)
    write_atomically(folder / "found.json", None if piece is None else piece.ids is not None)

  for file in () if fields.in_spans else files:
    if file.kind in WITHOUT:
      return None
    folder = prepared(cache_dir, "rows", (FORMAT, stamps((file,)), *fields.key), look)
    if (found := described.value(folder / "found.json")) is not None:
      return TokenRows(files, fields) if found else None
  return None


def load(name: str, rows: TokenRows, config: ConfigDict, vocab_size: int = 0) -> tuple[Part, str]:
  """The rows as a part of a dataset, and one line on them for the user. Copies them first if needed.

  Args:
    name: the path that the user gave.
    rows: what `find` found there.
    config: of the whole run.
    vocab_size: of the tokenizer, if it is known.

  Raises ConfigError if a file is damaged, holds text too, or does not fit the config.
  """
  foreign.check_config(name, config)
  write = lambda folder: prepare.write_with(_Writer, ["tokens", "ends"], folder, rows.files, rows.fields, name)
  key, same = (FORMAT, stamps(rows.files), *rows.fields.key), going_on.same(name, rows.files, FORMAT, rows.fields)
  folder = prepared(config.data.cache_dir, "ids", key, write, same)
  meta = described.meta(folder, described.ROWS)
  found = Scan(
    tokens={split: array_file(folder / f"{split}.tokens", "<u4") for split in SPLITS},
    ends={split: array_file(folder / f"{split}.ends", "<i8") for split in SPLITS},
    largest_id=meta["largest_id"],
    largest_later=meta["largest_id"],
    fingerprint=meta["fingerprint"],
    documents=meta["documents"],
  )
  many = f"{len(rows.files)} files, " if len(rows.files) > 1 else ""
  part, line = foreign.part_of(name, found, config, many, "rows of token ids", vocab_size)
  return part, "\n".join([line, *(f"note: {sentence}" for sentence in going_on.skipped(meta))])


class _Writer:
  """Appends documents of token ids to growing files."""

  def __init__(self, files: GrowingFiles):
    self._files = files
    self.state: dict[str, Any] = files.state
    if not self.state:
      self.state |= {"position": Position(), "done": 0, "tokens": [0, 0], "largest_id": 0}

  def encode(self, pieces: list[Piece]) -> None:
    """They are tokens already."""

  def add(self, pieces: list[Piece], encoded: None) -> None:
    """Appends pieces, in order."""
    for split, name in enumerate(SPLITS):
      mine = [piece.ids for piece in pieces if piece.split == split and piece.ids is not None]
      if mine:
        tokens = np.concatenate(mine, dtype="<u4")
        ends = np.cumsum([len(ids) for ids in mine]) + self.state["tokens"][split]
        self._files.files[f"{name}.tokens"].write(tokens)
        self._files.files[f"{name}.ends"].write(ends.astype("<i8"))
        self.state["tokens"][split] = int(ends[-1])
        self.state["largest_id"] = max(self.state["largest_id"], int(tokens.max()))

  def save(self, piece: Piece) -> None:
    """Saves how far it is, after this piece."""
    self.state |= {"position": piece.position, "done": piece.done}
    self._files.save()

  def finish(self, folder: Path, files: Files) -> None:
    """Writes `meta.json`. Rows that are skipped are part of the fingerprint."""
    prints = {name: file.fingerprint() for name, file in self._files.files.items()}
    for file in self._files.files.values():
      file.sync()
    if skipped := self.state.get("skipped"):
      prints |= {f"{skipped} skipped of {kind}": "" for kind in ("tokens", "ends")}
    hashes = {
      key: hashlib.sha256(json.dumps({n: p for n, p in prints.items() if n.endswith(kind)}).encode()).hexdigest()
      for key, kind in (("fingerprint", "tokens"), ("documents", "ends"))
    }
    found = {"largest_id": self.state["largest_id"], **hashes, **going_on.left_out(self.state)}
    write_atomically(folder / "meta.json", found)
