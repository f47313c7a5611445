"""Folders of a bucket: named by a URL, and used like a `Path` where programs only read.

`location` makes a Path or a Folder of what a user gives. Both join with `/`, and have `name`, `parent`, `is_dir`,
`exists` and `read_text`, so that most code which reads the results of a run takes either.
"""

import dataclasses
import errno
import fnmatch
import functools
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from errors import ConfigError, expanded
from runtime.storage.answers import TRIES, StorageError, explained, no_answer

if TYPE_CHECKING:
  from tensorstore import Context, KvStore

SCHEMES = {"gs": "Google Cloud Storage", "s3": "S3"}
SECONDS = 120.0  # until a small request must be answered, with all tries
BYTES_PER_SECOND = 1 << 20  # a large one gets a second more for so many bytes
DELAYS = {"max_retries": TRIES, "initial_delay": "500ms", "max_delay": "16s"}
AT_ONCE = 128 << 20  # bytes that are sent at a time, but for a larger single object
PIECE = 64 << 20  # bytes that are read at a time of an object that may be large
_PATH = re.compile(r"[^\x00-\x1f\x7f?#*\[\]\\]+")


def is_url(text: str) -> bool:
  """Whether this names storage by a URL, of whatever kind."""
  return bool(re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text))


def location(given: str, field: str) -> "Location":
  """What a user names. Raises ConfigError, naming `field`, if it is a URL that cannot be used."""
  return Folder.parse(given, field) if is_url(given) else expanded(given, field)


def is_file(name: Any) -> bool:
  """Whether this names a file in a folder, or below it. Whoever writes into a bucket may give objects other names."""
  return isinstance(name, str) and "\0" not in name and not {"", ".", ".."} & set(name.split("/"))


@dataclasses.dataclass(frozen=True, order=True)
class Folder:
  """A folder of a bucket, or an object: what a path names is known only when it is read.

  All methods that reach storage raise StorageError.
  """

  scheme: str
  bucket: str
  path: str  # without slashes at its ends; empty for the bucket itself

  @staticmethod
  def parse(url: str, field: str) -> "Folder":
    """Reads a URL. The errors never repeat one that has credentials in it."""
    scheme, _, rest = url.partition("://")
    bucket, _, path = rest.partition("/")
    if "@" in bucket or "?" in rest or "#" in rest:
      raise ConfigError(
        f"{field} has a URL ({scheme}://...) with a user, a query or a fragment, which may be credentials; use only "
        f"{scheme}://BUCKET/PATH, and give credentials by the environment"
      )
    if scheme not in SCHEMES:
      raise ConfigError(
        f"{field}={url!r} is not storage that can be used; use a folder, gs://BUCKET/PATH or s3://BUCKET/PATH"
      )
    parts = path.strip("/").split("/")
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{1,220}", bucket):
      raise ConfigError(f"{field}={url!r} has no valid name of a bucket; write it as {scheme}://BUCKET/PATH")
    if path.strip("/") and any(part in ("", ".", "..") or not _PATH.fullmatch(part) for part in parts):
      raise ConfigError(f"{field}={url!r} has a path that cannot be used; write it as {scheme}://BUCKET/FOLDER/FOLDER")
    return Folder(scheme, bucket, path.strip("/"))

  def __truediv__(self, name: str | os.PathLike[str]) -> "Folder":
    return dataclasses.replace(self, path="/".join(filter(None, [self.path, os.fspath(name).strip("/")])))

  def __str__(self) -> str:
    return f"{self.scheme}://{self.bucket}/{self.path}".rstrip("/")

  @property
  def name(self) -> str:
    return self.path.rpartition("/")[2]

  @property
  def stem(self) -> str:
    return Path(self.name).stem

  @property
  def parent(self) -> "Folder":
    return dataclasses.replace(self, path=self.path.rpartition("/")[0])

  def absolute(self) -> "Folder":
    return self

  def resolve(self) -> "Folder":
    return self

  @property
  def spec(self) -> dict[str, Any]:
    """The specification of this folder for tensorstore. Give it `context()`, too."""
    spec: dict[str, Any] = {"driver": "gcs" if self.scheme == "gs" else self.scheme, "bucket": self.bucket}
    if self.scheme == "s3":
      # The variables of Amazon's own tools. Other stores with the protocol of S3 need an endpoint.
      endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
      region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
      spec |= ({"endpoint": endpoint} if endpoint else {}) | ({"aws_region": region} if region else {})
      if endpoint and not region:
        spec["aws_region"] = "us-east-1"  # tensorstore asks Amazon for it otherwise
      if os.environ.get("AWS_ACCESS_KEY_ID"):
        spec["aws_credentials"] = {"type": "environment"}  # the first of its chain; it complains if the next is missing
    return spec | ({"path": f"{self.path}/"} if self.path else {})

  def read(self) -> tuple[bytes | None, bytes]:
    """The object and its generation. The object is None if there is none.

    A missing object has a generation, too, which can be given to `write`.
    """
    found = self._wait(self._bucket.read(self.path))
    return (found.value if found.state == "value" else None), found.stamp.generation

  def write(self, data: bytes, only_if: bytes | None = None) -> bytes | None:
    """Puts the object, whole and at once, and returns its generation.

    Args:
      only_if: the generation that it must have, as `read` returned it. Otherwise nothing is written, and None returned.
    """
    stamp = self._wait(self._bucket.write(self.path, data, if_equal=only_if), len(data))
    return stamp.generation or None

  def read_bytes(self) -> bytes:
    """The object. Raises FileNotFoundError if there is none."""
    found, _ = self.read()
    if found is None:
      raise FileNotFoundError(f"{self} does not exist")
    return found

  def read_text(self) -> str:
    return self.read_bytes().decode()

  def exists(self) -> bool:
    """Whether there is such an object, or a folder with objects."""
    return self.generations([""]) != [None] or self.is_dir()

  def is_dir(self) -> bool:
    """Whether there are objects below."""
    return bool(self.names())

  def generations(self, names: Iterable[str]) -> list[bytes | None]:
    """The generation of each of the objects with these names below; None for those that are not there. Reads none."""
    nothing = slice(0, 0)
    asked = [(self / name, self._bucket.read((self / name).path, byte_range=nothing)) for name in names]
    found = [one._wait(future) for one, future in asked]
    return [one.stamp.generation if one.state == "value" else None for one in found]

  def names(self) -> list[str]:
    """The objects below, by their paths relative to this folder, in order. Leaves out what `is_file` refuses."""
    store = _open(self.spec)
    names = (name.decode(errors="replace") for name in self._wait(store.list()))
    return sorted(name for name in names if is_file(name))

  def iterdir(self) -> "Iterator[Folder]":
    """The folders and objects directly below."""
    return (self / name for name in dict.fromkeys(name.partition("/")[0] for name in self.names()))

  def glob(self, pattern: str) -> "Iterator[Folder]":
    """The folders and objects directly below whose names match."""
    return (found for found in self.iterdir() if fnmatch.fnmatchcase(found.name, pattern))

  def remove(self) -> None:
    """Removes all objects below."""
    store = _open(self.spec)
    self._wait(store.delete_range(type(store).KeyRange()))

  def unlink(self) -> None:
    """Removes the object, if there is one."""
    self._wait(self._bucket.write(self.path, None))

  def upload(self, root: Path, names: Iterable[str]) -> None:
    """Puts files of a folder, by their paths relative to it."""
    pending = 0
    waiting: list[tuple[Folder, Any, int]] = []
    for name in names:
      try:
        data, target = (root / name).read_bytes(), self / name
      except FileNotFoundError:  # removed a moment ago
        continue
      if waiting and pending + len(data) > AT_ONCE:
        self._all(waiting)
        pending, waiting = 0, []
      waiting.append((target, self._bucket.write(target.path, data), len(data)))
      pending += len(data)
    self._all(waiting)

  def download(self, file: Path) -> None:
    """Writes the object into a file, which appears when it is complete. A large one is read in pieces."""
    part = file.with_name(f".{file.name}.part")
    file.parent.mkdir(parents=True, exist_ok=True)
    with part.open("wb") as out:
      for piece in self._pieces():
        out.write(piece)
    part.replace(file)

  def rename(self, to: "Folder") -> None:
    """Copies all objects below, then removes them here: a bucket cannot rename."""
    for name in self.names():
      (to / name).write((self / name).read_bytes())
    self.remove()

  def _pieces(self) -> Iterator[bytes]:
    start, first = 0, b""
    while True:
      found = self._range(slice(start, start + PIECE)) or self._range(slice(start, None))
      if found is None:  # it ended with the piece before
        return
      if found.state != "value":
        raise FileNotFoundError(f"{self} does not exist")
      if start and found.stamp.generation != first:
        raise StorageError(errno.EIO, f"{self}: it changed while it was read; run again when it changes no more")
      yield found.value
      start, first = start + len(found.value), found.stamp.generation
      if len(found.value) < PIECE:
        return

  def _range(self, of: slice) -> Any:
    """What is read of a range of bytes. None if the object does not have all of them."""
    try:
      return self._wait(self._bucket.read(self.path, byte_range=of))
    except StorageError as error:
      if error.errno != errno.ERANGE:
        raise
      return None

  @property
  def _bucket(self) -> "KvStore":
    return _opened(json.dumps(dataclasses.replace(self, path="").spec))

  def _all(self, waiting: "list[tuple[Folder, Any, int]]") -> None:
    for target, future, size in waiting:
      target._wait(future, size)

  def _wait(self, future: Any, size: int = 0) -> Any:
    seconds = SECONDS + size / BYTES_PER_SECOND
    try:
      return future.result(timeout=seconds)
    except TimeoutError:
      failed = no_answer(str(self), seconds)
    except Exception as error:  # of tensorstore, which raises ValueErrors for whatever a server answers
      failed = explained(str(self), error)
    raise failed  # here, so that it has no context: what a server answered is never shown


Location = Path | Folder  # on this machine, or in a bucket


def here(results: Location) -> Path:
  """The folder of this machine that a run writes into: its workdir, or what it then copies to a bucket."""
  return Path("runs", results.scheme, results.bucket, results.path) if isinstance(results, Folder) else results


@functools.cache
def context() -> "Context":
  """What all requests share: how often they are tried, and how many are under way at a time."""
  from tensorstore import Context

  return Context({"gcs_request_retries": DELAYS, "s3_request_retries": DELAYS})


@functools.cache
def _opened(spec: str) -> "KvStore":
  return _open(json.loads(spec))


def _open(spec: dict[str, Any]) -> "KvStore":
  from tensorstore import KvStore  # not above: what has no bucket starts sooner without it

  return KvStore.open(spec, context=context()).result()
