"""Sends portions of the state from one process to another: copies to neighbours, and pieces to whoever restores them.

Each process listens on a TCP port. Who connects must first send the job's secret, which the processes have from JAX's
own connections. A request is JSON; files and pieces follow as plain bytes. No file is named by its path.

Nobody waits forever: not for the secret of a stranger, nor for another process that has stopped.
"""

import contextlib
import hmac
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from checkpointing.memory.pieces import Piece
from checkpointing.memory.store import (
  CHUNK,
  Damaged,
  Entry,
  Index,
  Portion,
  Store,
  check,
  index_of,
  parsed,
  portion_of,
)
from errors import first_line

CONNECT = 30.0  # seconds to connect to another process
STRANGE = 5.0  # seconds for the whole secret, after which a connection is closed
STRANGERS = 32  # connections that have not sent the secret yet; more must wait
ANSWER = 300.0  # seconds without a byte of an answer: the other process may be checking a large file
PAUSE = 0.5  # seconds after a failed `accept`, as without free file descriptors
LONGEST = 1 << 20  # bytes of a request
SECRET = 64  # bytes of the secret, at most
SIZE = struct.Struct("!i")  # how `Connection` sends the size of a message
Address = tuple[str, int]


class Unreachable(OSError):
  """Another process does not answer, or answers with an error."""


class Server:
  """Gives others what the store has, and takes copies. Use `close` at the end.

  Args:
    host: the address of this machine under which other processes reach it.
  """

  def __init__(self, store: Store, secret: bytes, host: str):
    self.store, self.secret = store, secret
    self._socket = socket.create_server((host, 0), backlog=64)
    self.address: Address = self._socket.getsockname()[:2]
    self._closed = False
    self._strangers = threading.BoundedSemaphore(STRANGERS)
    threading.Thread(target=self._accept, daemon=True).start()

  def close(self) -> None:
    self._closed = True
    with contextlib.suppress(OSError):
      self._socket.shutdown(socket.SHUT_RDWR)  # ends a waiting `accept`
    self._socket.close()

  def _accept(self) -> None:
    while not self._closed:
      self._strangers.acquire()
      try:
        found, _ = self._socket.accept()
        threading.Thread(target=self._serve, args=(found,), daemon=True).start()
      except (OSError, RuntimeError):  # no descriptor or no thread is free
        self._strangers.release()
        if not self._closed:
          time.sleep(PAUSE)

  def _serve(self, found: socket.socket) -> None:
    with contextlib.suppress(OSError, EOFError, ValueError, RecursionError), found:
      try:
        known = hmac.compare_digest(_secret_of(found), self.secret)
      finally:
        self._strangers.release()
      if known:
        _limit(found, ANSWER)
        with Connection(os.dup(found.fileno())) as connection:
          self._requests(connection)

  def _requests(self, connection: Connection) -> None:
    """Answers a process of the job, which may take its time between two requests."""
    while connection.poll(None):
      received = connection.recv_bytes(LONGEST)
      try:
        self._answer(connection, json.loads(received))
      except (ValueError, KeyError, TypeError, RecursionError) as error:
        _send(connection, {"error": first_line(error)})

  def _answer(self, connection: Connection, asked: dict[str, Any]) -> None:
    portion = portion_of(asked["portion"])
    if portion is None:
      raise Damaged(f"{asked['portion']!r} is not a portion")
    if asked["do"] == "keep":
      self._keep(connection, portion, asked["bytes"])
    elif asked["do"] == "index":
      index, checksum = index_of(self.store.index(portion)[0])
      _send(connection, {"checksum": checksum})
      connection.send_bytes(index)
    elif asked["do"] == "read":
      name, bounds, dtype = asked["piece"]
      piece = Piece(name, tuple((start, stop) for start, stop in bounds), dtype)
      found = self.store.read(portion, Entry(piece, asked["offset"], asked["checksum"]))
      _send(connection, {"bytes": len(found)})
      _send_all(connection, memoryview(found))

  def _keep(self, connection: Connection, portion: Portion, size: int) -> None:
    """Takes a copy of a file. It gets its name only if all of it is there, and is what was sent."""
    try:
      copy = self.store.create(portion, size)
    except OSError as error:
      _send(connection, {"error": first_line(error)})
      return
    try:
      _send(connection, {})
      done, full = 0, ""
      while done < size:
        data = connection.recv_bytes(size - done)
        try:
          copy.write(done, data)
        except OSError as error:  # the sender hears of it when all is sent
          full = first_line(error)
        done += len(data)
      if full:
        raise Damaged(full)
      check(Path(copy.file.name))
      copy.finish()
    except BaseException:
      copy.drop()
      raise
    _send(connection, {})


class Peer:
  """Another process: what it has, and a copy for it to keep. Use as a context manager.

  Every method raises Unreachable if the other process does not answer, and Damaged if it has not what is asked for.
  """

  def __init__(self, address: Address, secret: bytes):
    with _reaching(address):
      found = socket.create_connection(address, timeout=CONNECT)
      found.settimeout(None)
      _limit(found, ANSWER)
      self._connection, self.address = Connection(found.detach()), address
      self._connection.send_bytes(secret)

  def __enter__(self) -> "Peer":
    return self

  def __exit__(self, *_: object) -> None:
    self._connection.close()

  def index(self, portion: Portion) -> Index:
    with _reaching(self.address):
      checksum = self._ask(do="index", portion=portion.file)["checksum"]
      return parsed(self._connection.recv_bytes(), checksum)

  def read(self, portion: Portion, entry: Entry) -> bytes:
    """The bytes of a piece, checked by who has them."""
    with _reaching(self.address):
      answer = self._ask(
        do="read", portion=portion.file, piece=entry.piece, offset=entry.offset, checksum=entry.checksum
      )
      out = bytearray(answer["bytes"])
      _receive_all(self._connection, memoryview(out))
      return bytes(out)

  def keep(self, portion: Portion, file: Path) -> None:
    """Has the other process keep a copy of a file. Returns when it has checked it."""
    with _reaching(self.address), file.open("rb") as source:
      size = source.seek(0, 2)
      source.seek(0)
      self._ask(do="keep", portion=portion.file, bytes=size)
      while chunk := source.read(CHUNK):
        self._connection.send_bytes(chunk)
      self._answer()

  def _ask(self, **asked: Any) -> dict[str, Any]:
    _send(self._connection, asked)
    return self._answer()

  def _answer(self) -> dict[str, Any]:
    try:
      answer = json.loads(self._connection.recv_bytes(LONGEST))
    except (ValueError, RecursionError) as error:
      raise Damaged(f"the answer is not valid JSON ({first_line(error)})") from error
    if "error" in answer:
      raise Damaged(answer["error"])
    return answer


def _secret_of(stranger: socket.socket) -> bytes:
  """What a stranger sends as the secret, as `Connection` sends it: its size, and then its bytes.

  There is one deadline for all of it. A limit for each byte would let a few strangers keep everybody else waiting.
  """
  end, received = time.monotonic() + STRANGE, b""
  wanted = SIZE.size
  while len(received) < wanted:
    stranger.settimeout(max(1e-3, end - time.monotonic()))
    if time.monotonic() > end or not (more := stranger.recv(wanted - len(received))):
      raise EOFError
    received += more
    if len(received) == SIZE.size:
      (size,) = SIZE.unpack(received)
      if not 0 < size <= SECRET:
        raise ValueError("it is no secret")
      wanted = SIZE.size + size
  stranger.settimeout(None)
  return received[SIZE.size :]


@contextlib.contextmanager
def _reaching(address: Address) -> Iterator[None]:
  try:
    yield
  except (OSError, EOFError) as error:
    why = first_line(error) if str(error) else "it has closed the connection"
    why = f"it was silent for {ANSWER:.0f} s" if isinstance(error, BlockingIOError) else why
    raise Unreachable(f"the process at {address[0]}:{address[1]} does not answer ({why})") from error


def _limit(connection: socket.socket, seconds: float) -> None:
  """Lets reading and writing fail with an OSError after so many seconds without a byte, also in a `Connection`.

  A host that is gone without a word is noticed, too, while nothing is awaited.
  """
  whole, rest = divmod(seconds, 1.0)
  for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
    connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(whole), int(rest * 1e6)))
  connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _send(connection: Connection, found: dict[str, Any]) -> None:
  connection.send_bytes(json.dumps(found).encode())


def _send_all(connection: Connection, data: memoryview) -> None:
  for start in range(0, len(data), CHUNK):
    connection.send_bytes(data[start : start + CHUNK])


def _receive_all(connection: Connection, into: memoryview) -> None:
  done = 0
  while done < len(into):
    done += connection.recv_bytes_into(into[done:])


def own_address(coordinator: str) -> str:
  """The address of this machine on the way to the coordinator, HOST:PORT, or to the default gateway if that is "".

  Nothing is sent: a UDP socket only looks the way up. A host may know its own name as a loopback address (Debian's
  /etc/hosts has 127.0.1.1), which others cannot reach. That counts only if the coordinator is given as one.
  """
  host, _, _ = coordinator.rpartition(":")
  alone = host == "localhost" or host.startswith("127.")
  for target in ([host] if host else []) + ["10.255.255.255"]:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
      probe.connect((target, 9))
      found = str(probe.getsockname()[0])
      if alone or not found.startswith("127."):
        return found
  return socket.gethostbyname(socket.gethostname())
