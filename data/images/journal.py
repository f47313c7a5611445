"""The journal of a preparation: what it has done, so that the next one can go on there if it is killed."""

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np

SPLITS = ("train", "validation")


@dataclasses.dataclass
class Journal:
  """What has been done. The first `chunks` chunks gave `counts` images to each split."""

  digest: str
  sums: list[int]
  squares: list[int]
  chunks: int = 0
  counts: list[int] = dataclasses.field(default_factory=lambda: [0, 0])

  def add(self, images: np.ndarray, labels: np.ndarray, held: np.ndarray) -> None:
    """Counts a chunk of images uint8 [N, S, S, C], N at most 128."""
    digest = hashlib.sha256(bytes.fromhex(self.digest))
    for array in (held, labels.astype("<i8"), images):
      digest.update(array.tobytes())
    train = images[~held]
    # Adding up whole images first is much faster than adding up channels, and it cannot overflow.
    sums, squares = train.sum(0, dtype=np.uint32), np.multiply(train, train, dtype=np.uint16).sum(0, dtype=np.uint32)
    for mine, new in ((self.sums, sums), (self.squares, squares)):
      mine[:] = (np.array(mine) + new.sum((0, 1), dtype=np.int64)).tolist()
    self.digest = digest.hexdigest()
    self.counts = [self.counts[0] + len(train), self.counts[1] + len(images) - len(train)]
    self.chunks += 1


def save(folder: Path, journal: Journal, files: Sequence[IO[bytes]]) -> None:
  """Writes the journal, once all that it says is on the disk."""
  for file in files:
    file.flush()
    os.fsync(file.fileno())
  new = folder / "journal.new"
  new.write_text(json.dumps(dataclasses.asdict(journal)))
  new.replace(folder / "journal.json")


def restored(folder: Path, shape: tuple[int, int, int]) -> Journal | None:
  """What a killed preparation did, if any. Removes from the files what it wrote after that."""
  file = folder / "journal.json"
  journal = Journal(**json.loads(file.read_text())) if file.exists() else None
  for split, count in zip(SPLITS, journal.counts if journal else (0, 0), strict=True):
    path = folder / f"{split}.images"
    path.touch()
    os.truncate(path, count * math.prod(shape))
  return journal
