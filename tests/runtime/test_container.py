"""docs/launch/Dockerfile: what it promises, and a run as in its container, without an engine.

`unshare` gives the run what an engine would: a root that cannot be written, one volume, a small /dev/shm, a user whom
the system does not know, and process number 1. Files, environment and entry point are those of the Dockerfile.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import test_house
from helpers import ROOT

FILE = ROOT / "docs/launch/Dockerfile"
Lines = list[tuple[str, str]]


def read(text: str) -> Lines:
  """The instructions of a Dockerfile, with what follows each."""
  whole = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE))
  return [tuple(line.split(maxsplit=1)) for line in whole.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def lines() -> Lines:
  return read(FILE.read_text())


def only(lines: Lines, name: str) -> str:
  (found,) = [rest for instruction, rest in lines if instruction == name]
  return found


def environment(lines: Lines) -> dict[str, str]:
  return dict(pair.partition("=")[::2] for name, rest in lines if name == "ENV" for pair in shlex.split(rest))


def copied(lines: Lines) -> list[str]:
  return [path for name, rest in lines if name == "COPY" for path in shlex.split(rest)[:-1]]


def test_the_user_has_no_rights_and_one_volume_is_written(lines: Lines):
  user = only(lines, "USER")
  assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user), "a number: Kubernetes compares it with runAsNonRoot"
  assert f"runAsUser: {user.partition(':')[0]}" in (FILE.parent / "jobset.yaml").read_text()
  volume, given = only(lines, "VOLUME"), environment(lines)
  assert given["HOME"].startswith(f"{volume}/"), "caches are below the user's home"
  assert given["PYTHONDONTWRITEBYTECODE"] == "1", "the root cannot be written"
  made = " ".join(rest for name, rest in lines if name == "RUN")
  assert f"mkdir -m 1777 {volume}" in made, "any user may run it"
  assert f"ln -s {volume} {only(lines, 'WORKDIR')}/runs" in made, "the default workdir is in runs/"
  order = [name for name, _ in lines]
  assert order.index("USER") > max(place for place, name in enumerate(order) if name == "RUN")


def test_no_shell_stands_between_the_engine_and_the_program(lines: Lines):
  assert json.loads(only(lines, "ENTRYPOINT")) == ["python", "-m", "runtime.first_process", "train.py"]
  assert all(isinstance(word, str) for word in json.loads(only(lines, "CMD")))


def test_what_is_installed_is_locked(lines: Lines):
  locked, extra = [rest for name, rest in lines if name == "RUN" and "pip install" in rest]
  assert locked == "pip install --no-cache-dir --require-hashes -r requirements.lock"
  extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
  for name in ("cuda", "tpu"):
    assert f'{name}) pip install --no-cache-dir "{extras[name][0]}"' in extra
  assert ("ARG", "EXTRA=") in lines, "for CPUs by default"
  version = re.fullmatch(r"BASE=python:(\d+\.\d+)-slim", dict(lines[:1])["ARG"])[1]
  assert f"Python 3.11, 3.12 or {version}" in (ROOT / "Makefile").read_text(), "the newest that is tested"


def test_all_code_is_copied(lines: Lines):
  found = [ROOT / path for path in copied(lines)]
  needed = [file for file in test_house.FILES if file.name not in ("benchmarks.py", "meshwright.py")]
  assert not [file for file in needed if not {file, *file.parents} & set(found)]
  for name, rest in lines:
    source = rest.split()[0]
    if name == "COPY" and (ROOT / source).is_dir():  # the content of a folder goes into that of the same name
      assert rest.split() == [source, f"{source}/"]


@pytest.mark.parametrize("extra, installs, status", [("", "", 0), ("cuda", "jax[cuda13]", 0), ("rocm", "", 2)])
def test_an_extra_that_is_not_known_ends_the_build(
  extra: str, installs: str, status: int, lines: Lines, tmp_path: Path
):
  (tmp_path / "pip").write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/called\n')
  (tmp_path / "pip").chmod(0o755)
  (script,) = [rest for name, rest in lines if name == "RUN" and "EXTRA" in rest]
  given = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "EXTRA": extra}
  done = subprocess.run(["sh", "-c", script], env=given, capture_output=True, text=True)
  called = tmp_path / "called"
  assert (done.returncode, called.read_text().split()[-1] if called.exists() else "") == (status, installs)
  assert ("error: EXTRA=rocm is not known; use cuda or tpu" in done.stderr) == (status == 2)


BOX = """
set -e
mkdir layers root
mount -t tmpfs tmpfs layers
mkdir layers/upper layers/work
mount -t overlay overlay -o lowerdir=/,upperdir=layers/upper,workdir=layers/work root
mkdir -p root/app root{volume}
for folder in {above}; do
  chmod o+x "root$folder"
done
mount --bind app root/app
mount -o remount,bind,ro root/app
mount --bind volume root{volume}
mount -t proc proc root/proc
mount --rbind /dev root/dev
mount -t tmpfs -o size=64m,mode=1777 tmpfs root/dev/shm
mount -o remount,ro root
exec chroot root setpriv --reuid={user} --regid={user} --clear-groups --no-new-privs --bounding-set=-all \\
  env -i -C /app {environment} {command}
"""
UNSHARE = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
USERS = (1000770000, 4711)  # as OpenShift gives them, and another
TINY = (
  "--config=configs/single.py:tiny", "--config.model.depth=1", "--config.steps=200000", "--config.sample_length=0",
  "--config.simulated_devices=1", "--config.runtime.heartbeat=0", "--config.eval_every=0", "--workdir=runs/mine",
)  # fmt: skip


@pytest.fixture
def box(lines: Lines, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen]]:
  """Starts the entry point as a user, with arguments."""
  if os.geteuid() != 0 or not all(shutil.which(name) for name in ("unshare", "setpriv", "chroot")):
    pytest.skip("only root can make mounts and act as another user (unshare, setpriv)")
  volume = only(lines, "VOLUME")
  (tmp_path / "app").mkdir()
  for path in copied(lines):
    copy = shutil.copytree if (ROOT / path).is_dir() else shutil.copy
    copy(ROOT / path, tmp_path / "app" / path)
  (tmp_path / "app" / "runs").symlink_to(volume)
  subprocess.run(["chmod", "-R", "a+rX", tmp_path / "app"], check=True)
  (tmp_path / "volume").mkdir(mode=0o1777)
  (tmp_path / "volume").chmod(0o1777)
  places = [Path(sys.executable).parent, *map(Path, map(os.path.realpath, (sys.prefix, sys.base_prefix)))]
  above = sorted({folder for place in places for folder in place.parents if not folder.is_symlink()} - {Path("/")})
  if {place.stat().st_dev for place in places} != {Path("/").stat().st_dev}:
    pytest.skip("this Python is in another file system than the root, of which a copy is mounted")
  path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
  given = environment(lines) | {"PATH": path, "JAX_PLATFORMS": "cpu"}

  started: list[subprocess.Popen] = []

  def start(user: int, *arguments: str) -> subprocess.Popen:
    script = BOX.format(
      volume=volume, user=user, above=shlex.join(map(str, above)),
      environment=shlex.join(f"{name}={value}" for name, value in given.items()),
      command=shlex.join([*json.loads(only(lines, "ENTRYPOINT")), *arguments]),
    )  # fmt: skip
    work = tmp_path / f"box-{time.monotonic_ns()}"
    work.mkdir()
    for name in ("app", "volume"):
      (work / name).symlink_to(tmp_path / name)
    started.append(subprocess.Popen(
      [*UNSHARE, "sh", "-c", script], cwd=work, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ))  # fmt: skip
    return started[-1]

  tried = subprocess.run([*UNSHARE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, text=True)
  if tried.returncode:
    pytest.skip(f"this machine lets nobody make mounts ({tried.stderr.strip()})")
  yield start
  for outer in started:
    outer.kill()  # and with it all that is inside


def first_of(outer: subprocess.Popen) -> int:
  """The number outside of the process that is 1 inside, once it is Python."""
  deadline = time.monotonic() + 20
  while time.monotonic() < deadline:
    children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
    if children and Path(f"/proc/{children[0]}/comm").read_text().startswith("python"):
      return int(children[0])
    assert outer.poll() is None, outer.stdout.read()
    time.sleep(0.02)
  raise AssertionError("the program has not started")


@pytest.mark.full
def test_a_container_trains_stops_and_goes_on(box: Callable[..., subprocess.Popen], tmp_path: Path):
  metrics = tmp_path / "volume" / "mine" / "metrics.jsonl"
  run = box(USERS[0], *TINY)
  first = first_of(run)
  deadline = time.monotonic() + 90
  while not metrics.exists() or metrics.read_text().count("train") < 3:
    assert run.poll() is None, run.stdout.read()
    assert time.monotonic() < deadline
    time.sleep(0.05)
  os.kill(first, signal.SIGTERM)  # docker stop
  output, _ = run.communicate(timeout=60)
  assert run.returncode == 0, output
  assert "SIGTERM: will save and end after this step" in output
  stopped = int(re.search(r"stopped   by SIGTERM after step (\d+)", output)[1])
  assert "Traceback" not in output
  assert not re.search(r"^(error|warning)", output, re.MULTILINE), output

  again = box(USERS[0], *TINY, f"--config.stop_after={stopped + 5}")
  output, _ = again.communicate(timeout=90)
  assert again.returncode == 0, output
  assert f"resumed   at step {stopped}" in output
  assert {path.name for path in (tmp_path / "volume").iterdir()} <= {"mine", "home"}

  other = box(USERS[1], *TINY)
  output, _ = other.communicate(timeout=60)
  assert other.returncode == 2, output
  assert f"it belongs to {USERS[0]}, and this user is {USERS[1]}" in output.splitlines()[-1]


@pytest.mark.full
def test_a_container_that_is_stopped_at_once_ends_at_once(box: Callable[..., subprocess.Popen]):
  run = box(USERS[0], *TINY)
  first = first_of(run)
  time.sleep(0.3)  # Python has started, and the program imports
  os.kill(first, signal.SIGTERM)
  output, _ = run.communicate(timeout=20)
  assert run.returncode == 143, output
