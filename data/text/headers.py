"""Headers of token files: those that are read, and signs that a file has another one, which would be taken for ids.

- llm.c and modded-nanogpt: 256 int32, little endian: a magic number that gives the type of the ids, version 1, and how
  many ids follow.
- NumPy's .npy: integers in one dimension, or in rows of one length.
- Ids without a header: nanoGPT's .bin, and what OLMo writes as .npy.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from data.files import ArrayFile, array_file
from data.recognition.content import LLMC, LLMC_HEADER, npy_header
from errors import ConfigError, first_line

BLOCK = 1 << 20  # ids that are looked at
HEAD = 4096  # bytes that a header may have
LENGTHS = (8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 128, 256, 512, 1024, 2048, 4096)  # bytes that headers have
ZEROS = 64  # so many ids of zero in a row, where no others are, are a header's unused fields
FEWEST = 1000  # ids of a file in which such signs mean something


def llmc(path: Path) -> ArrayFile:
  """The ids of a file of llm.c. Raises ConfigError if it has more or fewer than its header says."""
  header = np.fromfile(path, "<i4", LLMC_HEADER // 4)
  dtype, count = LLMC[int(header[0])], int(header[2])
  ids = array_file(path, dtype, LLMC_HEADER)
  expected = LLMC_HEADER + count * dtype.itemsize
  if path.stat().st_size != expected:
    raise ConfigError(
      f"data.path={str(path)!r} has {path.stat().st_size} bytes, but the header of llm.c says that {count} ids follow, "
      f"which makes {expected}; copy it again"
    )
  return ids


def npy(path: Path) -> ArrayFile:
  """The ids of a file of NumPy. Raises ConfigError if it is damaged."""
  try:
    with path.open("rb") as file:
      shape, _, dtype = npy_header(file)
      offset = file.tell()
  except (ValueError, EOFError, SyntaxError) as error:
    raise ConfigError(
      f"data.path={str(path)!r} is a damaged file of NumPy ({first_line(error)}); save it again"
    ) from error
  count = int(np.prod(shape, dtype=np.int64))
  if path.stat().st_size < offset + count * dtype.itemsize:
    raise ConfigError(f"data.path={str(path)!r} is cut off: its header says that {count} ids follow; copy it again")
  return ArrayFile(path, dtype, count, offset)


KINDS: dict[str, Callable[[Path], ArrayFile]] = {"llmc": llmc, "npy": npy}


def refuse(files: Sequence[ArrayFile]) -> None:
  """Raises ConfigError for ids without a header that are wider than their type, or begin with a header.

  A program writes a header into all its files, or into none. So signs of it in a few files are chance: in many ids,
  some are the numbers that a header would have.
  """
  signs = [ids for ids in files if _begins_with_header(ids)]
  if signs and 2 * len(signs) >= len(files):
    raise header(str(signs[0].path))


def _begins_with_header(ids: ArrayFile) -> bool:
  head = min(len(ids), HEAD // ids.dtype.itemsize)
  later = ids.slice(head, min(len(ids), head + BLOCK))
  if ids.dtype.itemsize == 2:
    _check_width(ids, later if len(later) >= 64 else ids.slice(0, min(len(ids), BLOCK)))
  has_zeros = len(later) >= FEWEST and _zeros(ids.slice(0, head)) >= ZEROS and _zeros(later) < ZEROS // 4
  return has_zeros or _counts_itself(ids, head)


def header(path: str) -> ConfigError:
  return ConfigError(
    f"data.path={path!r} begins with a header, which would be taken for token ids; write the ids alone, or with "
    "numpy.save as a .npy"
  )


def _check_width(ids: ArrayFile, some: np.ndarray) -> None:
  """Raises ConfigError for ids of 4 or 8 bytes. Read as uint16, every second one is then 0 or very small."""
  lower, upper = some[: len(some) // 2 * 2].reshape(-1, 2).T
  if len(upper) < 32:
    return
  if upper.max() == 0 < lower.max() or (upper.max() < 16 and lower.max() >= 1024):
    raise ConfigError(
      f"data.path={str(ids.path)!r} seems to hold ids of 4 bytes or more, but without a header, and with a "
      "model.vocab_size of at most 65536, they must be uint16; write uint16, or an .npy with numpy.save"
    )


def _counts_itself(ids: ArrayFile, head: int) -> bool:
  """Whether a number at the beginning is how many ids, of 2 or 4 bytes, follow a header of some length.

  A count of 4 bytes may be two ids by chance. So another small number, such as a version, must be in the header, too.
  """
  size, start = len(ids) * ids.dtype.itemsize, ids.slice(0, head).tobytes()
  for length in (length for length in LENGTHS if length <= len(start)):
    counts = {(size - length) // width for width in (2, 4) if (size - length) % width == 0 and size > FEWEST * width}
    short, long = (np.frombuffer(start[: length // n * n], f"<u{n}") for n in (4, 8))
    if counts & set(long.tolist()):
      return True
    if counts & set(short.tolist()) and any(0 < number < 1 << 16 for number in set(short.tolist()) - counts):
      return True
  return False


def _zeros(ids: np.ndarray) -> int:
  """The longest run of zeros."""
  others = np.flatnonzero(np.concatenate([[1], ids, [1]]))
  return int(np.diff(others).max()) - 1
