"""Prepares a text: tokenizes its documents and writes them to files, in bounded memory, whatever the size.

The folder then holds, for each split s: `s.tokens`, all documents in a row, each ended by an END token; `s.ends`, the
position just after each document, int64; with classes `s.labels`, int32; and with prompts or dialogues
`s.completions`, bool: whether each token counts. `pairs.npy` counts the pairs of bytes in the training text, int64
[256, 256]; all are 0 if only some tokens count. `meta.json` holds the rest, and which library made the tokens. That is
not part of the fingerprint, as both give the same tokens.

With prompts, a document is a prompt, its completion and the END token. The prompt has the tokens that `tools.generate`
gives it (`Text.encode`), so the model sees the same tokens here and there. The END token belongs to the completion, so
the model learns where to stop. Dialogues are the text of a chat template (spans.py, chat.py).

A preparation that was killed goes on where it was (data/growing.py). The result is the same as without that.
"""

import functools
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from tqdm import tqdm

import limits
from data.growing import GrowingFiles, remove, state_of, write_atomically
from data.text.classes import Classes
from data.text.files import TRAIN, Files, check_unchanged
from data.text.going_on import Sources, left_out, note_skipped
from data.text.readers import Piece, Position, read
from data.text.rows import Fields
from data.text.spans import Encoded
from data.text.tokenizers import BYTES, Tokenizer, room, units
from errors import ConfigError, visible

SPLITS = ("train", "validation")
BATCH = 1 << 20  # bytes of text that are tokenized at a time
SAVE_EVERY = 1 << 26  # bytes of text between two saves


def write(
  folder: Path, files: Files, tokenizer: Tokenizer, fields: Fields, name: str, ratio: int = limits.RATIO
) -> None:
  """Writes the files to `folder`, which is empty, or holds what a killed preparation of the same text has left.

  `name` is for the progress bar, and `ratio` how many times as large as the files all may become. Raises ConfigError if
  a file is damaged, lacks a field, or changes meanwhile.
  """
  kinds = ["tokens", "ends", *(["numbers"] if fields.label else []), *(["completions"] if fields.in_spans else [])]
  new_writer = functools.partial(Writer, tokenizer=tokenizer, fields=fields)
  write_with(new_writer, kinds, folder, files, fields, name, tokenizer, ratio)
  for numbers in folder.glob("*.numbers"):
    numbers.unlink()


Batch = list[Piece]


class PieceWriter(Protocol):
  """Writes pieces of documents to growing files. `state` has at least the `position` and how much is `done`."""

  state: dict[str, Any]

  def encode(self, pieces: list[Piece]) -> Any:
    """What `add` needs of pieces. Runs in another thread, and must not change the writer."""
    ...

  def add(self, pieces: list[Piece], encoded: Any) -> None: ...

  def save(self, piece: Piece) -> None: ...

  def finish(self, folder: Path, files: Files) -> None: ...


def write_with(
  new_writer: Callable[[GrowingFiles], PieceWriter],
  kinds: list[str],
  folder: Path,
  files: Files,
  fields: Fields,
  name: str,
  tokenizer: Tokenizer | None = None,
  ratio: int = limits.RATIO,
) -> None:
  """Writes the documents in `files` with a writer, to a file of each of the `kinds` for each split.

  Without a tokenizer, all documents must be token ids, and otherwise text. Raises ToGoOn, in place of ConfigError, if a
  part has been saved.
  """
  if (folder / "meta.json").exists():
    return  # all is written; the process was killed just after that
  sources = Sources(files, fields)
  if (saved := state_of(folder)) and not sources.allow(saved):
    remove(folder)
  with GrowingFiles(folder, tuple(f"{split}.{kind}" for split in SPLITS for kind in kinds)) as growing:
    writer = new_writer(growing)
    try:
      _write_all(writer, growing, sources, folder, name, tokenizer, ratio)
    except ConfigError as error:
      raise sources.to_go_on(folder, error) from error
  remove(folder)


def _write_all(
  writer: PieceWriter,
  growing: GrowingFiles,
  sources: Sources,
  folder: Path,
  name: str,
  tokenizer: Tokenizer | None,
  ratio: int,
) -> None:
  """Writes what is left of the documents."""
  files, fields = sources.files, sources.fields
  unsaved = 0
  if tokenizer and tokenizer.documents:
    tokenizer.documents.compare()
  cutter, chat = (tokenizer.cutter, tokenizer.chat) if tokenizer else (None, None)
  pieces = read(files, fields, Position(*writer.state["position"]), cutter, chat)

  def encode(batch: Batch) -> tuple[Batch, Any]:
    """The pieces of good rows, and what the writer makes of them."""
    good = [piece for piece in batch if piece.wrong is None]
    return good, writer.encode(good)

  with bar_of(name, files, writer.state["done"]) as bar:
    for batch, (good, encoded) in _one_ahead(units(pieces, BATCH, _content), encode):
      if wrong := next((piece for piece in good if (piece.ids is None) != bool(tokenizer)), None):
        raise _unexpected(wrong, files, fields)
      writer.add(good, encoded)
      if len(good) < len(batch):
        note_skipped(writer.state, batch)
      sources.check_ratio(sum(file.size for file in growing.files.values()), ratio)
      bar.update(batch[-1].done - bar.n)
      unsaved += sum(room(_content(piece)) for piece in batch)
      if unsaved >= SAVE_EVERY and batch[-1].position:
        check_unchanged(files[batch[-1].position.file :][:1])
        writer.state["sources"] = sources.of(batch[-1].position)
        writer.save(batch[-1])
        unsaved = 0
  check_unchanged(files)
  writer.finish(folder, files)


def _one_ahead(batches: Iterable[Batch], encode: Callable[[Batch], Any]) -> Iterator[tuple[Batch, Any]]:
  """Each batch with what `encode` makes of it in another thread, while the next batch is read here."""
  with ThreadPoolExecutor(1, "encode") as thread:
    waiting: tuple[Batch, Future[Any]] | None = None
    for batch in batches:
      started = (batch, thread.submit(encode, batch))
      if waiting:
        yield waiting[0], waiting[1].result()
      waiting = started
    if waiting:
      yield waiting[0], waiting[1].result()


def _content(piece: Piece) -> bytes:
  return piece.text if piece.ids is None else piece.ids.tobytes()


def _unexpected(piece: Piece, files: Files, fields: Fields) -> ConfigError:
  """The error for token ids among text, and for text among token ids."""
  found, others = ("text", "token ids") if piece.ids is None else ("token ids", "text")
  where = f" in row {piece.position.rows} of {files[piece.position.file].path!r}" if piece.position else ""
  return ConfigError(
    f"data.text_field={fields.text!r} holds {found}{where} in place of {others}; name another field, or make the rows "
    "of text and those of token ids two sources"
  )


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
    for name, none in (("not_utf8", {}), ("characters", 0), ("lost", 0), ("unknown", 0)):
      self.state.setdefault(name, none)  # a killed preparation of an earlier version has none
    self._in_spans = fields.in_spans
    self._pairs = np.array(self.state["pairs"]).reshape(256, 256)
    self._classes = Classes(fields.label, self.state["classes"]) if fields.label else None

  def add(self, pieces: list[Piece], encoded: list[Encoded]) -> None:
    """Appends pieces, in order, and what `encode` has made of them."""
    if self._classes:
      numbers = [(piece.split, self._classes.number(piece.label, piece.split)) for piece in pieces if piece.last]
      for split, name in enumerate(SPLITS):
        own_numbers = [number for whose, number in numbers if whose == split]
        self._files.files[f"{name}.numbers"].write(np.array(own_numbers, "<i4"))
    for split, name in enumerate(SPLITS):
      mine = [(piece, own) for piece, own in zip(pieces, encoded, strict=True) if piece.split == split]
      if mine:
        self._append_tokens(split, name, mine)
        self._append_text(split, [piece for piece, _ in mine])
    self._note(pieces, encoded)

  def encode(self, pieces: list[Piece]) -> list[Encoded]:
    """The token ids of each piece, with END behind the last one of a document."""
    by = self._tokenizer
    in_spans = iter(by.encode_spans([piece.document for piece in pieces if piece.document]))
    plain = [piece for piece in pieces if not piece.document]
    whole = iter(by.encode([piece.context + piece.text for piece in plain]))
    contexts = iter(by.encode([piece.context for piece in plain if piece.context]))
    end = np.array([by.end], by.dtype)
    found = []
    for piece in pieces:
      if piece.document:
        found.append(next(in_spans))
        continue
      ids = next(whole)[len(next(contexts)) if piece.context else 0 :]
      if (at := np.flatnonzero(ids == by.end)).size:
        raise ConfigError(
          f"data.path has a text that holds token {by.end}, which ends documents, after "
          f"{by.text.decode(ids[: at[0]][-16:].tolist())!r}; remove it there, or use another data.tokenizer"
        )
      ids = np.concatenate([ids, end]) if piece.last else ids
      found.append(Encoded(ids, np.ones(len(ids), bool)))
    return found

  def _append_tokens(self, split: int, name: str, pieces: list[tuple[Piece, Encoded]]) -> None:
    last = np.array([piece.last for piece, _ in pieces])
    stops = np.cumsum(np.array([len(own.ids) for _, own in pieces])) + self.state["tokens"][split]
    tokens = np.concatenate([own.ids for _, own in pieces], dtype=self._tokenizer.dtype, casting="unsafe")
    counted = np.concatenate([own.counted for _, own in pieces])
    self._files.files[f"{name}.tokens"].write(tokens)
    self._files.files[f"{name}.ends"].write(stops[last].astype("<i8"))
    self.state["tokens"][split] = int(stops[-1])
    self.state["documents"][split] += int(last.sum())
    self.state["counted_tokens"][split] += int(counted.sum())
    self.state["largest_id"] = max(self.state["largest_id"], int(tokens.max(initial=0)))
    if self._in_spans:
      self._files.files[f"{name}.completions"].write(counted)

  def _append_text(self, split: int, pieces: list[Piece]) -> None:
    """Counts the bytes, and the pairs of bytes if all of them count.

    A zero byte ends each document, and is before the first.
    """
    text = b"".join(piece.text + b"\0" if piece.last else piece.text for piece in pieces)
    self.state["bytes"][split] += len(text)
    counted = (p.document.counted_bytes if p.document else len(p.text) + p.last for p in pieces)
    self.state["counted_bytes"][split] += sum(counted)
    if split == TRAIN and not self._in_spans:
      self._pairs += pair_counts(bytes([self.state["last_byte"]]) + text)
      self.state["last_byte"] = text[-1]

  def _note(self, pieces: list[Piece], encoded: list[Encoded]) -> None:
    """Counts what the tokens do not say: bytes that are not UTF-8, by the number of their file, and missing tokens."""
    if self._tokenizer is BYTES:
      return  # bytes of any kind have tokens
    for piece in pieces:
      try:
        piece.text.decode()
      except UnicodeDecodeError:
        wrong = len(piece.text) - len(piece.text.decode(errors="ignore").encode())
        files = self.state["not_utf8"]
        files[str(piece.file)] = files.get(str(piece.file), 0) + wrong
    if missing := self._tokenizer.missing:
      self.state["characters"] += sum(len(piece.text.decode(errors="replace")) for piece in pieces)
      self.state["lost"] += missing.lost(piece.text for piece in pieces)
      self.state["unknown"] += missing.unknowns(own.ids for own in encoded)

  def save(self, piece: Piece) -> None:
    """Saves how far it is, after this piece."""
    self.state |= {"position": piece.position, "done": piece.done, "pairs": self._pairs.ravel().tolist()}
    self._files.save()

  def finish(self, folder: Path, files: Files) -> None:
    """Writes `pairs.npy`, the labels and at last `meta.json`."""
    np.save(folder / "pairs.npy", self._pairs)
    fingerprints = {name: file.fingerprint() for name, file in self._files.files.items()}
    skips = [self.state["skipped"]] if self.state.get("skipped") else []
    identity = json.dumps([self._tokenizer.name, fingerprints, self.state["classes"], *skips])
    for file in self._files.files.values():
      file.sync()
    by_split = ("documents", "tokens", "counted_tokens", "counted_bytes")  # the loss counts all, or completions
    meta: dict[str, Any] = {key: dict(zip(SPLITS, self.state[key], strict=True)) for key in by_split}
    meta |= {
      "files": len(files), "bytes": sum(self.state["bytes"]),
      "dtype": self._tokenizer.dtype.str, "largest_id": self.state["largest_id"],
      "fingerprint": hashlib.sha256(identity.encode()).hexdigest(),
    }  # fmt: skip
    meta |= left_out(self.state)
    if self._tokenizer.documents:
      meta["tokenized_by"] = self._tokenizer.documents.library()
    meta |= {name: self.state[name] for name in ("characters", "lost", "unknown")}
    meta["not_utf8"] = {files[int(number)].path: count for number, count in self.state["not_utf8"].items()}
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
  return tqdm(total=total, initial=done, desc=visible(name), unit="B", unit_scale=True, disable=None, file=sys.stderr)
