"""The files of this repository that a fork begins with, and how they are written into a new folder."""

import fnmatch
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Without git: what no release holds. Patterns with a slash are paths, the others are names.
LEFT_OUT = (
  ".*venv*", "__pycache__", "*.pyc", ".git", ".pytest_cache", ".ruff_cache", ".mypy_cache", ".mirror", "*.egg-info",
  "runs", "build", "docs/index.html", ".installed", ".compilers", ".emulators",
)  # fmt: skip
Files = dict[str, bytes]


def read(root: Path = ROOT) -> Files:
  """The files that git tracks, as they are on disk. Without git: all but what a release leaves out (`LEFT_OUT`)."""
  done = None
  if (root / ".git").exists():
    done = subprocess.run(["git", "-C", str(root), "ls-files", "-z"], capture_output=True, text=True, check=False)
  if done and not done.returncode:
    names = [name for name in done.stdout.split("\0") if (root / name).is_file()]
  else:
    files = (file.relative_to(root) for file in root.rglob("*") if file.is_file())
    names = [file.as_posix() for file in files if not is_left_out(file)]
  return {name: (root / name).read_bytes() for name in sorted(names) if name}


def is_left_out(file: Path) -> bool:
  """Whether a release leaves out this file, or a folder that it is in."""
  whole = [file, *file.parents]
  return any(fnmatch.fnmatch(str(at) if "/" in pattern else at.name, pattern) for at in whole for pattern in LEFT_OUT)


def commit(root: Path = ROOT) -> str:
  """The commit that is checked out; "" without git."""
  if not (root / ".git").exists():
    return ""
  done = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
  return done.stdout.strip()


def write(files: Files, folder: Path, root: Path = ROOT) -> None:
  """Writes the files into a folder. Programs stay executable."""
  for name, content in files.items():
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    if content.startswith(b"#!"):
      path.chmod(0o755)


def tidy(folder: Path) -> bool:
  """Sorts imports and breaks long lines of Python again, as `make format` does. False if ruff is not installed."""
  ruff = [sys.executable, "-m", "ruff"]
  if subprocess.run([*ruff, "--version"], capture_output=True, check=False).returncode:
    return False
  for command in (
    ["check", "--fix", "--no-cache", "--quiet", "--select=I,F401", "."],
    ["format", "--no-cache", "--quiet", "."],
  ):
    subprocess.run([*ruff, *command], cwd=folder, capture_output=True, check=False)
  return True


def text_of(content: bytes) -> str | None:
  """The text of a file; None for a binary one."""
  try:
    return None if b"\0" in content else content.decode()
  except UnicodeDecodeError:
    return None
