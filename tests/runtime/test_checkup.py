"""What tools.doctor finds: each kind of problem of a machine, made up at the edge, is one line with what helps."""

import contextlib
import errno
import fcntl
import os
import resource
import signal
import socket
import tempfile
import threading
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from helpers import one_sentence
from users import AS_ROOT, USER, another_user, given

from errors import ConfigError
from runtime import cgroup, checkup, devices, processes
from runtime.checkup import OK, PROBLEM, WARNING, Check, Doubt


def finds(look: Callable[[], str], grade: str, *parts: str) -> None:
  """Checks that a look has this grade, and a text with these parts."""
  got, text = checkup.outcome(Check("it", look, seconds=20))
  assert got == grade, text
  assert not [part for part in parts if part not in text], text


def test_only_a_problem_makes_a_machine_unfit(capsys: pytest.CaptureFixture):
  def raises(error: Exception) -> Callable[[], str]:
    def look() -> str:
      raise error

    return look

  ended = threading.Event()
  cases = [
    ("fine", lambda: "as it should be", OK, "as it should be"),
    ("doubtful", raises(Doubt("perhaps not; do this")), WARNING, "perhaps not; do this"),
    ("refused", raises(ConfigError("x=1 is wrong; use 2")), PROBLEM, "x=1 is wrong; use 2"),
    ("a file", raises(OSError(errno.EACCES, "Permission denied", "/x")), PROBLEM, "'/x' cannot be used (Permission"),
    ("a bug", raises(KeyError("driver")), PROBLEM, "KeyError: 'driver'"),
    ("hangs", lambda: str(ended.wait()), PROBLEM, "no answer within 0.2 s"),
  ]
  for about, look, grade, text in cases:
    fit = checkup.report([Check(about, look, seconds=0.2)], print)
    line = capsys.readouterr().out
    assert line.startswith(f"{grade:7}  {about:10}  {text}")
    assert line.count("\n") == 1
    assert fit == (grade != PROBLEM)
  ended.set()


INSTALLED = {"jax": "0.10.2", "numpy": "2.3.0"}
PYTHON = ">=3.11"


@pytest.mark.parametrize(
  "needed, python, locked, grade, parts",
  [
    (["jax>=0.10", "numpy"], PYTHON, INSTALLED, OK, ("python 3", "jax 0.10.2")),
    (["jax>=0.10,<0.10.2"], PYTHON, {}, PROBLEM, ("jax is 0.10.2, not <0.10.2,>=0.10", "--require-hashes")),
    (["absent"], PYTHON, {}, PROBLEM, ("absent is not installed; run pip install",)),
    (["absent; python_version < '3'"], PYTHON, {}, OK, ()),
    (["jax", "numpy"], PYTHON, INSTALLED | {"numpy": "2.4.0"}, WARNING, ("numpy is 2.3.0, locked 2.4.0",)),
    ([], "<3.11", {}, PROBLEM, ("Python 3", "is not <3.11")),
  ],
)
def test_packages_are_compared_with_the_bounds_and_the_lock(
  needed: list, python: str, locked: dict, grade: str, parts: tuple, monkeypatch: pytest.MonkeyPatch
):
  def version(name: str) -> str:
    if name not in INSTALLED:
      raise metadata.PackageNotFoundError(name)
    return INSTALLED[name]

  monkeypatch.setattr(checkup.metadata, "version", version)
  finds(lambda: checkup.packages(needed, python, locked), grade, *parts)


def group(root: Path, mount: str, path: str, lines: str, **files: str) -> None:
  """Makes a control group and its files. In their names, two underscores stand for a dot. `lines`: of all groups."""
  (root / "proc/self").mkdir(parents=True, exist_ok=True)
  (root / "proc/self/cgroup").write_text(lines)
  place = root / "sys/fs/cgroup" / mount / path
  place.mkdir(parents=True, exist_ok=True)
  for name, text in files.items():
    (place / name.replace("__", ".")).write_text(text + "\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
  """A machine of 64 cores, without limits at first."""
  unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
  monkeypatch.setattr(resource, "getrlimit", lambda _: unlimited)
  monkeypatch.setattr(cgroup, "ROOT", tmp_path)
  monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
  monkeypatch.setattr(os, "cpu_count", lambda: 64)
  return tmp_path


def test_limits_of_a_container_are_seen_in_both_versions_of_control_groups(machine: Path):
  assert (cgroup.memory(), cgroup.threads(), cgroup.cores()) == (None, None, 64)
  # Version 2: the limit of an outer group counts, too.
  group(machine, "", "", "0::/job/step\n", cgroup__controllers="cpu memory pids")
  group(machine, "", "job", "0::/job/step\n", memory__max="4000000000", cpu__max="250000 100000", pids__max="max")
  group(
    machine,
    "",
    "job/step",
    "0::/job/step\n",
    memory__max="max",
    cpu__max="max 100000",
    pids__max="100",
    pids__current="40",
  )
  assert (cgroup.memory(), cgroup.threads(), cgroup.cores()) == (4000000000, 60, 3)


def test_the_first_version_has_a_tree_for_each_controller(machine: Path):
  lines = "3:pids:/\n2:memory:/docker/abc\n1:cpu,cpuacct:/docker/abc\n"
  group(machine, "memory", "", lines, memory__limit_in_bytes="2000000000")  # its own group is the outermost
  group(machine, "cpu", "docker/abc", lines, cpu__cfs_quota_us="50000", cpu__cfs_period_us="100000")
  group(machine, "cpu", "", lines, cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
  group(machine, "pids", "", lines, pids__max="max")
  assert (cgroup.memory(), cgroup.threads(), cgroup.cores()) == (2000000000, None, 1)
  group(machine, "memory", "", lines, memory__limit_in_bytes="9223372036854771712")
  assert cgroup.memory() is None


def test_a_container_that_has_less_than_its_machine_says_so(machine: Path, monkeypatch: pytest.MonkeyPatch):
  finds(checkup.cores, OK, "64 cores")
  group(machine, "", "", "0::/\n", cgroup__controllers="", memory__max="5000000000", cpu__max="200000 100000")
  finds(checkup.cores, OK, "2 cores of 64, as this container")
  monkeypatch.setattr(checkup, "_free", lambda: 3e9)
  finds(checkup.memory, OK, "3.0 GB free of 5.0 GB, the limit of this container")
  monkeypatch.setattr(checkup, "_free", lambda: 0.5e9)
  finds(checkup.memory, WARNING, "0.5 GB free", "status 137")


def space(left: float, files: int = 10) -> SimpleNamespace:
  """A file system with so many bytes, and so many files that may be made."""
  return SimpleNamespace(f_frsize=1, f_blocks=left, f_bavail=left, f_files=10, f_favail=files)


def test_little_shared_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
  monkeypatch.setattr(os, "statvfs", lambda _: space(64 << 20))
  finds(lambda: checkup.shared_memory(str(tmp_path)), WARNING, "0.1 GB", "--shm-size=8g")
  monkeypatch.setattr(os, "statvfs", lambda _: space(8 << 30))
  finds(lambda: checkup.shared_memory(str(tmp_path)), OK, "8.6 GB free")
  monkeypatch.setattr(os, "access", lambda *_: False)
  finds(lambda: checkup.shared_memory(str(tmp_path)), WARNING, "cannot be written")


def test_few_files_or_threads_are_a_warning(machine: Path, monkeypatch: pytest.MonkeyPatch):
  allowed = {resource.RLIMIT_NOFILE: 4096, resource.RLIMIT_NPROC: resource.RLIM_INFINITY}
  monkeypatch.setattr(os, "geteuid", lambda: 1)
  monkeypatch.setattr(resource, "getrlimit", lambda which: (allowed[which], allowed[which]))
  finds(checkup.limits, OK, "4,096 open files, any number of threads")
  group(machine, "", "", "0::/\n", cgroup__controllers="", pids__max="120", pids__current="20")
  finds(checkup.limits, WARNING, "100 processes and threads", "--pids-limit")
  allowed[resource.RLIMIT_NPROC] = 50
  finds(checkup.limits, WARNING, "50 processes and threads", "ulimit -u")
  allowed[resource.RLIMIT_NOFILE] = 256
  finds(checkup.limits, WARNING, "256 open files", "ulimit -n")


def test_signals_that_would_not_arrive_are_a_warning(monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(checkup, "unforwarded", lambda: "the first process forwards nothing; use exec")
  finds(checkup.signals, WARNING, "the first process forwards nothing; use exec")
  monkeypatch.setattr(checkup, "unforwarded", str)
  finds(checkup.signals, OK)
  ignored = {signal.SIGINT}
  monkeypatch.setattr(signal, "getsignal", lambda one: signal.SIG_IGN if one in ignored else signal.SIG_DFL)
  finds(checkup.signals, OK, "SIGINT is ignored, as with nohup")
  ignored.add(signal.SIGTERM)
  finds(checkup.signals, WARNING, "SIGTERM is ignored")


def test_folders_without_space_or_rights_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  def none() -> str:
    raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

  monkeypatch.setenv("HOME", str(tmp_path))
  finds(checkup.home, OK, str(tmp_path))
  for look, fix in ((checkup.home, "set HOME"), (checkup.temporary, "set TMPDIR")):
    with monkeypatch.context() as patch:
      patch.setattr(os, "statvfs", lambda _: space(2e8))
      finds(look, WARNING, "0.20 GB left", fix)
    with monkeypatch.context() as patch:
      patch.setattr(os, "statvfs", lambda _: space(1e12, files=0))
      finds(look, WARNING, "no inodes left", fix)
  with monkeypatch.context() as patch:
    patch.setattr(tempfile, "gettempdir", none)
    finds(checkup.temporary, WARNING, "no folder for temporary files", "TMPDIR")
  monkeypatch.setattr(os, "access", lambda *_: False)
  finds(checkup.home, WARNING, "cannot be written, so caches are not kept")


@AS_ROOT
def test_a_cache_is_named_with_its_owner(tmp_path: Path):
  mine, theirs = tmp_path / "mine", given(tmp_path / "theirs")
  finds(lambda: checkup.cache(str(mine), "data.cache_dir"), OK, f"data.cache_dir: {mine}, of this user")
  finds(lambda: checkup.cache("", "compilation_cache_dir"), OK, "not kept")
  finds(lambda: checkup.cache(str(theirs), "data.cache_dir"), OK, "user-0")
  strangers = given(tmp_path / "strangers")
  os.chown(strangers, USER + 1, USER + 1)
  with another_user(mine):
    finds(lambda: checkup.cache(str(tmp_path / "new"), "data.cache_dir"), PROBLEM, "cannot be used (Permission denied")
    finds(lambda: checkup.cache(str(mine), "data.cache_dir"), OK, f"reads {mine}, and writes nothing")
    finds(lambda: checkup.cache(str(strangers), "data.cache_dir"), PROBLEM, "belongs to 4712, and you may not write")


def test_a_workdir_is_written_locked_and_has_this_machines_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  look = lambda: checkup.workdir(str(tmp_path))
  finds(look, OK, str(tmp_path), "GB free")
  assert list(tmp_path.iterdir()) == []
  (tmp_path / "runs").symlink_to(tmp_path / "disk")
  finds(lambda: checkup.workdir(str(tmp_path / "runs")), PROBLEM, "is a link to", "mount that disk")
  finds(lambda: checkup.workdir("/proc/runs"), PROBLEM, "workdir='/proc/runs' cannot be written")
  with monkeypatch.context() as patch:
    patch.setattr(checkup.time, "time", lambda: 1e9)
    finds(look, WARNING, "the file server of", "ahead", "NTP")
  with monkeypatch.context() as patch:

    def no_locks(*_: object) -> None:
      raise OSError(errno.ENOLCK, "No locks available")

    patch.setattr(fcntl, "flock", no_locks)
    finds(look, WARNING, "cannot be locked (No locks available)", "second run")
  mounts = tmp_path / "mounts"
  mounts.write_text(f"overlay / overlay rw 0 0\ntmpfs {tmp_path}/volume tmpfs rw 0 0\n")
  assert [checkup._kind(tmp_path / name, mounts) for name in ("app", "volume", "volumes")] == [
    "overlay", "tmpfs", "overlay",
  ]  # fmt: skip
  monkeypatch.setattr(checkup, "_kind", lambda _: "overlay")
  finds(look, WARNING, "ends with it; mount a volume")


def test_names_and_ports_that_do_not_work_are_named(monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(processes, "has_address", lambda: False)
  finds(checkup.names, WARNING, "has no address", "/etc/hosts")
  finds(lambda: checkup.ports(""), OK, "the system gives ports")
  finds(lambda: checkup.ports("nowhere"), PROBLEM, "is not HOST:PORT")
  with socket.create_server(("127.0.0.1", 0)) as taken:
    port = taken.getsockname()[1]
    finds(lambda: checkup.ports(f"127.0.0.1:{port}"), PROBLEM, f"port {port} is in use")
  finds(lambda: checkup.ports("no-such-host.invalid:1"), PROBLEM, "has no address")

  def refused(*_: object, **__: object) -> None:
    raise PermissionError(errno.EPERM, "Operation not permitted")

  monkeypatch.setattr(socket, "create_server", refused)
  finds(lambda: checkup.ports(""), PROBLEM, "nothing can listen on the loopback (Operation not permitted)")
  monkeypatch.setattr(socket, "gethostbyname", refused)
  finds(checkup.names, WARNING, "localhost has no address")


def test_variables_that_are_left_over_are_named(monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setenv("XLA_FLAGS", "--a")
  finds(checkup.variables, OK, "XLA_FLAGS=--a")
  monkeypatch.setattr(devices, "has_gpu_compiler", lambda: True)
  monkeypatch.setenv("LD_LIBRARY_PATH", "/usr/local/cuda-11/lib64")
  finds(checkup.variables, WARNING, "another CUDA", "unset it")
  monkeypatch.setenv("SLURM_STEP_NODELIST", "a[1-4]")
  monkeypatch.setenv("SLURM_NTASKS", "4")
  finds(checkup.variables, WARNING, "SLURM_NTASKS=4")
  monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "10.0.0.1:1")
  finds(checkup.variables, WARNING, "JAX_COORDINATOR_ADDRESS", "unset it")


def test_accelerators_that_jax_does_not_use_are_named(monkeypatch: pytest.MonkeyPatch):
  finds(checkup.device_list, OK, "8 × cpu (cpu)")
  monkeypatch.setattr(devices, "has_gpu_compiler", lambda: False)
  monkeypatch.setattr(devices, "_has_gpus", lambda: True)
  finds(checkup.device_list, WARNING, "cannot use", "pip install '.[cuda]'")
  monkeypatch.setattr(devices, "has_gpu_compiler", lambda: True)
  monkeypatch.setattr(checkup.device_memory, "ask", lambda: None)
  monkeypatch.setattr(checkup, "jax", SimpleNamespace(config=SimpleNamespace(jax_platforms=None), default_backend=str))
  finds(checkup.device_list, PROBLEM, "starts on its CPUs alone", "nvidia-smi")
  monkeypatch.setattr(devices, "started", lambda: jax.devices("nothing"))
  finds(checkup.device_list, PROBLEM, "RuntimeError", "nothing")


def test_a_run_has_as_many_threads_as_its_share_of_the_cores(machine: Path, monkeypatch: pytest.MonkeyPatch):
  """As a pod on a large node. With several devices it still has more threads than devices."""
  for quota, count, threads in ((None, 1, None), (None, 8, "64"), ("300000", 1, "3"), ("300000", 8, "12")):
    if quota:
      group(machine, "", "", "0::/\n", cgroup__controllers="", cpu__max=f"{quota} 100000")
    monkeypatch.delenv("NPROC", raising=False)
    devices.give_threads(count)
    assert os.environ.get("NPROC") == threads


def test_too_few_threads_are_one_sentence_before_jax_aborts(machine: Path, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
  for allowed in (64, 63):
    group(machine, "", "", "0::/\n", cgroup__controllers="", pids__max=str(allowed + 5), pids__current="5")
    with (
      one_sentence("may start 63 more processes and threads", "needs 64", "--pids-limit")
      if allowed < 64
      else (contextlib.nullcontext())
    ):
      devices.give_threads(8)
