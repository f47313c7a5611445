"""Signals that a program inherits, and those of the first process of a container: every documented ending works."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import ROOT, in_full

from job.attempt import Forwarded
from runtime import first_process, signals


@pytest.fixture(params=[signal.SIGINT, signal.SIGTERM])
def ignored(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
  """A signal that the program was started to ignore, as a shell's background commands are."""
  before = signal.signal(request.param, signal.SIG_IGN)
  yield request.param
  signal.signal(request.param, before)


def test_an_ignored_signal_stays_ignored(ignored: signal.Signals, capfd: pytest.CaptureFixture):
  other = signal.SIGTERM if ignored == signal.SIGINT else signal.SIGINT
  with signals.Requests() as requests:
    signal.raise_signal(ignored)
    assert requests.signal is None
    assert not requests.decide().stop
    signal.raise_signal(other)
    assert requests.signal == other.name
    assert requests.decide().stop
    signal.raise_signal(ignored)
    assert signal.getsignal(ignored) == signal.SIG_IGN
    assert ("another SIGINT" in capfd.readouterr().err) == (ignored != signal.SIGINT)
  with Forwarded() as forwarded:
    signal.raise_signal(ignored)
    assert forwarded.received == []
    signal.raise_signal(other)
    assert forwarded.received == [other]
  assert signal.getsignal(ignored) == signal.SIG_IGN


@pytest.mark.parametrize("number", signals.STOPS)
def test_what_schedulers_and_terminals_send_asks_to_stop(number: signal.Signals, capfd: pytest.CaptureFixture):
  """Not SIGTERM alone: `#SBATCH --signal=USR1@90` is common, and a connection that breaks sends SIGHUP."""
  before = signal.getsignal(number)
  with signals.Requests() as requests:
    signal.raise_signal(number)
    assert requests.decide().stop
  assert f"{number.name}: will save and end after this step" in capfd.readouterr().err
  with Forwarded() as forwarded:
    signal.raise_signal(number)
    assert forwarded.received == [number]
  assert signal.getsignal(number) == before


def test_a_signal_that_means_something_else_is_left_alone():
  received = []
  before = signal.signal(signal.SIGUSR1, lambda number, _: received.append(number))
  try:
    with signals.Requests() as requests:
      signal.raise_signal(signal.SIGUSR1)
      assert (received, requests.signal) == ([signal.SIGUSR1], None)
  finally:
    signal.signal(signal.SIGUSR1, before)


def test_a_first_process_that_forwards_nothing_is_named(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
  """Such as `sh -c "cd /app; python train.py"`: the pod's SIGTERM reaches the shell alone."""
  status = tmp_path / "status"
  for caught, named in (("0000000000000000", True), ("0000000000004000", False), ("0000000000000002", True)):
    status.write_text(f"Name:\tsh\nSigCgt:\t{caught}\n")
    why = first_process.unforwarded(status)
    assert ("first process of this container, sh, forwards no SIGTERM" in why) == named == bool(why)
  assert first_process.unforwarded(tmp_path / "no Linux") == ""
  monkeypatch.setattr(first_process, "unforwarded", lambda: "it forwards nothing; use exec")
  for parent in (1, 2):
    monkeypatch.setattr(os, "getppid", lambda parent=parent: parent)
    first_process.leave_to_a_child()
    assert capsys.readouterr().err == ("note: it forwards nothing; use exec\n" if parent == 1 else "")


FIRST = """
import ctypes, os, signal, sys, time
from runtime import command_line, signals

def compile():  # holds the interpreter, as a compiler may: no handler in Python runs
  ctypes.PyDLL(None).sleep(30)

def main(config):
  if {looping}:
    with signals.Requests() as requests:
      print("ready", flush=True)
      while not requests.decide().stop:
        time.sleep(0.001)  # a step; without one, Python 3.11 overlooks a signal that a thread of jaxlib is given
      print("saving", flush=True)
      compile()
  print("ready", flush=True)
  compile()

if os.getpid() != 1:
  sys.exit("not the first process")
command_line.run(main, needs_config=False)
"""
UNSHARE = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]


def can_unshare() -> bool:
  return bool(shutil.which("unshare")) and not subprocess.run([*UNSHARE, "true"], capture_output=True).returncode


in_a_namespace = pytest.mark.skipif(
  not can_unshare(), reason="this machine lets no user make a process namespace (unshare --pid)"
)


def first_in(outer: subprocess.Popen) -> int:
  """The number that this machine gives to PID 1 of a namespace."""
  return int(Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text())


def stopped_after(line: bytes, *arguments: str) -> int:
  """The status of Python as PID 1 that is sent SIGTERM when it has printed a line."""
  with subprocess.Popen([*UNSHARE, sys.executable, *arguments], cwd=ROOT, stdout=subprocess.PIPE) as outer:
    try:
      assert outer.stdout.readline() == line
      os.kill(first_in(outer), signal.SIGTERM)
      return outer.wait(20)
    finally:
      outer.kill()


@in_a_namespace
def test_a_signal_while_a_containers_program_still_imports_ends_it():
  """`runtime.first_process` starts it. Nothing of the program has to handle signals yet."""
  code = "import time; print('importing', flush=True); time.sleep(30)"
  assert stopped_after(b"importing\n", "-m", "runtime.first_process", "-c", code) == 143


THREADED = """
import signal, sys, threading, time
from runtime import first_process

threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
forward = first_process._forward
first_process._forward = lambda *given: (time.sleep(0.3), forward(*given))[1]  # as on a busy machine
first_process.leave_to_a_child()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print("ready", flush=True)
time.sleep(60)
"""


@in_a_namespace
def test_a_signal_that_a_thread_of_a_library_is_given_is_forwarded():
  """The kernel gives a signal to any thread that does not block it, and libraries start threads."""
  assert stopped_after(b"ready\n", "-c", THREADED) == 7


@in_a_namespace
@pytest.mark.parametrize(
  "looping, sent, status",
  in_full(
    [
      (False, [signal.SIGTERM], 143),
      (False, [signal.SIGINT], 130),
      (True, [signal.SIGTERM, signal.SIGINT], 130),
      (True, [signal.SIGINT, signal.SIGTERM, signal.SIGINT], 130),
    ],
    (False, [signal.SIGTERM], 143),
    (True, [signal.SIGTERM, signal.SIGINT], 130),
  ),
)
def test_the_first_process_of_a_container_ends_as_any_other(looping: bool, sent: list, status: int, tmp_path: Path):
  """In set-up and while compiling the first signal ends it; while it saves, another SIGINT does."""
  command = [*UNSHARE, sys.executable, "-c", FIRST.format(looping=looping)]
  environment = os.environ | {"JAX_PLATFORMS": "cpu"}
  with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as outer:
    watch = threading.Timer(60, outer.kill)
    watch.start()
    assert outer.stdout.readline() == b"ready\n"
    first = first_in(outer)
    os.kill(first, sent[0])
    if looping:
      assert outer.stdout.readline() == b"saving\n"
    for number in sent[1:]:
      os.kill(first, number)
    try:
      assert outer.wait(20) == status
    finally:
      watch.cancel()
      outer.kill()
