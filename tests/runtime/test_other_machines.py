"""On other people's machines: a run that cannot write, read or be named as usual ends soon, and says why."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from helpers import ROOT, in_full

USER = 4711  # without an entry in /etc/passwd
RUN = (
  "--config=configs/single.py:tiny", "--config.data.name=synthetic", "--config.model.depth=1",
  "--config.model.width=32",
  "--config.model.heads=8", "--config.model.kv_heads=8", "--config.model.seq_len=8", "--config.steps=4",
  "--config.eval_examples=32", "--config.sample_length=0", "--config.compilation_cache_dir=",
)  # fmt: skip


def run(*arguments: str, user: int | None = None, seconds: float = 60, **environment: str) -> tuple[int, str]:
  """Exit status and output of Python with these arguments. Fails if it runs longer."""
  as_user = [] if user is None else ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
  given = os.environ | {"JAX_PLATFORMS": "cpu"} | environment
  done = subprocess.run(
    [*as_user, sys.executable, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    env=given, timeout=seconds,
  )  # fmt: skip
  return done.returncode, done.stdout


def can_run_as_user() -> bool:
  return os.geteuid() == 0 and bool(shutil.which("setpriv")) and not run("-c", "import jax", user=USER)[0]


COLLECTOR = """
import atexit, gc
atexit.register(lambda: print("left", sum(map(len, map(gc.get_objects, range(3)))), flush=True))
from runtime import command_line

def main(config):
  main.made = [[] for _ in range(100_000)]
  print("imported", gc.get_freeze_count(), flush=True)

command_line.run(main, needs_config=False)
"""


def test_what_imports_and_a_run_have_made_is_not_searched_for_garbage():
  """Python looked through a million objects at each start and end: a second of a run of seven."""
  status, output = run("-c", COLLECTOR)
  numbers = dict(line.split() for line in output.splitlines())
  assert status == 0
  assert int(numbers["imported"]) > 10_000
  assert int(numbers["left"]) < 1_000


STUCK = """
import sys, threading, time
from runtime import command_line
from errors import ConfigError

def main(config):
  threading.Thread(target=time.sleep, args=(100,)).start()
  print("the last line", flush=True)
  {ends}

command_line.run(main, needs_config=False)
"""


@pytest.mark.parametrize(
  "ends, status",
  in_full(
    [("raise ConfigError('no')", 2), ("return", 0), ("sys.exit(3)", 3), ("raise RuntimeError('no')", 1)], ("return", 0)
  ),
)
def test_a_thread_that_does_not_end_holds_no_program_and_changes_no_status(ends: str, status: int):
  """After a failed save, orbax has threads that wait for 300 s."""
  found, output = run("-c", STUCK.format(ends=ends), seconds=20)
  assert found == status, output
  assert "the last line" in output


@pytest.mark.full
@pytest.mark.skipif(
  not can_run_as_user(), reason="only root can start a program as another user, who needs this Python"
)
def test_a_last_save_that_fails_ends_the_run_soon_and_leaves_nothing(tmp_path: Path):
  """Like a disk without inodes, or a folder of another owner."""
  if not can_run_as_user():
    pytest.skip("only root can start a program as another user, who must be able to run this Python")
  workdir = place_of_user(tmp_path, "run")
  code = AT_STEP.format(folder=str(workdir / "checkpoints"), does="os.chmod(folder, 0o555)")
  status, output = run("-c", code, *RUN, f"--workdir={workdir}", user=USER, HOME=str(tmp_path))
  assert status == 1, output
  assert output.splitlines()[-1].startswith("error: the checkpoints of steps 4 could not be written")
  assert "Traceback" not in output
  assert list((workdir / "checkpoints").iterdir()) == []


def place_of_user(tmp_path: Path, name: str) -> Path:
  """A folder of another user, who may pass through those above it."""
  for folder in (tmp_path, *tmp_path.parents):
    if Path(tempfile.gettempdir()) in folder.parents:
      folder.chmod(0o755)
  place = tmp_path / name
  place.mkdir()
  os.chown(place, USER, USER)
  return place


AT_STEP = """
import os, runpy, sys
from reporting.reporter import Reporter
folder, after = {folder!r}, Reporter.after
def changed(self, step, metrics):
  if step == 0:
    os.makedirs(folder, exist_ok=True)
    {does}
  return after(self, step, metrics)
Reporter.after = changed
runpy.run_path("train.py", run_name="__main__")
"""
