"""What `python -m tools.doctor` looks at, and how it says what it found. It asks the same functions as a run does.

A check returns a text about what is in order, or raises: `Doubt` where a run works, but perhaps not as meant, and
ConfigError, Unavailable or OSError where it would fail. So it says the sentence that the run would have said.
"""

import fcntl
import os
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import jax
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.version import Version

from errors import ConfigError, Unavailable, expanded, first_line, of_file, visible
from runtime import cgroup, device_memory, devices, folders, hardware, processes
from runtime.first_process import unforwarded
from runtime.storage import owners

OK, WARNING, PROBLEM = "ok", "warning", "problem"
LITTLE = 1e9  # bytes: less than this is worth a warning
FILES = 1024  # a run of eight devices has 60 open files, and a checkpoint of large arrays some hundreds
THREADS = 512  # XLA and orbax start some for each core and device
SKEW = 5.0  # seconds between the clocks of this machine and of a file server
SHARED = 1 << 30  # bytes of /dev/shm: what NCCL and copies in memory want at least; Docker gives 64 MB


class Doubt(Exception):
  """A run works here, but perhaps not as it is meant. One sentence, with what helps."""


class Check(NamedTuple):
  """What is looked at, the function that does so, and after how many seconds without an answer it counts as failed."""

  about: str
  look: Callable[[], str]
  seconds: float = 5.0


def report(checks: Iterable[Check], say: Callable[[str], None]) -> bool:
  """Makes the checks and says a line for each. Returns whether there is no problem."""
  fit = True
  for check in checks:
    grade, text = outcome(check)
    say(f"{grade:7}  {check.about:10}  {visible(text)}")
    fit &= grade != PROBLEM
  return fit


def outcome(check: Check) -> tuple[str, str]:
  """The grade of a check, and its sentence. A file or name server that does not answer holds it only for a while."""
  found: list[tuple[str, str]] = []

  def look() -> None:
    try:
      found.append((OK, check.look()))
    except Doubt as doubt:
      found.append((WARNING, str(doubt)))
    except OSError as error:
      found.append((PROBLEM, of_file(error, "", "used")))
    except (ConfigError, Unavailable) as error:
      found.append((PROBLEM, str(error)))
    except Exception as error:  # whatever a driver or library may raise
      found.append((PROBLEM, f"{type(error).__name__}: {first_line(error)}; correct that before you train"))

  thread = threading.Thread(target=look, daemon=True)
  thread.start()
  thread.join(check.seconds)
  silence = f"no answer within {check.seconds:g} s; look for a driver, a file server or a name server that hangs"
  return found[0] if found else (PROBLEM, silence)


def packages(needed: Iterable[str], python: str, locked: Mapping[str, str]) -> str:
  """Compares the installed packages with the project's bounds and with the locked versions.

  Args:
    needed: the project's requirements, as pyproject.toml has them.
    python: the versions of Python that it takes.
    locked: the locked version of each package, by its name in lower case.
  """
  running = ".".join(map(str, sys.version_info[:3]))
  if Version(running) not in Requirement(f"python{python}").specifier:
    raise ConfigError(f"Python {running} is not {python}; make the environment again with such a Python")
  wrong, other, shown = list[str](), list[str](), [f"python {running}"]
  for requirement in map(Requirement, needed):
    name = requirement.name.lower()
    if requirement.marker and not requirement.marker.evaluate():
      continue
    try:
      version = metadata.version(name)
    except metadata.PackageNotFoundError:
      wrong.append(f"{name} is not installed")
      continue
    if requirement.specifier and not requirement.specifier.contains(version, prereleases=True):
      wrong.append(f"{name} is {version}, not {requirement.specifier}")
    elif version != locked.get(name, version):
      other.append(f"{name} is {version}, locked {locked[name]}")
    if name in ("jax", "jaxlib", "flax", "orbax-checkpoint"):
      shown.append(f"{name} {version}")
  fix = "pip install --require-hashes -r requirements.lock"
  if wrong:
    raise ConfigError(f"{'; '.join(wrong)}; run {fix}")
  if other:
    raise Doubt(f"{'; '.join(other)}; these work as far as is known, and tests ran with the locked ones: {fix}")
  return ", ".join(shown)


def applies(markers: Iterable[str]) -> bool:
  """Whether a line of a locked file is for this Python and system."""
  return all(Marker(text).evaluate() for text in markers)


def memory() -> str:
  """The memory that this process may have, of the machine and of its container."""
  total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
  limit, free = cgroup.memory(), _free()
  share = min(total, limit or total)
  text = f"{min(free, share) / 1e9:.1f} GB free of {share / 1e9:.1f} GB"
  text += f", the limit of this container or job; the machine has {total / 1e9:.1f} GB" if share < total else ""
  if min(free, share) < LITTLE:
    raise Doubt(f"{text}; end other programs, or ask for more memory: a process that needs more is killed (status 137)")
  return text


def _free() -> int:
  for line in Path("/proc/meminfo").read_text().splitlines():
    if line.startswith("MemAvailable:"):
      return int(line.split()[1]) * 1024
  return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def shared_memory(path: str = "/dev/shm") -> str:
  """The folder in memory that NCCL uses between GPUs, and runs for copies of their checkpoints."""
  found = os.statvfs(path)
  free, size = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
  text = f"{path} has {free / 1e9:.1f} GB free of {size / 1e9:.1f} GB"
  if not os.access(path, os.W_OK):
    raise Doubt(f"{path} cannot be written, which several GPUs and checkpoint.memory_every need; mount it writable")
  if size < SHARED:
    raise Doubt(f"{text}; several GPUs and checkpoint.memory_every need more: docker run --shm-size=8g, or a volume")
  return text


def cores() -> str:
  """The cores that this process can keep busy."""
  mine, all_of_them = cgroup.cores(), os.cpu_count() or 1
  return f"{mine} cores" + (f" of {all_of_them}, as this container or job may use" if mine < all_of_them else "")


def limits() -> str:
  """How many files and threads this process may have."""
  files, threads = resource.getrlimit(resource.RLIMIT_NOFILE)[0], cgroup.threads()
  if 0 <= files < FILES:
    raise Doubt(f"{files} open files at most; allow {FILES} or more (ulimit -n)")
  if threads is not None and threads < THREADS:
    raise Doubt(
      f"{threads} processes and threads at most; allow {THREADS} or more (ulimit -u, docker run --pids-limit)"
    )
  return f"{_number(files)} open files, {'any number of' if threads is None else f'{threads:,}'} threads"


def _number(limit: int) -> str:
  return "any number of" if limit == resource.RLIM_INFINITY else f"{limit:,}"


def signals() -> str:
  """Whether the signals that end a run reach this process."""
  ignored = [one.name for one in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(one) == signal.SIG_IGN]
  if "SIGTERM" in ignored:
    raise Doubt("SIGTERM is ignored, as the program that started this one asked; a scheduler could not stop a run here")
  if why := unforwarded():
    raise Doubt(why)
  return "SIGTERM and SIGINT reach this process" if not ignored else f"{ignored[0]} is ignored, as with nohup"


def temporary() -> str:
  """The folder for temporary files. A run goes on without one."""
  try:
    folder = tempfile.gettempdir()
  except OSError as error:
    raise Doubt("no folder for temporary files can be written; a run works, but set TMPDIR for other tools") from error
  return _with_space(Path(folder), "free some space, or set TMPDIR")


def home() -> str:
  """The home of this user, in which caches are."""
  folder = os.path.expanduser("~")
  while not os.path.exists(folder):  # whoever needs it makes it
    folder = os.path.dirname(folder)
  if not os.access(folder, os.W_OK):
    raise Doubt(f"HOME={folder!r} cannot be written, so caches are not kept; set HOME to a folder of this user")
  return _with_space(Path(folder), "free some space, or set HOME")


def cache(path: str, field: str) -> str:
  """Whose a cache is, and whether it can be written."""
  if not path:
    return f'{field}="": not kept'
  place = owners.place(expanded(path, field), field)
  whose = [f"{shelf.folder}, of another user" if shelf.foreign else str(shelf.folder) for shelf in place.read]
  if not place.write:
    return f"{field}: reads {', '.join(whose)}, and writes nothing"
  _with_space(place.write, f"free some space, or name another folder in {field}")
  return f"{field}: {place.write}, of this user" + (f"; also reads {', '.join(whose[1:])}" if whose[1:] else "")


def workdir(path: str) -> str:
  """Whether a run can write into a folder, lock it and find it again, and whether its clock is that of this machine."""
  folder = folders.writable(expanded(path, "workdir"), "workdir")
  with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as probe:
    skew = os.fstat(probe.fileno()).st_mtime - time.time()
    try:
      fcntl.flock(probe, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
      raise Doubt(f"{path!r} cannot be locked ({error.strerror}); do not start a second run there") from error
  if abs(skew) > SKEW:
    raise Doubt(
      f"the file server of {path!r} is {abs(skew):.0f} s {'ahead' if skew > 0 else 'behind'}; set the clocks (NTP)"
    )
  if _kind(folder) == "overlay" and os.path.realpath(folder) != "/":
    raise Doubt(f"{path!r} is in a container's own layer, which ends with it; mount a volume there")
  return _with_space(folder, "free some space, or name another workdir")


def _with_space(folder: Path, fix: str) -> str:
  """How much space is left where a folder is. Raises Doubt if that is little."""
  found = os.statvfs(folder)
  free = found.f_bavail * found.f_frsize / 1e9
  if free * 1e9 < LITTLE:
    raise Doubt(f"{folder} has {free:.2f} GB left; {fix}")
  if found.f_files and not found.f_favail:
    raise Doubt(f"{folder} has no inodes left (df -i); {fix}")
  return f"{folder}, {free:.0f} GB free"


def _kind(folder: Path, mounts: Path = Path("/proc/mounts")) -> str:
  """The kind of file system in which a folder is, as Linux names it; "" if that is not known."""
  place, best = os.path.realpath(folder), ("", "")
  try:
    for line in mounts.read_text().splitlines():
      _, at, kind, *_ = line.split()
      if (place + "/").startswith(at.rstrip("/") + "/") and len(at) >= len(best[0]):
        best = (at, kind)
  except (OSError, ValueError):
    return ""
  return best[1]


def names() -> str:
  """Whether this machine's name, which its processes use to find each other, leads to an address."""
  name = socket.gethostname()
  try:
    local = socket.gethostbyname("localhost")
  except OSError:
    raise Doubt("localhost has no address; add `127.0.0.1 localhost` to /etc/hosts") from None
  if not processes.has_address():
    raise Doubt(
      f"the name of this machine, {name!r}, has no address, which several processes on CPUs need; add it to /etc/hosts"
    )
  address = socket.gethostbyname(name)
  alone = ", which no other machine reaches" if address.startswith("127.") else ""
  return f"{name} is {address}{alone}; localhost is {local}"


def ports(coordinator: str) -> str:
  """Whether processes can listen: on this machine's addresses, and at the coordinator's, if it is given."""
  for host, why in ((processes.LOOPBACK, "the loopback"), ("", "the addresses of this machine")):
    try:
      with socket.create_server((host, 0)):
        pass
    except OSError as error:
      raise Unavailable(f"nothing can listen on {why} ({error.strerror}); several processes need that") from error
  if not coordinator:
    return "the system gives ports on the loopback and on all addresses"
  processes.check_coordinator(coordinator)
  host, _, port = coordinator.rpartition(":")
  try:
    found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
  except OSError as error:
    raise Unavailable(f"coordinator={coordinator!r}: {host!r} has no address ({error.strerror}); correct it") from error
  return f"port {port} is free here, and {host} is {found[0][4][0]}"


def variables() -> str:
  """Variables that change what a run does, and are often left over."""
  if left := os.environ.get("JAX_COORDINATOR_ADDRESS"):
    raise Doubt(f"JAX_COORDINATOR_ADDRESS={left!r} is set: a run is one of a job's processes; unset it to run alone")
  if asked := processes.asked():
    raise Doubt(f"a run here waits for other processes{asked}")
  path = os.environ.get("LD_LIBRARY_PATH", "")
  if "cuda" in path.lower() and devices.has_gpu_compiler():
    raise Doubt(f"LD_LIBRARY_PATH={path!r} may lead to another CUDA than the one that jax has installed; unset it")
  known = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(("JAX_", "XLA_"))]
  return ", ".join(known) or "none of JAX or XLA is set"


def device_list() -> str:
  """The devices that a run would use, and the memory of each that it may have."""
  if extra := devices.missing_plugin():
    raise Doubt(f"this machine has accelerators that the installed jax cannot use; run pip install '.[{extra}]'")
  given = jax.config.jax_platforms  # type: ignore[attr-defined]  # jax adds its options at run time
  device_memory.ask()
  found = devices.started()
  if found[0].platform == "cpu" and not given and not devices.will_use_cpus(given):
    raise ConfigError(
      "this machine has accelerators, and jax starts on its CPUs alone; look at the lines of jax above this one, and "
      "at the driver: nvidia-smi, or ls -l /dev/nvidia* /dev/vfio /dev/accel*"
    )
  limit = hardware.usable_memory(found)
  size = f", {limit / 1e9:,.1f} GB of each for programs" if limit else ""
  return f"{len(found)} × {found[0].device_kind} ({jax.default_backend()}){size}"
