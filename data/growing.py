"""Files that grow together with a state, and survive a kill at any moment.

`save` writes down the state and the sizes of the files. After a kill, all are as they were at the last `save`.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from runtime.storage.owners import mine_alone

NAME = "growing.json"
BLOCK = 1 << 20  # bytes of a file that are hashed at a time
_fingerprints: dict[Path, tuple[int, str]] = {}  # of files that were closed: their sizes and fingerprints


class GrowingFile:
  """A file that grows. Its hash is a chain over its blocks, so the last link and the rest of the file continue it."""

  def __init__(self, path: Path, size: int = 0, chain: str = ""):
    self.path = path
    self._file = open(path, "r+b" if size else "w+b", opener=mine_alone)  # noqa: SIM115  # `close` closes it
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

  def __exit__(self, kind: type | None, *_: Any) -> None:
    for file in self.files.values():
      if kind is None:
        _fingerprints[file.path] = (file.size, file.fingerprint())
      file.close()

  def save(self) -> None:
    """Writes down the state, and how far each file has grown."""
    files = {name: file.sync() for name, file in self.files.items()}
    write_atomically(self._path, {"state": self.state, "files": files})


def taken(folder: Path) -> dict[str, str]:
  """The fingerprints of files of a folder that have grown here, so that nobody has to read them again."""
  known = {path: _fingerprints.pop(path) for path in list(_fingerprints) if path.parent == folder}
  return {path.name: found for path, (size, found) in known.items() if path.exists() and path.stat().st_size == size}


def fingerprint_of(path: Path) -> str:
  """`GrowingFile.fingerprint` of a file that is complete."""
  chain = b""
  with open(path, "rb", opener=mine_alone) as file:
    while len(block := file.read(BLOCK)) == BLOCK:
      chain = hashlib.sha256(chain + block).digest()
  return hashlib.sha256(chain + block).hexdigest()


def state_of(folder: Path) -> dict[str, Any]:
  """The state that was saved in a folder; {} if none was."""
  path = folder / NAME
  return json.loads(path.read_text())["state"] if path.exists() else {}


def change_state(folder: Path, state: dict[str, Any]) -> None:
  """Changes the state that was saved in a folder, but not how far its files are."""
  write_atomically(folder / NAME, json.loads((folder / NAME).read_text()) | {"state": state})


def remove(folder: Path) -> None:
  """Forgets how far the files of a folder are; the files stay."""
  for path in (folder / NAME, _unfinished(folder / NAME)):  # a kill may have left the second
    path.unlink(missing_ok=True)


def write_atomically(path: Path, value: Any) -> None:
  """Writes JSON. After a kill or a power failure the file is as before, or whole."""
  unfinished = _unfinished(path)
  with open(unfinished, "w", opener=mine_alone) as file:
    file.write(json.dumps(value))
    file.flush()
    os.fsync(file.fileno())
  unfinished.replace(path)


def _unfinished(path: Path) -> Path:
  return path.with_name(f".{path.name}")
