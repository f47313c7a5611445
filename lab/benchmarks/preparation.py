"""Measures what it costs to prepare a text, and to read from it, and writes a table of docs/data.md.

    python -m tools.benchmark preparation --size=10e9   # measures (up to an hour), writes the record and the table
    python -m tools.benchmark preparation --tables      # writes the table from the existing record

The text is Python's standard library, repeated until it has the size. It needs a disk with room for three times the
size, in --folder. Each part runs in a fresh process. Memory is read from /proc, so this needs Linux.
"""

import argparse
import dataclasses
import functools
import gzip
import itertools
import shutil
import statistics
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from errors import ConfigError
from lab.benchmarks import rounds
from lab.benchmarks.header import host, source, started
from lab.benchmarks.pages import RESULTS, ROOT, keep
from lab.benchmarks.sections import megabytes, table
from runtime import command_line

RECORD, PAGE = RESULTS / "preparation.json", ROOT / "docs" / "data.md"
WORKER = (sys.executable, "-m", "lab.benchmarks.preparation_worker")
SMALLEST, SMALL = 1e6, 100  # the least size; memory is compared with that of a text so many times smaller
BATCHES, STEPS = 2000, 20  # to read, and steps to time
LIMIT = 12 * 3600.0  # seconds that a process may take

Record = dict[str, Any]
Task = Callable[[str, dict[str, Any]], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class SourceText:
  """A text to prepare: the name of its file, the size if no option gives it, and the fields of the config."""

  label: str
  file: str
  size: float
  fields: dict[str, Any] = dataclasses.field(default_factory=dict)


# By the names of the options that give their sizes.
CASES = {
  "size": SourceText("bytes", "corpus.txt", 10e9),
  "bpe_size": SourceText("BPE", "corpus.txt", 1e9, {"data.tokenizer": "bpe", "model.vocab_size": 4096}),
  "gz_size": SourceText("bytes, from .txt.gz", "corpus.txt.gz", 1e9),
}


def write_text(file: Path, size: float) -> int:
  """Writes a text of at least this size, and returns its size. Every copy of a file has a first line of its own.

  Both sizes are in bytes, before compression.
  """
  written, pieces = 0, library()
  with gzip.open(file, "wb", compresslevel=1) if file.suffix == ".gz" else file.open("wb") as out:
    for copy in itertools.count():
      for name, content in pieces:
        written += out.write(f"# copy {copy} of {name}\n".encode() + content)
        if written >= size:
          return written
  raise AssertionError("endless")


def library() -> list[tuple[str, bytes]]:
  """The names and contents of the standard library's files, as far as they are UTF-8."""
  root, found = Path(sysconfig.get_path("stdlib")), []
  for file in sorted(root.rglob("*.py")):
    content = file.read_bytes()
    try:
      content.decode()
    except UnicodeDecodeError:
      continue
    if "site-packages" not in file.parts:
      found.append((file.relative_to(root).as_posix(), content))
  return found


def measure(sizes: dict[str, float], folder: str | None, say: Callable[[str], None], run: rounds.Run) -> Record:
  """Measures all parts and returns the record. All files are in `folder`, and are removed from there."""

  def task(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    result = run(WORKER, {"task": name} | spec)
    if "error" in result:
      raise ConfigError(f"the task {name!r} failed ({result['error']}); nothing was recorded")
    say(f"  {name}: " + ", ".join(f"{key} {value}" for key, value in result.items() if not isinstance(value, list)))
    return result

  begun, texts = started(), {}
  wanted = {"small": sizes["size"] / SMALL} | sizes
  for name, size in wanted.items():
    say(f"{name}: {size:.3g} bytes")
    case = CASES.get(name, CASES["size"])
    with tempfile.TemporaryDirectory(dir=folder) as at:
      texts[name] = measure_text(case, size, Path(at), task, reads=case is CASES["size"])
  with tempfile.TemporaryDirectory(dir=folder) as at:
    step = task("step", {"fields": {"data.cache_dir": at, "compilation_cache_dir": ""}, "steps": STEPS, "batches": 200})
  given = " ".join(f"--{name.replace('_', '-')}={size:g}" for name, size in sizes.items())
  return {
    "kind": "preparation",
    "command": f"python -m tools.benchmark preparation {given}",
    **host(),
    **begun,
    "batches": BATCHES,
    "texts": texts,
    "step": step,
  }


def measure_text(case: SourceText, size: float, at: Path, task: Task, reads: bool) -> dict[str, Any]:
  """Prepares a text, loads it a second time, and reads batches from it if `reads`."""
  text, cache = at / case.file, at / "cache"
  found: dict[str, Any] = {"bytes": write_text(text, size)}
  fields = {"data.path": str(text), "data.cache_dir": str(cache)} | case.fields
  found["first"] = task("load", {"fields": fields})
  found["second"] = task("load", {"fields": fields})
  found["cache_bytes"] = sum(file.stat().st_size for file in cache.rglob("*") if file.is_file())
  return found | ({"read": task("read", {"fields": fields, "batches": BATCHES})} if reads else {})


def tables(record: Record) -> dict[str, str]:
  """The generated part of docs/data.md."""
  prepared = []
  for name, case in CASES.items():
    found = record["texts"][name]
    first, second = found["first"], found["second"]
    prepared.append((
      f"{_size(found['bytes'])}, {case.label}", f"{first['seconds']:,.1f} s",
      f"{found['bytes'] / first['seconds'] / 1e6:,.1f} MB/s", megabytes(first["peak_bytes"]),
      megabytes(first["before_bytes"]), f"{second['seconds']:.2f} s", _size(found["cache_bytes"]),
    ))  # fmt: skip
  reading = []
  for name in ("small", "size"):
    found = record["texts"][name]
    read = found["read"]
    reading.append((
      _size(found["bytes"]), megabytes(read["before_bytes"]), megabytes(read["after_bytes"]),
      f"{read['seconds'] / record['batches'] * 1e3:.2f} ms",
    ))  # fmt: skip
  step, batch = (statistics.median(record["step"][name]) for name in ("step_seconds", "read_seconds"))
  heads = ("Text", "Preparation", "Speed", "Peak memory", "Before", "Second start", "On disk")
  after = f"Memory after {record['batches']:,} batches"
  parts = [
    "\n".join(table(heads, prepared)),
    "\n".join(table(("Text", "Memory before reading", after, "Time for a batch"), reading)),
    f"At the default sizes, a training step takes {step * 1e3:.1f} ms on one device. Reading its batch takes "
    f"{batch * 1e3:.2f} ms, {batch / step:.2%} of that, in another thread.",
    source(record),
  ]
  return {"preparation": "\n\n".join(parts)}


def _size(count: float) -> str:
  return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
  """The options of the command. Raises ConfigError for bad values."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--tables", action="store_true", help="write the table from the existing record")
  for name, case in CASES.items():
    text = f"bytes of the text to prepare ({case.label}; default: {case.size:g})"
    parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=case.size, help=text)
  parser.add_argument("--folder", help="for the texts (default: the system's temporary folder)")
  parser.add_argument("--record", type=Path, metavar="FILE", help="write the record there, and no table")
  options = parser.parse_args(arguments)
  options.sizes = {name: getattr(options, name) for name in CASES}
  for name, size in options.sizes.items():
    if not SMALLEST <= size < float("inf"):
      raise ConfigError(f"{name}={size:g} must be a finite number of bytes, at least {SMALLEST:g}")
  return options


def check_room(options: argparse.Namespace) -> None:
  """Raises ConfigError unless the disk has room for the largest text and for what is made of it."""
  folder, needed = options.folder or tempfile.gettempdir(), 3 * max(options.sizes.values())
  free = shutil.disk_usage(folder).free
  if free < needed:
    raise ConfigError(
      f"folder={folder!r} has {_size(free)} free, but {_size(needed)} are needed; use another folder or a smaller size"
    )


def main() -> None:
  with command_line.bad_input_ends_the_program():
    options = parse(sys.argv[1:])
    if not options.tables:
      check_room(options)
    run = functools.partial(rounds.run, limit=LIMIT)
    say = lambda line: print(line, flush=True)
    keep(options, PAGE, RECORD, lambda: measure(options.sizes, options.folder, say, run), tables)
