"""The place of a user is not as expected: no home, no folder for temporary files, other platforms, variables."""

import errno
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import pytest
from helpers import ROOT, one_sentence
from jobs import flags
from users import AS_ROOT, another_user

from checkpointing import pretrained
from configs import base
from data.text import tokenizers
from errors import Unavailable, expanded
from runtime import command_line, devices, processes
from runtime.stderr import silenced
from runtime.storage.bucket import location


@pytest.mark.parametrize("path", ["~nobody-here/x", "~nobody-here"])
def test_the_home_of_an_unknown_user_is_one_sentence(path: str):
  for field, look in (("workdir", location), ("checkpoint.memory_dir", expanded), ("init_from", location)):
    with one_sentence(f"{field}={path!r}", "a user that this machine does not know", "write the whole path"):
      look(path, field)
  assert not pretrained.is_folder(path)
  with one_sentence(path):
    tokenizers.load(path) if hasattr(tokenizers, "load") else location(path, "x")


def test_a_user_without_a_home_gets_a_private_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
  monkeypatch.setattr(os.path, "expanduser", lambda path: path)
  monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
  monkeypatch.delenv("HOME")
  home = tmp_path / f"meshwright-{os.getuid()}"
  for _ in range(2):  # the next start finds the same
    command_line.use_a_home()
    assert os.environ["HOME"] == str(home)
    assert home.stat().st_mode & 0o777 == 0o700
  assert f"this user has no home, so caches are in {home}; set HOME" in capsys.readouterr().err
  home.chmod(0o777)  # whoever may write there could run code in this process
  command_line.use_a_home()
  assert os.environ["HOME"] != str(home)
  assert Path(os.environ["HOME"]).stat().st_mode & 0o777 == 0o700


def test_a_home_stays(monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setenv("HOME", "/somewhere")
  command_line.use_a_home()
  assert os.environ["HOME"] == "/somewhere"


def test_without_a_folder_for_temporary_files_nothing_is_silenced(monkeypatch: pytest.MonkeyPatch, capfd):
  def fails(*_: object, **__: object) -> None:
    raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

  monkeypatch.setattr(tempfile, "NamedTemporaryFile", fails)
  with silenced():
    os.write(2, b"shown\n")
  assert "shown" in capfd.readouterr().err
  with pytest.raises(KeyError), silenced():
    raise KeyError


@pytest.fixture
def platforms(monkeypatch: pytest.MonkeyPatch):
  """Sets what JAX_PLATFORMS says, and returns what JAX starts then."""
  before, started = jax.config.jax_platforms, jax.devices()

  def start(asked: str) -> list[jax.Device]:
    jax.config.update("jax_platforms", asked)
    known = {"", "cpu", "cpu,cuda"}

    def of_jax() -> list[jax.Device]:
      now = jax.config.jax_platforms
      if now not in known:
        raise RuntimeError(f"Unable to initialize backend '{now}': no such device. (set JAX_PLATFORMS='' to ...)")
      return started

    monkeypatch.setattr(jax, "devices", of_jax)
    return devices.started()

  yield start
  jax.config.update("jax_platforms", before)


@pytest.mark.parametrize("asked", ["CPU", "cpu,", " cpu , CUDA ", "cpu", ""])
def test_platforms_are_read_as_they_are_meant(asked: str, platforms):
  assert platforms(asked)


@pytest.mark.parametrize("asked", ["tpu", "gpu", "GPU", "cuda", "metal"])
def test_a_platform_that_is_not_there_is_one_sentence(asked: str, platforms):
  with one_sentence(f"JAX_PLATFORMS={asked!r} cannot be used (", "no such device); unset it", "or set it to cpu"):
    platforms(asked)


def test_a_device_that_does_not_start_may_start_later(monkeypatch: pytest.MonkeyPatch, platforms):
  def fails() -> None:
    raise RuntimeError("the driver is busy")

  platforms("")
  monkeypatch.setattr(jax, "devices", fails)
  with one_sentence("no device can be used (the driver is busy)", "JAX_PLATFORMS=cpu", kind=Unavailable):
    devices.started()


def test_a_leftover_coordinator_is_named(monkeypatch: pytest.MonkeyPatch):
  def fails(**_: object) -> None:
    raise ValueError("Number of processes must be defined.")

  monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "10.0.0.1:1234")
  monkeypatch.setattr(jax.distributed, "initialize", fails)
  with one_sentence("JAX_COORDINATOR_ADDRESS='10.0.0.1:1234' is set", "unset it to run alone"):
    processes.join(base.get_config().distributed)


@AS_ROOT
def test_a_cache_that_nobody_asked_for_is_left_out_and_others_are_named(tmp_path: Path, monkeypatch, capfd):
  """Of compiled programs: without a home that can be written a run starts, as it does with "" for none."""
  monkeypatch.setattr(devices, "PROGRAMS", str(tmp_path / "home" / "compiled"))
  shared = tmp_path / "shared"
  shared.mkdir()
  with another_user(shared):
    jax.config.update("jax_compilation_cache_dir", None)
    devices._keep_programs("auto", profiled=False)
    assert jax.config.jax_compilation_cache_dir is None
    assert "compiled programs are not kept" in capfd.readouterr().err
    with one_sentence(
      f"compilation_cache_dir='{shared}/mine' cannot be written", 'or set compilation_cache_dir="" for'
    ):
      devices._keep_programs(str(shared / "mine"), profiled=False)
    jax.config.update("jax_compilation_cache_dir", str(shared / "of_jax"))
    with one_sentence("JAX_COMPILATION_CACHE_DIR=", 'or set JAX_COMPILATION_CACHE_DIR="" for none'):
      devices._keep_programs("auto", profiled=False)
    # A shared cache that root has filled is read, though nothing can be written there.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "xla_gpu_per_fusion_autotune_cache_dir")
    monkeypatch.setattr(os, "access", lambda *_: False)  # it asks for whom the program was started as
    devices._keep_programs(str(shared), profiled=False)
    assert jax.config.jax_compilation_cache_dir == str(shared)
    assert jax.config.jax_persistent_cache_enable_xla_caches == "none"  # into which XLA would write on GPUs, and fail


def test_the_program_has_one_home_for_all(monkeypatch: pytest.MonkeyPatch):
  """Each command asks for it before it reads a path."""
  asked = []
  monkeypatch.setattr(command_line, "use_a_home", lambda: asked.append(True))
  with command_line.bad_input_ends_the_program():
    pass
  assert asked


def test_a_machine_whose_name_has_no_address_is_named(monkeypatch: pytest.MonkeyPatch, platforms):
  def fails() -> None:
    raise RuntimeError("Unable to initialize backend 'cpu': [enforce fail at gloo/transport/tcp/device.cc:99] rv == 0")

  monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
  assert not processes.has_address()
  platforms("")
  monkeypatch.setattr(jax, "devices", fails)
  with one_sentence("the name of this machine, 'no-such-host.invalid', has no address", "/etc/hosts"):
    devices.started()


UTS = ["unshare", "--user", "--map-root-user", "--uts"]


@pytest.mark.full
def test_a_job_on_one_machine_needs_no_name(tmp_path: Path):
  """As in a container whose name is not in /etc/hosts."""
  rename = ["sh", "-c", 'hostname no-such-host.invalid && exec "$@"', "sh"]
  if not shutil.which("hostname") or subprocess.run([*UTS, *rename, "true"], capture_output=True).returncode:
    pytest.skip("this machine lets no user name a namespace (unshare --uts)")
  arguments = [sys.executable, "-m", "tools.launch", "--processes=2", "--devices-per-process=1", "--"]
  command = [*UTS, *rename, *arguments, *flags("fsdp", tmp_path / "run", steps=1)]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
  assert done.returncode == 0, done.stdout + done.stderr
