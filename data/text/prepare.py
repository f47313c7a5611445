"""Prepares a text: tokenizes its documents and writes them to files, in bounded memory, whatever the size.

The folder then holds, for each split s: `s.tokens`, all documents in a row, each ended by an END token; `s.ends`, the
position just after each document, int64; with classes `s.labels`, int32; and with prompts `s.completions`, bool:
whether each token belongs to a completion. `pairs.npy` counts the pairs of bytes in the training text, int64
[256, 256]; all are 0 with prompts. `meta.json` holds the rest.

With prompts, a document is a prompt, its completion and the END token. The prompt is encoded by itself, as
`tools.generate` encodes it (`Text.encode`), so the model sees the same tokens here and there. The END token belongs to
the completion, so the model learns where to stop.

A preparation that was killed goes on where it was (data/growing.py). The result is the same as without that.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from data.growing import GrowingFiles, remove, write_atomically
from data.text.classes import Classes
from data.text.files import TRAIN, Files, check_unchanged
from data.text.readers import Piece, Position, read
from data.text.rows import Fields
from data.text.tokenizers import Tokenizer, room, units
from errors import ConfigError

SPLITS = ("train", "validation")
BATCH = 1 << 20  # bytes of text that are tokenized at a time
SAVE_EVERY = 1 << 26  # bytes of text between two saves


def write(folder: Path, files: Files, tokenizer: Tokenizer, fields: Fields, name: str) -> None:
  """Writes the files to `folder`, which is empty, or holds what a killed preparation of the same text has left.

  `name` is for the progress bar. Raises ConfigError if a file is damaged, lacks a field, or changes meanwhile.
  """
  if (folder / "meta.json").exists():
    return  # all is written; the process was killed just after that
  kinds = ["tokens", "ends", *(["numbers"] if fields.label else []), *(["completions"] if fields.prompt else [])]
  with GrowingFiles(folder, tuple(f"{split}.{kind}" for split in SPLITS for kind in kinds)) as growing:
    writer = Writer(growing, tokenizer, fields)
    unsaved = 0
    pieces = read(files, fields, Position(*writer.state["position"]), tokenizer.cutter)
    with bar_of(name, files, writer.state["done"]) as bar:
      for batch in units(pieces, BATCH, lambda piece: piece.text):
        writer.add(batch)
        bar.update(batch[-1].done - bar.n)
        unsaved += sum(room(piece.text) for piece in batch)
        if unsaved >= SAVE_EVERY and batch[-1].position:
          check_unchanged(files[batch[-1].position.file :][:1])
          writer.save(batch[-1])
          unsaved = 0
    check_unchanged(files)
    writer.finish(folder, files)
  remove(folder)
  for numbers in folder.glob("*.numbers"):
    numbers.unlink()


class Writer:
  """Tokenizes pieces of documents, and appends them to growing files."""

  def __init__(self, files: GrowingFiles, tokenizer: Tokenizer, fields: Fields):
    self._files, self._tokenizer = files, tokenizer
    self.state: dict[str, Any] = files.state
    if not self.state:
      self.state |= {
        "position": Position(), "done": 0, "documents": [0, 0], "tokens": [0, 0], "bytes": [0, 0], "largest_id": 0,
        "last_byte": 0, "pairs": [0] * (1 << 16), "classes": [], "counted_tokens": [0, 0], "counted_bytes": [0, 0],
      }  # fmt: skip
    self._has_prompts = bool(fields.prompt)
    self._pairs = np.array(self.state["pairs"]).reshape(256, 256)
    self._classes = Classes(fields.label, self.state["classes"]) if fields.label else None

  def add(self, pieces: list[Piece]) -> None:
    """Appends pieces, in order."""
    if self._classes:
      numbers = [(piece.split, self._classes.number(piece.label, piece.split)) for piece in pieces if piece.last]
      for split, name in enumerate(SPLITS):
        own_numbers = [number for whose, number in numbers if whose == split]
        self._files.files[f"{name}.numbers"].write(np.array(own_numbers, "<i4"))
    ids = self._encode(pieces)
    for split, name in enumerate(SPLITS):
      mine = [(piece, own) for piece, own in zip(pieces, ids, strict=True) if piece.split == split]
      if mine:
        self._append_tokens(split, name, mine)
        self._append_text(split, [piece for piece, _ in mine])

  def _encode(self, pieces: list[Piece]) -> list[np.ndarray]:
    """The token ids of each piece."""
    by = self._tokenizer
    prompts = iter(by.encode_prompts([piece.text for piece in pieces if piece.is_prompt]))
    whole = iter(by.encode([piece.context + piece.text for piece in pieces if not piece.is_prompt]))
    contexts = iter(by.encode([piece.context for piece in pieces if piece.context]))
    ids = [
      next(prompts) if piece.is_prompt else next(whole)[len(next(contexts)) if piece.context else 0 :]
      for piece in pieces
    ]
    for piece, found in zip(pieces, ids, strict=True):
      if not piece.is_prompt and (at := np.flatnonzero(found == by.end)).size:
        raise ConfigError(
          f"data.path has a text that holds token {by.end}, which ends documents, after "
          f"{by.text.decode(found[: at[0]][-16:].tolist())!r}; remove it there, or use another data.tokenizer"
        )
    return ids

  def _append_tokens(self, split: int, name: str, pieces: list[tuple[Piece, np.ndarray]]) -> None:
    last = np.array([piece.last for piece, _ in pieces])
    stops = np.cumsum(np.array([len(ids) for _, ids in pieces]) + last) + self.state["tokens"][split]
    end = np.array([self._tokenizer.end])
    parts = [part for piece, ids in pieces for part in ((ids, end) if piece.last else (ids,))]
    tokens = np.concatenate(parts, dtype=self._tokenizer.dtype, casting="unsafe")
    self._files.files[f"{name}.tokens"].write(tokens)
    self._files.files[f"{name}.ends"].write(stops[last].astype("<i8"))
    self.state["tokens"][split] = int(stops[-1])
    self.state["documents"][split] += int(last.sum())
    self.state["counted_tokens"][split] += sum(len(ids) + piece.last for piece, ids in pieces if not piece.is_prompt)
    self.state["largest_id"] = max(self.state["largest_id"], int(tokens.max(initial=0)))
    if self._has_prompts:
      completions = np.concatenate([np.full(len(ids) + piece.last, not piece.is_prompt) for piece, ids in pieces])
      self._files.files[f"{name}.completions"].write(completions)

  def _append_text(self, split: int, pieces: list[Piece]) -> None:
    """Counts the bytes, and the pairs of bytes if there are no prompts.

    A zero byte ends each document, and is before the first.
    """
    text = b"".join(piece.text + b"\0" if piece.last else piece.text for piece in pieces)
    self.state["bytes"][split] += len(text)
    self.state["counted_bytes"][split] += sum(len(piece.text) + piece.last for piece in pieces if not piece.is_prompt)
    if split == TRAIN and not self._has_prompts:
      self._pairs += pair_counts(bytes([self.state["last_byte"]]) + text)
      self.state["last_byte"] = text[-1]

  def save(self, piece: Piece) -> None:
    """Saves how far it is, after this piece."""
    self.state |= {"position": piece.position, "done": piece.done, "pairs": self._pairs.ravel().tolist()}
    self._files.save()

  def finish(self, folder: Path, files: Files) -> None:
    """Writes `pairs.npy`, the labels and at last `meta.json`."""
    np.save(folder / "pairs.npy", self._pairs)
    fingerprints = {name: file.fingerprint() for name, file in self._files.files.items()}
    identity = json.dumps([self._tokenizer.name, fingerprints, self.state["classes"]])
    for file in self._files.files.values():
      file.sync()
    by_split = ("documents", "tokens", "counted_tokens", "counted_bytes")  # the loss counts all, or completions
    meta: dict[str, Any] = {key: dict(zip(SPLITS, self.state[key], strict=True)) for key in by_split}
    meta |= {
      "files": len(files), "bytes": sum(self.state["bytes"]),
      "dtype": self._tokenizer.dtype.str, "largest_id": self.state["largest_id"],
      "fingerprint": hashlib.sha256(identity.encode()).hexdigest(),
    }  # fmt: skip
    if self._classes:
      meta |= self._classes.finish(folder, SPLITS, files)
    write_atomically(folder / "meta.json", meta)


def pair_counts(text: bytes) -> np.ndarray:
  """How often each pair of bytes occurs in a text, int64 [256, 256]."""
  values = np.frombuffer(text, np.uint8)
  counts = np.zeros(1 << 16, np.int64)
  for first in (0, 1):  # pairs at even and at odd positions; each is a number of two bytes, the first byte the low one
    size = max(0, len(values) - first) // 2 * 2
    counts += np.bincount(values[first : first + size].view("<u2"), minlength=1 << 16)
  return np.ascontiguousarray(counts.reshape(256, 256).T)


def bar_of(name: str, files: Files, done: int = 0) -> tqdm:
  """A progress bar over the bytes on disk of files. Shown on terminals only."""
  total = sum(file.size for file in files)
  return tqdm(total=total, initial=done, desc=name, unit="B", unit_scale=True, disable=None, file=sys.stderr)
