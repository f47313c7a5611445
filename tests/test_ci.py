"""What `.ci/run` does, with commands that only write down that they were called."""

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "run"
TOOLS = ("bash", "cat", "dirname", "mkdir", "mktemp", "rm", "sort", "tail", "timeout", "tr")
ASKED = "${MESHWRIGHT_SKIPPED:+skips}${MESHWRIGHT_SHARE:+ share $MESHWRIGHT_SHARE}"
WRITES = f'#!/bin/bash\necho "$(basename "$0") $* {ASKED}" >> "$CALLS"\n'
TRAIN = 'for a; do case "$a" in --workdir=*) mkdir -p "${a#*=}"; echo x > "${a#*=}/metrics.jsonl";; esac; done\n'


def called(
  folder: Path,
  user: int = 0,
  apt: int | None = 0,
  browser: int | None = None,
  newest: bool = False,
  installs: bool = True,
) -> tuple[list[str], str]:
  """Runs the script as this user. The numbers are the exit statuses of apt-get and of a browser; None: it is not there.

  With `newest`, python3 is of the oldest stack, and there is a python3.13 too. Without `installs`, make cannot install
  the packages of that one.

  Returns the calls of other commands, and what the script printed.
  """
  bin, repository = folder / "bin", folder / "repository"
  for made in (bin, repository / ".ci", repository / ".venv" / "bin"):
    made.mkdir(parents=True)
  shutil.copy(SCRIPT, repository / ".ci" / "run")
  for name in (*TOOLS, "basename"):
    (bin / name).symlink_to(shutil.which(name))

  def command(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)

  command(bin / "id", f"#!/bin/bash\necho {user}\n")
  command(bin / "make", WRITES + ("" if installs else 'case "$1" in .venv-*) echo "no room"; exit 2;; esac\n'))
  command(bin / "python3", f"#!/bin/bash\nexit {int(newest)}\n")  # says whether it is of the newest stack
  if newest:
    command(bin / "python3.13", f"#!/bin/bash\necho 3.13.1 {bin}/python3.13\n")
  command(repository / ".venv" / "bin" / "python", WRITES + TRAIN)
  if apt is not None:
    command(bin / "apt-get", f"{WRITES}exit {apt}\n")
  if browser is not None:
    command(bin / "chromium", f"#!/bin/bash\nexit {browser}\n")
  environment = {"PATH": str(bin), "HOME": str(folder), "CALLS": str(folder / "calls"), "TMPDIR": str(folder)}
  script = str(repository / ".ci" / "run")
  done = subprocess.run([script], env=environment, capture_output=True, text=True, check=False)
  assert done.returncode == (0 if installs else 1), done.stderr
  return (folder / "calls").read_text().splitlines(), done.stdout


def test_ci_lints_tests_trains_and_lists_what_ran_nowhere(tmp_path: Path):
  calls, _ = called(tmp_path, browser=0)
  assert calls[:3] == ["make .venv/.compilers .venv/.emulators ", "make lint ", "make test-all skips"]
  assert calls[3] == "make upgrade-check STACKS= "
  assert calls[4].startswith("python train.py --config=configs/fsdp.py")
  assert calls[5].startswith("python tests/skips.py ")
  assert len(calls) == 6


def newest_stack(folder: Path) -> str:
  return f"PYTHON={folder}/bin/python3.13 VENV=.venv-3.13"


def assert_begins_with_both_stacks(calls: list[str], python: str) -> None:
  """Checks that one stack is installed and lints, while the other one is installed at any moment."""
  other = f"make .venv-3.13/.compilers .venv-3.13/.emulators {python} "
  assert other in calls[:3]
  assert [call for call in calls[:3] if call != other] == ["make .venv/.compilers .venv/.emulators ", "make lint "]


def test_two_stacks_share_the_further_cases(tmp_path: Path):
  calls, printed = called(tmp_path, browser=0, newest=True)
  python = newest_stack(tmp_path)
  assert_begins_with_both_stacks(calls, python)
  assert calls[3:5] == ["make test-all skips share 1", f"make test-all {python} skips share 2"]
  assert calls[5] == "make upgrade-check STACKS=.venv-3.13 "
  assert len(calls) == 8
  assert "the suite again on the newest stack, with Python 3.13.1" in printed


def test_packages_that_cannot_be_installed_end_ci_with_the_reason(tmp_path: Path):
  calls, printed = called(tmp_path, browser=0, newest=True, installs=False)
  assert_begins_with_both_stacks(calls, newest_stack(tmp_path))
  assert len(calls) == 3
  assert printed == "no room\n"


@pytest.mark.parametrize(
  "machine, installs, says",
  [
    ({}, True, False),
    ({"browser": 1}, True, False),  # a command that only says how to install the browser
    ({"browser": 0}, False, False),
    ({"apt": 100}, True, True),
    ({"apt": None}, False, True),
    ({"user": 1000}, False, True),
  ],
)
def test_ci_installs_a_browser_if_it_can_and_goes_on_without(
  machine: dict[str, int | None], installs: bool, says: bool, tmp_path: Path
):
  calls, printed = called(tmp_path, **machine)
  assert ("apt-get install -y chromium " in calls) == installs
  assert ("could not install Chromium" in printed) == says
  assert "make test-all skips" in calls
