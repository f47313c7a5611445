"""Files that grow together with a state, and survive a kill at any moment.

`save` writes down the state and the sizes of the files. After a kill, all are as they were at the last `save`.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

NAME = "growing.json"
BLOCK = 1 << 20  # bytes of a file that are hashed at a time


class GrowingFile:
  """A file that grows. Its hash is a chain over its blocks, so the last link and the rest of the file continue it."""

  def __init__(self, path: Path, size: int = 0, chain: str = ""):
    self._file = path.open("r+b" if size else "w+b")
    self._file.truncate(size)
    self._file.seek(size - size % BLOCK)
    self._rest = bytearray(self._file.read())  # not hashed yet
    self._chain, self.size = bytes.fromhex(chain), size

  def write(self, data: Any) -> None:
    """Appends bytes, or the bytes of an array."""
    data = memoryview(data)
    if not data.nbytes:
      return
    data = data.cast("B")
    self._file.write(data)
    self.size += len(data)
    self._rest += data
    whole = len(self._rest) // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
      self._chain = hashlib.sha256(self._chain + self._rest[start : start + BLOCK]).digest()
    del self._rest[:whole]

  def sync(self) -> tuple[int, str]:
    """Flushes to disk. Returns what reopens the file: its size and its chain."""
    self._file.flush()
    os.fdatasync(self._file.fileno())
    return self.size, self._chain.hex()

  def fingerprint(self) -> str:
    """A hash of the content."""
    return hashlib.sha256(self._chain + self._rest).hexdigest()

  def close(self) -> None:
    self._file.close()


class GrowingFiles:
  """Growing files in a folder, and a state, JSON values with names.

  Attributes:
    state: as it was at the last `save`; {} at the beginning. Change it freely.
    files: by name.
  """

  def __init__(self, folder: Path, names: tuple[str, ...]):
    self._path = folder / NAME
    saved = json.loads(self._path.read_text()) if self._path.exists() else {"state": {}, "files": {}}
    self.state: dict[str, Any] = saved["state"]
    self.files = {name: GrowingFile(folder / name, *saved["files"].get(name, ())) for name in names}

  def __enter__(self) -> "GrowingFiles":
    return self

  def __exit__(self, *_: Any) -> None:
    for file in self.files.values():
      file.close()

  def save(self) -> None:
    """Writes down the state, and how far each file has grown."""
    files = {name: file.sync() for name, file in self.files.items()}
    write_atomically(self._path, {"state": self.state, "files": files})


def remove(folder: Path) -> None:
  """Forgets how far the files of a folder are; the files stay."""
  for path in (folder / NAME, _unfinished(folder / NAME)):  # a kill may have left the second
    path.unlink(missing_ok=True)


def write_atomically(path: Path, value: Any) -> None:
  """Writes JSON. After a kill or a power failure the file is as before, or whole."""
  unfinished = _unfinished(path)
  with unfinished.open("w") as file:
    file.write(json.dumps(value))
    file.flush()
    os.fsync(file.fileno())
  unfinished.replace(path)


def _unfinished(path: Path) -> Path:
  return path.with_name(f".{path.name}")
