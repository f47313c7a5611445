"""Measures how fast texts are written, beside the library `transformers`, and writes a table of docs/pretrained.md.

    python -m tools.benchmark generation            # measures (minutes), writes the record and the table
    python -m tools.benchmark generation --tables   # writes the table from the existing record

The peer needs `pip install '.[peer]'`, or `--peer-python=` with a Python that has PyTorch and `transformers`.

Two Llama models with random weights are written as model folders, which both sides read. Each side has a process that
stays alive, and the two take turns. generation_worker.py writes ours, peer_generation.py theirs. First, both write each
batch of texts once. That compiles, and shows that both write the same. In its turn a side writes the texts twice, and
the second time counts. Otherwise PyTorch's threads would still spin while ours begin, for up to 8 ms, and threads that
have slept begin on a single core.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from errors import ConfigError, positive
from lab.benchmarks.figures import Figure
from lab.benchmarks.header import host, source, started
from lab.benchmarks.pages import RESULTS, ROOT, keep
from lab.benchmarks.peer_generation import CACHES
from lab.benchmarks.rounds import environment
from lab.benchmarks.sections import table
from runtime import command_line

RECORD, PAGE = RESULTS / "generation.json", ROOT / "docs" / "pretrained.md"
PROMPT, LENGTH = 256, 64  # tokens of the longest prompt, and tokens to write
SHORTER = 8  # tokens by which each prompt of a batch is shorter than the one before
BATCHES = (1, 8)
MODELS = {
  "10 M": {"width": 256, "depth": 8, "heads": 4, "kv_heads": 4, "mlp_width": 704, "vocab_size": 8192},
  "100 M": {
    "width": 768, "depth": 12, "heads": 12, "kv_heads": 4, "mlp_width": 2048, "vocab_size": 32000,
    "tied_embedding": True,
  },
}  # fmt: skip
AIM = 1.5  # the peer's time, over ours
LOGITS = 1e-4  # differences of logits, relative to the largest: rounding of float32, as in tests/pretrained
MEASURES = {"prefill": "prefill", "decode": "each further token"}

Record = dict[str, Any]
Ask = Callable[[dict[str, Any]], dict[str, Any]]


@contextlib.contextmanager
def process(command: Sequence[str]) -> Iterator[Ask]:
  """A process that answers requests (peer_generation.serve), as a function. Raises ConfigError if it cannot."""
  try:
    started = subprocess.Popen(
      command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT,
      env=environment(),
    )  # fmt: skip
  except OSError as error:
    raise ConfigError(f"{command[0]!r} cannot be started ({error.strerror}); name a Python") from error

  def ask(request: dict[str, Any]) -> dict[str, Any]:
    assert started.stdin
    assert started.stdout
    answer = ""
    with contextlib.suppress(BrokenPipeError):
      started.stdin.write(json.dumps(request) + "\n")
      started.stdin.flush()
      answer = started.stdout.readline()
    found = json.loads(answer) if answer else {"error": f"{command[0]} ended with exit status {started.wait()}"}
    if "error" in found:
      raise ConfigError(f"{request['task']}: {found['error']}")
    return found

  try:
    yield ask
  finally:
    started.communicate()  # closes its standard input, which ends it


def prompts(vocabulary: int, batch: int) -> list[list[int]]:
  """Random prompts, each shorter than the one before."""
  rng = np.random.default_rng(0)
  return [rng.integers(0, vocabulary, PROMPT - SHORTER * row).tolist() for row in range(batch)]


def measure(rounds: int, ours: Ask, theirs: Ask, folder: Path, say: Callable[[str], None]) -> Record:
  """Measures all cases and returns the record."""
  begun, described, models, cases = started(), host(), {}, {}
  for model, fields in MODELS.items():
    path = str(folder / model.replace(" ", ""))
    models[model] = {"fields": fields, **ours({"task": "make", "model": fields, "folder": path})}
    for batch in BATCHES:
      given = {"folder": path, "prompts": prompts(fields["vocab_size"], batch), "length": LENGTH}
      cases[f"{model}/{batch}"] = compared(given, ours, theirs)
      say(f"warm-up    {model}/{batch}: both sides wrote the texts")
    described["versions"] |= theirs({"task": "logits", **given})["versions"]
  for turn in range(rounds):
    for name, case in cases.items():
      order = list(case["seconds"])
      start = turn % len(order)
      for side in order[start:] + order[:start]:
        asked(side, case["given"], ours, theirs)  # not counted: it wakes the threads and fills the processor's caches
        found = asked(side, case["given"], ours, theirs)
        case["seconds"][side].append({measure: found[measure] for measure in MEASURES})
      shown = ", ".join(f"{side} {1e3 * times[-1]['decode']:.2f} ms" for side, times in case["seconds"].items())
      say(f"round {turn + 1}/{rounds}  {name:<8} {shown}")
  for case in cases.values():
    del case["given"]
  return {
    "command": f"python -m tools.benchmark generation --rounds={rounds}",
    **described,
    **begun,
    "prompt": PROMPT,
    "shorter": SHORTER,
    "length": LENGTH,
    "models": models,
    "cases": cases,
  }


def asked(side: str, given: dict[str, Any], ours: Ask, theirs: Ask) -> dict[str, Any]:
  """Texts written by a side: "ours", or the peer with one of its caches."""
  return ours({"task": "write"} | given) if side == "ours" else theirs({"task": "write", "cache": side} | given)


def compared(given: dict[str, Any], ours: Ask, theirs: Ask) -> Record:
  """A case without its seconds: both sides write its texts, and differ by rounding alone. Else raises ConfigError."""
  sides = ("ours", *CACHES)
  texts = {side: asked(side, given, ours, theirs)["tokens"] for side in sides}
  a, b = (np.array(ask({"task": "logits"} | given)["logits"]) for ask in (ours, theirs))
  difference = float(np.max(np.abs(a - b)) / np.max(np.abs(b)))
  if not difference < LOGITS:
    raise ConfigError(f"the sides' first logits differ by {difference:.0e} of the largest; they run different models")
  equal = sum(all(texts[side][row] == text for side in CACHES) for row, text in enumerate(texts["ours"]))
  return {"given": given, "equal": equal, "difference": difference, "seconds": {side: [] for side in sides}}


def seconds(record: Record, case: str, side: str, measure: str) -> list[float]:
  """What a side took in each round."""
  return [turn[measure] for turn in record["cases"][case]["seconds"][side]]


def fastest(record: Record, case: str, measure: str) -> str:
  """The peer's faster cache."""
  return min(CACHES, key=lambda side: Figure.of(seconds(record, case, side, measure)).median)


def ratio(record: Record, case: str, measure: str) -> Figure:
  """The peer's time over ours, in each round."""
  theirs = seconds(record, case, fastest(record, case, measure), measure)
  return Figure.of(b / a for a, b in zip(seconds(record, case, "ours", measure), theirs, strict=True))


def tables(record: Record) -> dict[str, str]:
  """The generated part of docs/pretrained.md."""
  heads = ("Model", "Texts", "Measured", "Meshwright", "transformers", "its cache", "Speed, transformers = 1")
  rows, missed = [], []
  for case in record["cases"]:
    model, batch = case.split("/")
    for measure, label in MEASURES.items():
      peer, found = fastest(record, case, measure), ratio(record, case, measure)
      shown = [f"{1e3 * Figure.of(seconds(record, case, side, measure)).median:,.1f} ms" for side in ("ours", peer)]
      rows.append((model, batch, label, *shown, peer, found.show(".2f")))
      if round(found.median, 2) < AIM:
        missed.append(f"{model}, {batch} {'text' if batch == '1' else 'texts'}, {label}: {found.median:.2f}")
  equal = sum(case["equal"] for case in record["cases"].values())
  count = sum(int(case.split("/")[1]) for case in record["cases"])
  worst = max(case["difference"] for case in record["cases"].values())
  sizes = " and ".join(f"{model['parameters'] / 1e6:.1f} M" for model in record["models"].values())
  parts = [
    "\n".join(table(heads, rows)),
    f"The aim is {AIM:g} times. " + (f"Missed: {'; '.join(missed)}." if missed else "It is met."),
    f"Llama models of {sizes} parameters with random weights, in float32. The longest prompt has {record['prompt']} "
    f"tokens, each other one {record['shorter']} fewer than the one before, and {record['length']} tokens are written. "
    f"Both sides wrote the same tokens in {equal} of {count} texts, and their first logits differ by at most "
    f"{worst:.0e} of the largest.",
    f"{source(record)} Load of the machine before the run: {record['load']:.1f}.",
  ]
  return {"speed": "\n\n".join(parts)}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
  """The options of the command. Raises ConfigError for bad values."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--tables", action="store_true", help="write the table from the existing record")
  parser.add_argument("--rounds", type=int, default=9, help="each writes every batch of texts once (default: 9)")
  parser.add_argument("--peer-python", default=sys.executable, metavar="PATH", help="a Python with the peer")
  parser.add_argument("--record", type=Path, metavar="FILE", help="write the record there, and no table")
  options = parser.parse_args(arguments)
  positive("rounds", options.rounds)
  return options


def measure_in_processes(options: argparse.Namespace) -> Record:
  """`measure` with a process for each side."""
  # -P keeps this folder off sys.path, so that its modules cannot shadow the peer's imports.
  peer = (options.peer_python, "-P", str(Path(__file__).with_name("peer_generation.py")))
  with (
    tempfile.TemporaryDirectory() as folder,
    process((sys.executable, "-m", "lab.benchmarks.generation_worker")) as ours,
    process(peer) as theirs,
  ):
    return measure(options.rounds, ours, theirs, Path(folder), lambda line: print(line, flush=True))


def main() -> None:
  with command_line.bad_input_ends_the_program():
    options = parse(sys.argv[1:])
    keep(options, PAGE, RECORD, lambda: measure_in_processes(options), tables)
