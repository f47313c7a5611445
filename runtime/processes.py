"""One job of several processes: how they join, how they fail together, and how they exchange small values.

Every process runs the same program on its own devices, and every collective waits for all of them. If one process
decides something alone, the others hang. `raise_together`, `on_process_zero` and the requests of signals.py make such
decisions known to all. With a single process they cost nothing. If a process fails alone (`failed_alone`), it ends at
once.
"""

import contextlib
import functools
import ipaddress
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from errors import (
  FIXES,
  ConfigError,
  JobConfigError,
  JobError,
  JobUnavailable,
  Unavailable,
  first_line,
  may_pass,
  of_file,
  positive,
  visible,
)
from runtime.storage.answers import StorageError

LOOPBACK = "127.0.0.1"


def join(config: Any) -> None:
  """Joins the other processes of the job: those named by `config.distributed`, or else those of the cluster.

  Clusters are found as jax.distributed finds them: SLURM, Open MPI, Kubernetes, Cloud TPU. Without a cluster this is
  a job of one process. Raises ConfigError if the fields do not fit together, and Unavailable if the port is in use. If
  the other processes do not arrive in time, or one of them is lost meanwhile, ends the program with status 1: another
  start may succeed. (jax itself would abort.)
  """
  if jax.distributed.is_initialized():
    return
  positive("distributed.timeout", config.timeout)
  address, count, rank = config.coordinator, config.processes, config.process
  if bool(address) != (count > 0) or bool(address) != (rank >= 0):
    raise ConfigError(
      f"distributed.coordinator={address!r}, distributed.processes={count} and distributed.process={rank} go "
      "together; give all three, or none to use the cluster's"
    )
  given: dict[str, Any] = {}
  if address:
    if not 0 <= rank < count:
      raise ConfigError(
        f"distributed.process={rank} must be from 0 to {count - 1}, below distributed.processes={count}"
      )
    given = {"coordinator_address": address, "num_processes": count, "process_id": rank}
    check_coordinator(address, rank)
  jax.config.update("jax_enable_preemption_service", False)  # signals.py handles signals
  where = f"distributed.coordinator={address!r}" if address else "the cluster's coordinator"
  late = f"not all processes met at {where} within distributed.timeout={config.timeout} s{'' if address else asked()}"
  with _deadline(config.timeout, late):
    try:
      # One minute more than our own deadline, which strikes first and explains what happened.
      _check_port()
      named = given or _of_cluster(config.timeout)
      _pass_proxies(named.get("coordinator_address", ""))
      jax.distributed.initialize(**named, **_bound(named), initialization_timeout=config.timeout + 60)
    except (ValueError, RuntimeError) as error:
      # Without an address there is no cluster, or JAX is already running, as in a notebook or a test.
      alone = ("coordinator_address should be defined", "before any JAX")
      if given or not any(reason in str(error) for reason in alone):
        if left := "" if given else os.environ.get("JAX_COORDINATOR_ADDRESS", ""):
          raise ConfigError(
            f"JAX_COORDINATOR_ADDRESS={left!r} is set, but no cluster says which process of how many this is "
            f"({first_line(error).rstrip('.')}); unset it to run alone, or set distributed.coordinator, processes and "
            "process"
          ) from error
        if isinstance(error, RuntimeError) and alone[1] not in str(error):
          _give_up(f"{where}: {first_line(error)}")
        raise ConfigError(f"{where}: {error}") from error
  if address.startswith((LOOPBACK, "localhost:")) and not has_address():
    _meet_on_the_loopback()


def _check_port() -> None:
  """Drops JAX's variable for the coordinator's port if Kubernetes has set it: for a service named `jax-coordinator`."""
  port = os.environ.get("JAX_COORDINATOR_PORT", "")
  if "://" in port:
    del os.environ["JAX_COORDINATOR_PORT"]
  elif port and not (port.isdigit() and int(port) < 65536):
    raise ConfigError(f"JAX_COORDINATOR_PORT={port!r} is not a port; use a number below 65536, or unset it")


def _pass_proxies(address: str) -> None:
  """Lets the processes of a job meet directly. Otherwise gRPC asks the web's proxy, which cannot lead to them."""
  if any(os.environ.get(name) or os.environ.get(name.upper()) for name in ("http_proxy", "https_proxy", "grpc_proxy")):
    given = next(filter(None, map(os.environ.get, ("no_grpc_proxy", "no_proxy", "NO_PROXY"))), "")
    host = address.rpartition(":")[0].strip("[]")
    os.environ["no_grpc_proxy"] = ",".join(filter(None, (given, host)))  # noqa: SIM112  # as gRPC calls it
    jax.config.update("jax_check_proxy_envs", False)  # it warns of them


def check_coordinator(address: str, rank: int = 0) -> None:
  """Raises ConfigError if this is not an address, and Unavailable if process 0 could not listen there."""
  host, _, port = address.rpartition(":")
  if not host or not port.isdigit() or int(port) > 65535:
    raise ConfigError(f"distributed.coordinator={address!r} is not HOST:PORT; use the address of process 0")
  if rank == 0 and not _is_free(*_listens(address)):
    raise Unavailable(f"distributed.coordinator={address!r}: port {port} is in use on this machine; use another")


def has_address() -> bool:
  """Whether the name of this machine leads to an address, as the processes' connections (gloo) need it."""
  with contextlib.suppress(OSError):
    return bool(socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM))
  return False


def _meet_on_the_loopback() -> None:
  """Gives gloo the loopback in place of this machine's name. A job on one machine needs no name."""
  from jaxlib import _jax  # it has no public name

  _jax.make_gloo_tcp_collectives = functools.partial(_jax.make_gloo_tcp_collectives, hostname=LOOPBACK)


def asked() -> str:
  """How many processes SLURM says there are: in an interactive step it may be more than anyone has started."""
  tasks = os.environ.get("SLURM_NTASKS", "1")
  if tasks == "1" or "SLURM_STEP_NODELIST" not in os.environ:  # no step: jax does not ask SLURM
    return ""
  return (
    f" (SLURM_NTASKS={tasks} asks for {tasks}: start all of them with srun, or set SLURM_NTASKS=1 to run this alone)"
  )


def _of_cluster(timeout: int) -> dict[str, Any]:
  """What the cluster says of this process, as `jax.distributed.initialize` takes it; {} leaves all to that."""
  try:
    from jax._src.clusters import ClusterEnv  # it has no public name

    named = os.environ.get("JAX_COORDINATOR_ADDRESS")
    found: Any = ClusterEnv.auto_detect_unset_distributed_params(named, None, None, None, None, timeout)
    address, count, rank, ids = found
  except Exception:  # initialize fails in the same way, or does without
    return {}
  if None in (address, count, rank):
    return {}
  if count == 1:
    address = f"{LOOPBACK}:{address.rpartition(':')[2]}"
  named_here = {"coordinator_address": address, "num_processes": count, "process_id": rank}
  return named_here | ({} if os.environ.get("JAX_LOCAL_DEVICE_IDS") else {"local_device_ids": ids})


def _bound(named: dict[str, Any]) -> dict[str, Any]:
  """Where the coordinator listens, for `jax.distributed.initialize`, and a line that says so unless nobody else can.

  By default JAX listens on all interfaces, and asks nobody who they are: whoever registers as a process ends the job.
  Its variable JAX_COORDINATOR_BIND_ADDRESS comes first.
  """
  if named.get("process_id") != 0 or os.environ.get("JAX_COORDINATOR_BIND_ADDRESS"):
    return {}
  host, port = _listens(named["coordinator_address"])
  if not host or not ipaddress.ip_address(host).is_loopback:
    where = f"{host}, port {port}" if host else f"all addresses of this machine, port {port}"
    print(
      f"note: the processes meet at {where}, where JAX asks nobody for a secret: docs/cluster.md#the-network says what "
      "network a job needs",
      file=sys.stderr,
      flush=True,
    )
  return {"coordinator_bind_address": f"[{host}]:{port}" if ":" in host else f"{host}:{port}"} if host else {}


def _listens(address: str) -> tuple[str, int]:
  """The numeric address and the port at which process 0 listens, for HOST:PORT. "": at all addresses.

  That is the address of HOST, if it is only one, and one of this machine. Some systems call themselves by a loopback
  address, at which the other machines would not find them; and some are reached through an address that they lack.
  """
  host, port = address.rpartition(":")[0].strip("[]"), int(address.rpartition(":")[2])
  try:
    found = {str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    loopback = {one for one in found if ipaddress.ip_address(one).is_loopback}
    if host == "localhost" or host in loopback:
      return LOOPBACK if host == "localhost" else host, port
    if len(found) == 1 and not loopback and _is_free(one := found.pop(), 0):
      return one, port
  except (OSError, ValueError):
    pass
  return "", port


def _is_free(host: str, port: int) -> bool:
  try:
    socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
  except OSError:
    return False
  return True


def _give_up(message: str) -> NoReturn:
  """Ends the program because other processes are missing."""
  why = f"{message}; check that all processes are running and can reach that address"
  print(f"error: {visible(why)}", file=sys.stderr, flush=True)
  os._exit(1)


@contextlib.contextmanager
def _deadline(seconds: float, message: str) -> Iterator[None]:
  """Ends the program unless the body finishes in time."""
  timer = threading.Timer(seconds, _give_up, (message,))
  timer.daemon = True
  timer.start()
  try:
    yield
  finally:
    timer.cancel()


def hosts() -> list[str]:
  """The host of each process, by name. All processes must call it."""
  return [str(name) for name in all_gather(socket.gethostname())]


def failed_alone(error: BaseException | None) -> bool:
  """Whether other processes of the job do not raise this error, too, but may be waiting for this one."""
  return error is not None and not isinstance(error, JobError) and jax.distributed.is_initialized()


def end_at_once(status: int) -> NoReturn:
  """Ends this process, and waits for no other one. An orderly exit would wait: jax's own lets all processes meet."""
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(status)


def all_gather(value: Any) -> list[Any]:
  """Every process's `value`, in the order of their ranks. Takes anything JSON can hold. All processes must call it."""
  if jax.process_count() == 1:
    return [value]
  mine = np.frombuffer(json.dumps(value).encode(), np.uint8)
  sizes = multihost_utils.process_allgather(np.array([len(mine)]))
  padded = np.zeros(int(sizes.max()), np.uint8)
  padded[: len(mine)] = mine
  rows = multihost_utils.process_allgather(padded)
  return [json.loads(row[: int(size)].tobytes()) for row, size in zip(rows, sizes.ravel(), strict=True)]


@contextlib.contextmanager
def raise_together() -> Iterator[None]:
  """Raises an error of any process's body in every process, so that none waits for one that has ended.

  That is a ConfigError or an Unavailable, also in place of an OSError. If there are several, one that may pass counts:
  it may have caused the others, and another start shows which of them stay.
  """
  mine = None
  try:
    yield
  except (ConfigError, Unavailable, OSError) as error:
    of_machine = isinstance(error, OSError) and error.errno in FIXES and not isinstance(error, StorageError)
    told = of_file(error, "", "used") if isinstance(error, OSError) and of_machine else str(error)
    mine = [may_pass(error), told or type(error).__name__]
  failed = [(rank, *found) for rank, found in enumerate(all_gather(mine)) if found]
  if failed:
    rank, passes, text = next((one for one in failed if one[1]), failed[0])
    kind = JobUnavailable if passes else JobConfigError
    raise kind(text if rank == jax.process_index() else f"{text} (process {rank})")


def on_process_zero(make: Callable[[], Any]) -> Any:
  """Runs `make()` on process 0 and returns its result on every process. For files that all processes share.

  The result may be anything JSON can hold. An error of process 0 is raised on every process, as in `raise_together`.
  """
  value = None
  with raise_together():
    if jax.process_index() == 0:
      value = make()
  return all_gather(value)[0]


def require_equal(fields: dict[str, Any]) -> None:
  """Raises ConfigError unless all processes pass the same fields."""
  given = all_gather(fields)
  for rank, others in enumerate(given):
    for name, value in given[0].items():
      if json.dumps(others.get(name)) != json.dumps(value):  # as text, in which nan equals nan
        raise JobConfigError(
          f"{name} is {value!r} for process 0, but {others.get(name)!r} for process {rank}; start all of them alike"
        )
