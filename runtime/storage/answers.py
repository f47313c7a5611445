"""Why storage failed, in one sentence. What a server sends back is never shown, because it may repeat credentials."""

import errno
import os
import re
from typing import NamedTuple

from errors import Unavailable, of_file

TRIES = 8  # of a request that storage does not answer properly


class StorageError(OSError):
  """Storage did not do what it was asked for. `strerror` is the reason as one sentence, without a full stop."""

  def __init__(self, number: int, reason: str):
    super().__init__(number, reason)

  def __str__(self) -> str:
    return self.strerror or ""


class Unreadable(StorageError, Unavailable):
  """Files of this machine cannot be read now, which says nothing of what is in them."""


def unreadable(error: OSError, path: str | os.PathLike[str]) -> Unreadable:
  """The error to raise in place of one of the operating system."""
  return Unreadable(error.errno or errno.EIO, of_file(error, path))


class Kind(NamedTuple):
  """A kind of failure: the HTTP status or the words that tell it, its error number, and the reason that users read."""

  status: str
  words: str
  number: int
  reason: str


# The first one whose words are in the message of tensorstore, or else the first one with its status.
KINDS = (
  Kind("", r"^OUT_OF_RANGE", errno.ERANGE, "it is shorter than expected"),
  Kind("404", "NoSuchBucket|bucket does not exist", errno.ENOENT, "there is no such bucket"),
  Kind(
    "401", "ExpiredToken|TokenRefreshRequired|UNAUTHENTICATED|InvalidAccessKeyId|[Cc]redentials", errno.EACCES,
    "the credentials are missing or have expired; renew them, and run the same command again",
  ),
  Kind("507", "[Qq]uota|StorageFull", errno.EDQUOT, "the bucket's quota is used up; free some space"),
  Kind(
    "403", "AccessDenied", errno.EACCES,
    "permission denied; these credentials need to read, write, list and delete objects there",
  ),
  Kind(
    "429", "SlowDown|[Rr]ate ?[Ll]imit", errno.EAGAIN, f"storage asked for fewer requests, {TRIES} times in a row",
  ),
  Kind("5..", "InternalError", errno.EIO, f"storage failed, {TRIES} times in a row"),
  Kind("", "CURL|UNAVAILABLE", errno.EIO, "storage cannot be reached, or the connection broke; check the network"),
)  # fmt: skip
_OF_STORAGE = "http_response_code=|CURL|UNAVAILABLE|UNAUTHENTICATED|DEADLINE_EXCEEDED"


def no_answer(where: str, seconds: float) -> StorageError:
  """The error of a request that takes too long."""
  return StorageError(errno.ETIMEDOUT, f"{where}: storage did not answer within {seconds:.0f} s")


def explained(where: str, error: BaseException) -> StorageError:
  """The error to raise in place of tensorstore's. `where` names the object."""
  if isinstance(error, StorageError):
    return error
  text = str(error)
  code = re.search(r"http_response_code='(\d+)'", text)
  kinds = [kind for kind in KINDS if re.search(kind.words, text)]
  kinds += [kind for kind in KINDS if code and re.fullmatch(kind.status, code[1])]
  if kinds:
    return StorageError(kinds[0].number, f"{where}: {kinds[0].reason}")
  status = re.match(r"[A-Z_]{4,}", text)
  what = f"HTTP {code[1]}" if code else status[0] if status else type(error).__name__
  return StorageError(errno.EIO, f"{where}: storage refused the request ({what})")


def of_storage(error: BaseException) -> bool:
  """Whether an error comes from storage that does not answer properly, and not from what is stored there."""
  return isinstance(error, StorageError | TimeoutError) or bool(re.search(_OF_STORAGE, str(error)))
