"""Decodes a source of images once, into raw files that are read at training time.

The prepared folder holds, for both splits, `SPLIT.images` (uint8 [N, S, S, C]), `SPLIT.labels` (int32 [N]), and
`meta.json`. A preparation that is killed goes on where it was last saved.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import tqdm

import limits
from data import described
from data.cache import prepared
from data.dataset import HostBatch
from data.files import ArrayFile, array_file
from data.growing import GrowingFiles, remove
from data.images.decode import pixels
from data.images.examples import TOGETHER, TOGETHER_BYTES, Examples, Form, Opened, held_out, readable
from errors import ConfigError, visible

FORMAT = 2  # version of the prepared files; increase it when they change
SPLITS = ("train", "validation")
CHUNK_IMAGES = TOGETHER  # images are decoded in chunks of at most so many
THREADS = os.cpu_count() or 1
SAVE_SECONDS = 5.0  # how much work a kill may undo


@dataclasses.dataclass(frozen=True)
class Images:
  """The images of a split, of one shape (S, S, C)."""

  images: ArrayFile
  labels: ArrayFile
  shape: tuple[int, int, int]

  def __len__(self) -> int:
    return len(self.labels)

  def read(self, ids: np.ndarray) -> HostBatch:
    size = math.prod(self.shape)
    images = self.images.read(ids * size, size).reshape(len(ids), *self.shape)
    return {"image": images, "label": self.labels.read(ids, 1)[:, 0]}


@dataclasses.dataclass(frozen=True)
class Stored:
  """A prepared source.

  Attributes:
    said: the field of the config and its value, for errors.
    shape: of an image.
    labels: those that occur in training, in increasing order.
    classes: the names of the classes; () if they have none.
    sums, squares: of the values 0 to 255 of each channel, over all training images.
    note: for the description of the data.
  """

  said: str
  train: Images
  validation: Images
  shape: tuple[int, int, int]
  labels: tuple[int, ...]
  classes: tuple[str, ...]
  sums: tuple[int, ...]
  squares: tuple[int, ...]
  fingerprint: str
  note: str


def prepare(form: Form, cache_dir: str, resize: int, limit: int = limits.ROW) -> Stored:
  """Prepares a source, unless that has been done before. Raises ConfigError for bad input."""
  with readable(form.said):
    key = form.key()
  folder = prepared(cache_dir, "images", (FORMAT, key, resize), lambda to: _write(to, form, key, resize, limit))
  meta = described.meta(folder, described.IMAGES)
  meta = {name: tuple(value) if isinstance(value, list) else value for name, value in meta.items()}
  train, validation = (
    Images(
      array_file(folder / f"{split}.images", np.uint8), array_file(folder / f"{split}.labels", "<i4"), meta["shape"]
    )
    for split in SPLITS
  )
  return Stored(form.said, train, validation, **meta)


@dataclasses.dataclass(frozen=True)
class Group:
  """Examples, and which of them are for validation, bool [N]."""

  examples: Examples
  held: np.ndarray


def _write(folder: Path, form: Form, key: Any, resize: int, limit: int) -> None:
  """Fills a folder, which may hold what a killed preparation left."""
  with readable(form.said):
    opened = form.open()
  groups = _groups(opened, form.said)
  decoder = _decoder(opened, resize, form.said, limit)
  decoded = _decode(folder, groups, decoder, form.said)
  with readable(form.said):
    changed = form.key() != key
  if changed:
    raise ConfigError(f"{form.said} has changed while it was read; leave it unchanged and run again")
  content = hashlib.sha256(repr((decoder.shape, opened.classes, decoded["files"])).encode())
  for split, of_split in zip(SPLITS, (lambda g: ~g.held, lambda g: g.held), strict=True):
    labels = np.concatenate([g.examples.labels[of_split(g)] for g in groups]).astype("<i4").tobytes()
    (folder / f"{split}.labels").write_bytes(labels)
    content.update(labels)
  meta = {
    "shape": decoder.shape, "labels": np.unique(opened.train.labels).tolist(), "classes": opened.classes,
    "sums": decoded["sums"], "squares": decoded["squares"], "fingerprint": content.hexdigest(), "note": opened.note,
  }  # fmt: skip
  (folder / "meta.json").write_text(json.dumps(meta))
  remove(folder)


def _groups(opened: Opened, said: str) -> list[Group]:
  """The examples in the order in which they are stored. Checks their labels."""
  train, validation = opened.train, opened.validation
  everything = [train.labels] if validation is None else [train.labels, validation.labels]
  if not all(map(len, everything)):
    raise ConfigError(f"{said} has no images to {'validate' if len(train.labels) else 'train'} on; add some")
  low, high = min(int(x.min()) for x in everything), max(int(x.max()) for x in everything)
  if low < 0 or high >= 1 << 31:
    raise ConfigError(f"{said} has the label {low if low < 0 else high}; number the classes from 0")
  name = lambda label: repr(opened.classes[label]) if label < len(opened.classes) else str(label)
  known = np.unique(train.labels)
  if len(known) < 2:
    raise ConfigError(f"{said} has a single class to train on, {name(known[0])}; add images of another one")
  if validation is None:
    held = held_out(train.labels, map(train.name, range(len(train.labels))))
    if not held.any():
      raise ConfigError(
        f"{said} has only one image for each class, so that none can be set apart to validate on; add images, or set "
        "data.validation_path"
      )
    return [Group(train, held)]
  if len(unknown := np.setdiff1d(validation.labels, known)):
    raise ConfigError(
      f"{said} has images of the class {name(unknown[0])} to validate on, but none to train on; add some there"
    )
  return [Group(x, np.full(len(x.labels), x is validation)) for x in (train, validation)]


@dataclasses.dataclass(frozen=True)
class Decoder:
  """Decodes images that must all have one shape, that of the image `first`."""

  shape: tuple[int, int, int]
  resize: int
  first: str
  limit: int

  def __call__(self, pool: ThreadPoolExecutor, examples: Examples, start: int, stop: int) -> np.ndarray:
    """The images from `start` up to `stop`, uint8 [N, S, S, C]."""
    images = np.empty((stop - start, *self.shape), np.uint8)
    for first in range(start, stop, examples.at_a_time):
      self._decode(pool, examples, first, images[first - start :][: examples.at_a_time])
    return images

  def _decode(self, pool: ThreadPoolExecutor, examples: Examples, start: int, images: np.ndarray) -> None:
    """Decodes the images from `start` on."""
    encoded = examples.encoded(start, start + len(images))

    def decode(first: int) -> None:
      for i in range(first, len(images), THREADS):
        where = examples.where(start + i)
        found = pixels(encoded[i], where, self.shape[2], self.resize, self.limit)
        if found.shape != self.shape:
          raise ConfigError(
            f"{self.first!r} is {self.shape[1]}×{self.shape[0]}, but {where!r} is {found.shape[1]}×{found.shape[0]}; "
            "set data.resize to give all images one size"
          )
        images[i] = found

    for _ in pool.map(decode, range(THREADS)):
      pass


def _decoder(opened: Opened, resize: int, said: str, limit: int) -> Decoder:
  where = opened.train.where(0)
  height, width, channels = pixels(opened.train.encoded(0, 1)[0], where, opened.channels, resize, limit).shape
  if height != width:
    raise ConfigError(
      f"{said} has images that are not square: {where!r} is {width}×{height}; set data.resize={min(height, width)} to "
      "cut out their middle"
    )
  return Decoder((height, width, channels), resize, where, limit)


def _decode(folder: Path, groups: list[Group], decode: Decoder, said: str) -> dict[str, Any]:
  """Decodes all images into `SPLIT.images`, from where the files in the folder end.

  Returns a hash of each file, and `sums` and `squares` as in `Stored`.
  """
  size = min(CHUNK_IMAGES, max(1, TOGETHER_BYTES // math.prod(decode.shape)))
  chunks = [(group, start) for group in groups for start in range(0, len(group.held), size)]
  total, saved = sum(len(group.held) for group in groups), time.monotonic()
  with contextlib.ExitStack() as stack:
    growing = stack.enter_context(GrowingFiles(folder, tuple(f"{split}.images" for split in SPLITS)))
    channels, files, done = decode.shape[2], list(growing.files.values()), growing.state
    if not done:
      done |= {"chunks": 0, "sums": [0] * channels, "squares": [0] * channels}
    pool = stack.enter_context(ThreadPoolExecutor(THREADS))
    initial = sum(file.size for file in files) // math.prod(decode.shape)
    bar = stack.enter_context(tqdm.tqdm(total=total, initial=initial, desc=visible(said), unit=" images", disable=None))
    for group, start in chunks[done["chunks"] :]:
      stop = min(start + size, len(group.held))
      images, held = decode(pool, group.examples, start, stop), group.held[start:stop]
      for file, of_split in zip(files, (~held, held), strict=True):
        file.write(images[of_split])
      _add(done, images[~held])
      bar.update(stop - start)
      if time.monotonic() - saved >= SAVE_SECONDS:
        growing.save()
        saved = time.monotonic()
    growing.save()
    return done | {"files": [file.fingerprint() for file in files]}


def _add(done: dict[str, Any], images: np.ndarray) -> None:
  """Counts a chunk of training images uint8 [N, S, S, C], N at most 128."""
  # Adding up whole images first is much faster than adding up channels, and it cannot overflow.
  squared = np.multiply(images, images, dtype=np.uint16)
  for name, values in (("sums", images), ("squares", squared)):
    new = values.sum(0, dtype=np.uint32).sum((0, 1), dtype=np.int64)
    done[name] = [before + int(x) for before, x in zip(done[name], new, strict=True)]
  done["chunks"] += 1
