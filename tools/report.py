"""Makes the page of a run, or of several runs side by side, from what they wrote into their workdirs.

    python -m tools.report RUN                         # writes RUN/report.html, as the run itself does
    python -m tools.report RUN RUN [--html=FILE]       # compares them, in comparison.html
    python -m tools.report RUN --share                 # leaves out the command, hosts and paths, to pass it on

A page is one file that needs nothing else. Damaged and half-written lines of a run are left out.
"""

import argparse
import sys
from pathlib import Path

from errors import ConfigError
from reporting import report
from reporting.recorded import PAGE, Recorded, for_others, load
from runtime import command_line
from runtime.folders import writable_file
from runtime.storage.bucket import Location, location


def opened(folder: Location) -> Recorded:
  """The run in a workdir. Raises ConfigError if it holds nothing of a run."""
  if not folder.is_dir():
    raise ConfigError(f"RUN={str(folder)!r} is not a folder; give the workdir of a run")
  found = load(folder)
  if not (found.lines or found.events or found.config):
    raise ConfigError(f"RUN={str(folder)!r} holds no metrics.jsonl, journal.jsonl or config.json; give a run's workdir")
  return found


def main(arguments: list[str]) -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("runs", nargs="+", metavar="RUN", help="the workdir of a run")
  parser.add_argument("--html", type=Path, help="the file to write (default: RUN/report.html, or comparison.html)")
  parser.add_argument("--share", action="store_true", help="leave out the command, hosts and the folders of paths")
  options = parser.parse_args(arguments)
  places = [location(run, "RUN") for run in options.runs]
  runs = [opened(folder) for folder in places]
  beside = places[0] / PAGE if isinstance(places[0], Path) else Path(PAGE)  # of a run in a bucket: here
  file = options.html or (beside if len(runs) == 1 else Path("comparison.html"))
  writable_file(file, "html")
  report.write(file, [for_others(run) if options.share else run for run in runs])
  print(f"wrote {file}")


if __name__ == "__main__":
  with command_line.bad_input_ends_the_program():
    main(sys.argv[1:])
