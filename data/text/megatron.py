"""The index of Megatron-LM's token files (megatron/core/datasets/indexed_dataset.py), little endian:

    header      9 bytes "MMIDIDX\\0\\0", version uint64 (1), type of the ids uint8, S uint64, D + 1 uint64
    sizes       int32 [S]      tokens of each sequence
    pointers    int64 [S]      byte of the .bin at which each sequence starts
    documents   int64 [D + 1]  how many sequences come before each document, and in all
    modes       int8 [S]       of multimodal data only, which is refused

A document is one or several sequences.
"""

import dataclasses
import itertools
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from data.files import ArrayFile
from errors import ConfigError

HEADER = struct.Struct("<9sQBQQ")
MAGIC = b"MMIDIDX\0\0"
TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floating-point
BLOCK = 1 << 18  # numbers read at a time


@dataclasses.dataclass(frozen=True)
class Index:
  """An index whose size is right. `ends` checks what it says.

  Attributes:
    path: of the index.
    dtype: of the ids.
    tokens: how many tokens the .bin holds.
    sizes, pointers, documents: as above.
  """

  path: Path
  dtype: np.dtype
  tokens: int
  sizes: ArrayFile
  pointers: ArrayFile
  documents: ArrayFile

  def ends(self) -> Iterator[np.ndarray]:
    """The position just after each document, int64, in blocks of any size.

    Raises ConfigError, at the latest at the end, unless the documents tile the .bin in order.
    """
    total, document = 0, 1  # tokens before this block; the next document to end
    if self.documents.slice(0, 1)[0] != 0:
      raise self._misfit("its first document does not begin with the first sequence")
    for first in range(0, len(self.sizes), BLOCK):
      sizes = self.sizes.slice(first, last := min(first + BLOCK, len(self.sizes))).astype(np.int64)
      after = total + np.cumsum(sizes)
      if (sizes < 0).any() or ((after - sizes) * self.dtype.itemsize != self.pointers.slice(first, last)).any():
        raise self._misfit("its sequences do not follow one another in the .bin")
      stops = np.concatenate([[total], after])  # [i]: after i sequences of this block
      total = int(after[-1])
      while document < len(self.documents):
        some = self.documents.slice(document - 1, min(document + BLOCK, len(self.documents)))
        if (some[1:] < some[:-1]).any():  # a difference may not fit into 64 bits
          raise self._misfit("its documents are not in order")
        here = some[1:][some[1:] <= last]
        yield stops[here - first]
        document += len(here)
        if len(here) < len(some) - 1:
          break
    if document < len(self.documents) or self.documents.slice(document - 1, document)[0] != len(self.sizes):
      raise self._misfit("its documents do not hold all sequences")
    if total != self.tokens:
      raise self._misfit(f"it counts {total} tokens where the .bin holds {self.tokens}")

  def _misfit(self, reason: str) -> ConfigError:
    return ConfigError(
      f"data.path={str(self.path)!r} does not fit its .bin: {reason}; copy both files again, or write them again with "
      "Megatron-LM's preprocess_data.py"
    )


def read_index(path: Path, tokens: Path) -> Index:
  """The index at `path` of the file `tokens`. Raises ConfigError if it is not one, or is not whole."""
  with path.open("rb") as file:
    header = file.read(HEADER.size)
  if len(header) < HEADER.size or header[: len(MAGIC)] != MAGIC:
    raise ConfigError(
      f"data.path={str(path)!r} is not an index of Megatron-LM, which begins with MMIDIDX; write it with "
      "Megatron-LM's preprocess_data.py"
    )
  _, version, code, sequences, documents = HEADER.unpack(header)
  if version != 1 or code not in TYPES:
    wrong = f"version {version}" if version != 1 else f"ids of type {code}"
    raise ConfigError(
      f"data.path={str(path)!r} has {wrong}, which cannot be read; use version 1 and ids of an integer type, "
      f"{', '.join(map(str, TYPES))}"
    )
  dtype, size = np.dtype(TYPES[code]), path.stat().st_size
  at = list(itertools.accumulate([HEADER.size, 4 * sequences, 8 * sequences, 8 * documents]))
  if size == at[3] + sequences and sequences:
    raise ConfigError(f"data.path={str(path)!r} is multimodal, which cannot be read; use tokens of text alone")
  index = Index(
    path, dtype, tokens.stat().st_size // dtype.itemsize,
    sizes=ArrayFile(path, np.dtype("<i4"), sequences, at[0]),
    pointers=ArrayFile(path, np.dtype("<i8"), sequences, at[1]),
    documents=ArrayFile(path, np.dtype("<i8"), documents, at[2]),
  )  # fmt: skip
  if size != at[3] or not documents:
    raise index._misfit(f"it has {size} bytes where {sequences} sequences need {at[3]}")
  if tokens.stat().st_size % dtype.itemsize:
    raise index._misfit(f"the .bin has {tokens.stat().st_size} bytes, not a whole number of {dtype.name} ids")
  return index
