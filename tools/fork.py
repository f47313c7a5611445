"""Copies this repository into a new folder, as the beginning of a repository of your own under another name.

    python -m tools.fork FOLDER/NAME                         # the same tree; the last part of the path is its name
    python -m tools.fork FOLDER/NAME --package               # all code in one package: python -m NAME.train
    python -m tools.fork FOLDER/NAME --keep=text,fsdp        # only these features and strategies (forking/features.py)

The new name takes the place of this one everywhere: in pyproject.toml, cache folders, metrics, environment variables
and docs. FORK.md says what it was made from, and docs/fork.md how to take updates.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from errors import ConfigError
from runtime import command_line
from tools.forking import naming, packaging, slimming, tree
from tools.forking.tree import Files

# What only this repository can use: what its commands were called before.
OWN = ("benchmarks.py", "tests/test_old_names.py")
OF_MOVING = ("tests/tools/test_fork.py", "tests/tools/test_fork_run.py")  # a package does not move again


def fork(files: Files, name: str, package: bool = False, keep: Sequence[str] = ()) -> Files:
  """The files of a fork with this name."""
  naming.check(name, files)
  if package and f"{naming.project(files)}/__init__.py" in files:
    raise ConfigError(f"--package: {naming.project(files)} is one package already; leave out --package")
  left_out = OWN + OF_MOVING * package
  files = {path: content for path, content in files.items() if path not in left_out}
  files = slimming.slim(files, keep) if keep else files
  files = naming.renamed(files, name)
  return packaging.packaged(files, name) if package else files


def origin(files: Files, arguments: str) -> str:
  """FORK.md: what a fork was made from, and how."""
  name = naming.forms(naming.project(files))["title"]
  at = f", commit {commit}" if (commit := tree.commit()) else ""
  version = naming.project(files, "version")
  return (
    f"# Where this comes from\n\nA fork of {name} {version}{at}, made by:\n\n"
    f"```\npython -m tools.fork {arguments}\n```\n\n"
    "To take an update, make the fork again from the newer version and merge that (docs/fork.md, Taking updates).\n"
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("where", type=Path, metavar="FOLDER/NAME", help="a new folder; its name is the fork's")
  parser.add_argument("--package", action="store_true", help="move all code into one package of that name")
  parser.add_argument(
    "--keep", default=None, metavar="NAME,...", help="leave out all features and strategies but these"
  )
  options = parser.parse_args()
  with command_line.bad_input_ends_the_program():
    where = options.where.expanduser().absolute()
    if where.exists() and (not where.is_dir() or any(where.iterdir())):
      raise ConfigError(f"{str(options.where)!r} is not an empty folder; name a new one")
    if where.resolve().is_relative_to(tree.ROOT.resolve()):
      raise ConfigError(f"{str(options.where)!r} is within this repository; name a folder beside it, such as ../acme")
    keep = [name.strip() for name in (options.keep or "").split(",") if name.strip()]
    if options.keep is not None and not keep:
      raise ConfigError("--keep= names nothing; name what to keep, such as --keep=text,fsdp, or leave it out")
    files = tree.read()
    made = fork(files, where.name, options.package, keep)
    made["FORK.md"] = origin(
      files, f"FOLDER/{where.name}{' --package' * options.package}{f' --keep={options.keep}' * bool(options.keep)}"
    ).encode()
    tree.write(made, where)
    if (options.package or options.keep) and not tree.tidy(where):
      print("note: ruff is not installed, so imports are not sorted; `make format` does that", file=sys.stderr)
    run = f"python -m {where.name}.train" if options.package else "python train.py"
    configs = f"{where.name}/configs" if options.package else "configs"
    names = [f"{configs}/{name}.py" for name in ("fsdp", *keep, "single")]
    config = next(name for name in names if name in made)
    print(f"{len(made):,} files in {options.where}. Train there: {run} --config={config}")


if __name__ == "__main__":
  main()
