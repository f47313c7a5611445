"""One job, several processes: starting together, failing together, and agreeing on what to do next.

Every process runs the same program on its own devices, and every collective waits for all of them. So a decision that
one process takes alone (to stop, to raise an error) must first be known to all: `together`, `first` and `Requests`
are the places where that happens. With one process they cost nothing.
"""

import contextlib
import dataclasses
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from errors import ConfigError


def start(config: Any) -> None:
  """Joins the other processes of the job: those that `config.distributed` tells of, else those of the cluster.

  Clusters are found as jax.distributed finds them: SLURM, Open MPI, Kubernetes, Cloud TPUs. Where there is none this
  is a job of one process. Raises ConfigError for fields that do not fit together; ends the program with status 2 if
  the others do not come in time, since jax can do no better than to abort.
  """
  if jax.distributed.is_initialized():
    return
  address, count, rank = config.coordinator, config.processes, config.process
  if bool(address) != (count > 0) or bool(address) != (rank >= 0):
    raise ConfigError(
      f"distributed.coordinator={address!r}, distributed.processes={count} and distributed.process={rank} go "
      "together; give all three, or none to use the cluster's"
    )
  if not address:
    given: dict[str, Any] = {}
  else:
    if not 0 <= rank < count:
      raise ConfigError(
        f"distributed.process={rank} must be from 0 to {count - 1}, below distributed.processes={count}"
      )
    given = {"coordinator_address": address, "num_processes": count, "process_id": rank}
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
      raise ConfigError(f"distributed.coordinator={address!r} is no HOST:PORT; use the address of process 0")
    if rank == 0 and not _is_free(int(port)):
      raise ConfigError(f"distributed.coordinator={address!r}: port {port} is in use on this machine; use another")
  jax.config.update("jax_enable_preemption_service", False)  # signals are handled here, by Requests
  where = f"distributed.coordinator={address!r}" if address else "the cluster's coordinator"
  with _deadline(config.timeout, f"not all processes met at {where} within distributed.timeout={config.timeout} s"):
    try:
      # A minute more than our own deadline, which comes first and says what happened.
      jax.distributed.initialize(**given, initialization_timeout=config.timeout + 60)
    except (ValueError, RuntimeError) as error:
      # Without an address: there is no cluster, or JAX is already running, in a notebook or a test.
      alone = ("coordinator_address should be defined", "before any JAX")
      if given or not any(reason in str(error) for reason in alone):
        raise ConfigError(f"{where}: {error}") from error


def _is_free(port: int) -> bool:
  try:
    socket.create_server(("", port)).close()
  except OSError:
    return False
  return True


@contextlib.contextmanager
def _deadline(seconds: float, message: str) -> Iterator[None]:
  """Ends the program with status 2 unless the body is done in time."""

  def give_up() -> None:
    print(f"error: {message}; see that all are started and reach that address", file=sys.stderr, flush=True)
    os._exit(2)

  timer = threading.Timer(seconds, give_up)
  timer.daemon = True
  timer.start()
  try:
    yield
  finally:
    timer.cancel()


def share(value: Any) -> list[Any]:
  """What every process gave, in the order of their ranks. Anything JSON can hold; all processes must call it."""
  if jax.process_count() == 1:
    return [value]
  mine = np.frombuffer(json.dumps(value).encode(), np.uint8)
  sizes = multihost_utils.process_allgather(np.array([len(mine)]))
  padded = np.zeros(int(sizes.max()), np.uint8)
  padded[: len(mine)] = mine
  rows = multihost_utils.process_allgather(padded)
  return [json.loads(row[: int(size)].tobytes()) for row, size in zip(rows, sizes.ravel(), strict=True)]


@contextlib.contextmanager
def together() -> Iterator[None]:
  """A ConfigError of any process in the body becomes one of all, so that none waits for a process that has ended."""
  message = ""
  try:
    yield
  except (ConfigError, OSError) as error:
    message = str(error)
  errors = share(message)
  for rank, text in enumerate(errors):
    if text:
      raise ConfigError(text if rank == jax.process_index() else f"{text} (process {rank})")


def first(make: Callable[[], Any]) -> Any:
  """`make()` of process 0, for all of them: for what touches files that all see. Anything JSON can hold."""
  value = None
  with together():
    if jax.process_index() == 0:
      value = make()
  return share(value)[0]


def same(fields: dict[str, Any]) -> None:
  """Raises ConfigError unless all processes give the same fields."""
  given = share(fields)
  for rank, others in enumerate(given):
    for name, value in given[0].items():
      if others.get(name) != value:
        raise ConfigError(
          f"{name} is {value!r} for process 0, but {others.get(name)!r} for process {rank}; start all of them alike"
        )


@dataclasses.dataclass(frozen=True)
class Wishes:
  """What is to be done after a step, if any process wants it."""

  save: bool = False
  stop: bool = False


class Requests:
  """Turns signals into wishes, and the wishes of one process into decisions of all.

  The first SIGTERM or SIGINT is a wish to stop after the step; a second one ends the process at once. Use as a
  context manager in the main thread.
  """

  def __init__(self) -> None:
    self.signal: str | None = None  # that came to this process
    self._before: dict[int, Any] = {}
    self._ballot: jax.Array | None = None
    if jax.process_count() > 1:
      mesh = jax.make_mesh((jax.device_count(),), ("all",))
      self._split = NamedSharding(mesh, P("all"))
      self._any = jax.jit(lambda votes: votes.any(axis=0), out_shardings=NamedSharding(mesh, P()))

  def __enter__(self) -> "Requests":
    if threading.current_thread() is threading.main_thread():
      for number in (signal.SIGTERM, signal.SIGINT):
        self._before[number] = signal.signal(number, self._on_signal)
    return self

  def __exit__(self, *_: object) -> None:
    for number, handler in self._before.items():
      signal.signal(number, handler)

  def _on_signal(self, number: int, _: FrameType | None) -> None:
    self.signal = signal.Signals(number).name
    # Not by print: the signal may have come in the middle of one.
    os.write(2, f"{self.signal}: will save and end after this step; a second signal ends it at once\n".encode())
    for each in self._before:
      signal.signal(each, signal.SIG_DFL)

  def decide(self, save: bool) -> Wishes:
    """What all processes do now. Call once after each step is dispatched.

    In a job of several processes the votes are counted on the devices, behind the step, and read a call later, so
    that nobody waits: a wish is granted one step later there.
    """
    mine = Wishes(save, self.signal is not None)
    if jax.process_count() == 1:
      return mine
    granted = Wishes() if self._ballot is None else Wishes(*(bool(vote) for vote in jax.device_get(self._ballot)))
    mine = dataclasses.replace(mine, save=save and not granted.save)  # that wish has just been granted
    votes = np.tile(np.array(dataclasses.astuple(mine)), (jax.local_device_count(), 1))
    self._ballot = self._any(jax.make_array_from_process_local_data(self._split, votes))
    return granted


class Timer:
  """Says when `minutes` have passed since the last `restart`; never if 0. Only process 0's clock counts."""

  def __init__(self, minutes: float):
    self.seconds = 60 * minutes
    self.restart()

  def restart(self) -> None:
    self.last = time.monotonic()

  @property
  def due(self) -> bool:
    return bool(self.seconds) and jax.process_index() == 0 and time.monotonic() - self.last >= self.seconds
