"""Real forks: a package that is built, installed and trains, and a slim tree that trains, is killed and resumes."""

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import ROOT

from tools.forking import tree


def has_setuptools(least: int) -> bool:
  try:
    return int(importlib.metadata.version("setuptools").partition(".")[0]) >= least
  except importlib.metadata.PackageNotFoundError:
    return False


builds = pytest.mark.skipif(not has_setuptools(77), reason="needs setuptools>=77 (the extra `dev`)")
SMALL = (
  "--config.steps=20", "--config.log_every=5", "--config.eval_every=0", "--config.sample_length=0",
  "--config.model.depth=1", "--config.simulated_devices=2", "--config.data.cache_dir=~/.cache/meshwright/tests",
  "--config.compilation_cache_dir=~/.cache/meshwright/tests",
)  # fmt: skip


def python(folder: Path, *arguments: str, path: Path | None = None) -> subprocess.CompletedProcess:
  """Runs Python there, which finds what is installed, what is in that folder, and `path`."""
  kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
  given = {"PYTHONPATH": str(path)} if path else {}
  done = subprocess.run(
    [sys.executable, *arguments], cwd=folder, env=kept | given, capture_output=True, text=True, timeout=600
  )
  assert done.returncode == 0, done.stdout + done.stderr
  return done


def installed(source: Path, into: Path) -> Path:
  """A folder with the package that is built from a tree, without what it depends on, and without a network."""
  pip = ("-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input")
  python(into, *pip, "wheel", "--no-deps", "--no-build-isolation", f"--wheel-dir={into}", str(source))
  (wheel,) = into.glob("*.whl")
  python(into, *pip, "install", "--no-deps", "--no-index", f"--target={into / 'site'}", str(wheel))
  return into / "site"


def losses(run: Path) -> dict[int, float]:
  lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
  return {line["step"]: line["loss"] for line in lines if line["split"] == "train"}


@builds
@pytest.mark.full
def test_what_this_repository_installs_says_that_it_is_no_library(tmp_path: Path):
  tree.write(tree.read(), tmp_path / "clone")
  site = installed(tmp_path / "clone", tmp_path)
  assert sorted(file.name for file in site.glob("*.py")) == ["meshwright.py"]
  tried = subprocess.run(
    [sys.executable, "-c", "import meshwright"], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(site)},
    capture_output=True, text=True,
  )  # fmt: skip
  assert "ImportError: Meshwright is a template of programs, not a library" in tried.stderr.splitlines()[-1]


@builds
@pytest.mark.full
def test_an_installed_package_trains_beside_models_and_data_of_the_user(tmp_path: Path):
  python(ROOT, "-m", "tools.fork", str(tmp_path / "acme"), "--package")
  site, work = installed(tmp_path / "acme", tmp_path), tmp_path / "work"
  for name in ("models", "data", "configs", "strategies"):
    (work / name).mkdir(parents=True)
    (work / name / "__init__.py").write_text("raise SystemExit('the wrong package')\n")
  (work / "mine.py").write_text('from acme.configs.base import config_of\n\nget_config = config_of("fsdp")\n')
  python(work, "-m", "acme.train", "--config=mine.py:tiny", "--workdir=run", *SMALL, path=site)
  assert max(losses(work / "run")) == 20
  # The launcher starts the program as a file, in other processes.
  job = (
    "--processes=2",
    "--devices-per-process=1",
    "--",
    "--config=mine.py:tiny",
    "--workdir=job",
    *SMALL,
    "--config.stop_after=5",
  )
  python(work, "-m", "acme.tools.launch", *job, path=site)
  assert losses(work / "job")[5] == pytest.approx(losses(work / "run")[5], rel=1e-5)


@pytest.mark.full
def test_the_quick_tests_of_a_package_pass(tmp_path: Path):
  python(ROOT, "-m", "tools.fork", str(tmp_path / "acme"), "--package")
  chosen = ("tests/test_house.py", "tests/strategies/test_layout.py", "tests/runtime/test_command_line.py")
  python(tmp_path / "acme", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not full", *chosen)
  python(tmp_path / "acme", "-m", "ruff", "check", ".")


@pytest.mark.full
def test_a_slim_fork_trains_is_killed_resumes_and_passes_the_tests_that_are_left(tmp_path: Path):
  fork = tmp_path / "acme"
  python(ROOT, "-m", "tools.fork", str(fork), "--keep=text,fsdp,tensor_parallel")
  texts = tmp_path / "texts"
  texts.mkdir()
  for name in ("README.md", "WORKSPACE.md", "SECURITY.md"):
    (texts / name).with_suffix(".txt").write_bytes((ROOT / name).read_bytes())
  fields = (*SMALL, f"--config.data.path={texts}", "--config.checkpoint.every=5", "--config.batch_size=4")
  run = ("train.py", "--config=configs/fsdp.py:tiny", f"--workdir={tmp_path / 'run'}", *fields)
  process = subprocess.Popen([sys.executable, *run], cwd=fork, stdout=subprocess.DEVNULL)
  while not (tmp_path / "run/checkpoints/10/commit_success.txt").exists() and process.poll() is None:
    time.sleep(0.02)
  process.kill()
  process.wait()
  assert process.returncode in (-signal.SIGKILL, 0)
  other = [flag.replace("fsdp.py", "tensor_parallel.py") for flag in run]
  said = python(fork, *other).stdout
  assert "resum" in said
  assert sorted(losses(tmp_path / "run")) == [5, 10, 15, 20]
  # What was left out says so in one sentence.
  refused = subprocess.run(
    [sys.executable, *run, "--config.init_from=runs/other", f"--workdir={tmp_path / 'other'}"],
    cwd=fork, capture_output=True, text=True,
  )  # fmt: skip
  assert "this fork leaves out init_from" in refused.stderr.splitlines()[-1]
  python(fork, "-m", "ruff", "check", "--no-cache", ".")
  left = ("tests/test_smallest.py", "tests/strategies/test_layout.py", "tests/data/test_text.py")
  python(fork, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not full", *left)
