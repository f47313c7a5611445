"""Compiles the steps whose figures the guide quotes from `tools.explain`, and writes their tables.

    python -m tools.benchmark explained                       # all steps (an hour on 2 cores; needs no accelerator)
    python -m tools.benchmark explained --steps=unroll/all    # some of them, separated by commas
    python -m tools.benchmark explained --tables              # writes the tables from the record

A step is a command of `tools.explain`. The record keeps the figures, and a header for each step. The tables are in
docs/memory.md, docs/float8.md and docs/thousand-chips.md; tests/test_figures.py compares sentences with the record.
The compilers: pip install '.[topology]' and '.[gpu-topology]'.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from errors import ConfigError, one_of
from lab.benchmarks import header
from lab.benchmarks.pages import RESULTS, ROOT, fill
from lab.benchmarks.predictions import COMPILER, MODELS
from lab.benchmarks.sections import table
from runtime import command_line

RECORD = RESULTS / "explained.json"
PAGES = {
  ROOT / "docs" / "memory.md": ("unroll", "host"),
  ROOT / "docs" / "float8.md": ("bound",),
  ROOT / "docs" / "thousand-chips.md": ("mixtures", "long"),
}
PUBLISHED = ROOT / "tests" / "checkpointing" / "pretrained" / "published"
ONE, EIGHT = (
  "--config=configs/single.py:lm_1b --topology=h100:1x1",
  "--config=configs/fsdp.py:lm_1b --topology=h100:1x8",
)


def model(name: str) -> str:
  """The flags of a model of predictions.py."""
  return " ".join(f"--config.model.{field}={value}" for field, value in MODELS[name].items())


LLAMA_8B = f"--config=configs/fsdp.py {model('8B, GQA')} --config.model.seq_len=8192"
ON_HOST = "--config.model.remat=offload --config.optimizer.on_host=True"
TEXTS = f"--config=configs/long_context.py --config.model.remat=dots {model('8B, GQA')}"
OF_70B = (
  f"--config=configs/two_d.py --topology=h100:16x8 --config.batch_size=128 --config.mesh.model=8 {model('70B, GQA')}"
)
MIXTURE = "--config=configs/expert_fsdp.py --config.model.seq_len=4096 --config.model.remat=full"
MIXTRAL, QWEN = "Mixtral-8x7B-v0.1", "Qwen3-235B-A22B"


def mixture(name: str, topology: str, data: int, expert: int, batch: int) -> str:
  mesh = f"--config.mesh.data={data} --config.mesh.expert={expert} --config.batch_size={batch}"
  return f"{MIXTURE} --config.init_from={name} {mesh} --topology={topology}"


def texts(topology: str, length: int, batch: int, data: int, context: int) -> str:
  mesh = f"--config.mesh.data={data} --config.mesh.context={context} --config.batch_size={batch}"
  return f"{TEXTS} --config.model.seq_len={length} {mesh} --topology={topology}"


# The flags of tools.explain. A folder of PUBLISHED is named by its last part.
STEPS = {
  "unroll/scan": f"{ONE} --config.model.unroll=scan",
  "unroll/all": f"{ONE} --config.model.unroll=all",
  "unroll/scan-8": f"{EIGHT} --config.batch_size=64 --config.model.unroll=scan",
  "unroll/all-8": f"{EIGHT} --config.batch_size=64 --config.model.unroll=all",
  "chunks/scan": f"{ONE} --config.model.unroll=scan --config.model.loss_chunk=1024",
  "chunks/all": f"{ONE} --config.model.unroll=all --config.model.loss_chunk=1024",
  "float8/lm_1b": f"{ONE} --config.model.unroll=auto --config.model.products=float8",
  "float8/8B-bfloat16": f"{LLAMA_8B} --topology=h100:1x8 --config.batch_size=16 --config.model.remat=full",
  "float8/8B": (
    f"{LLAMA_8B} --topology=h100:1x8 --config.batch_size=16 --config.model.remat=full --config.model.products=float8"
  ),
  "host/h100-full": f"{LLAMA_8B} --topology=h100:1x8 --config.batch_size=8 --config.model.remat=full",
  "host/h100-offload": f"{LLAMA_8B} --topology=h100:1x8 --config.batch_size=8 {ON_HOST}",
  "cifar10/h100": "--config=configs/single.py:cifar10_gpu --topology=h100:1x1",
  "stream/whole": f"{OF_70B} --config.model.seq_len=4096 --config.model.remat=full --config.sequence_parallel=False",
  "mixtures/Mixtral-h100": mixture(MIXTRAL, "h100:8x8", 8, 8, 128),
  "mixtures/Qwen3-h100": mixture(QWEN, "h100:32x8", 8, 32, 512),
  "long/h100": texts("h100:8x8", 1_048_576, 1, 1, 64),
  "long/h100-8": texts("h100:8x8", 131_072, 8, 8, 8),
  "host/v5p-full": f"{LLAMA_8B} --topology=v5p:2x2x2 --config.batch_size=8 --config.model.remat=full",
  "host/v5p-offload": f"{LLAMA_8B} --topology=v5p:2x2x2 --config.batch_size=8 {ON_HOST}",
  "mixtures/Mixtral-v5p": mixture(MIXTRAL, "v5p:4x4x4", 8, 8, 128),
  "mixtures/Qwen3-v5p": mixture(QWEN, "v5p:8x8x8", 16, 32, 1024),
  "long/v5p": texts("v5p:4x4x4", 1_048_576, 1, 1, 64),
}


BINDS = {"compute": "arithmetic", "memory": "memory", "communication": "communication"}  # what binds, in words


def measure(name: str, flags: str) -> dict[str, Any]:
  """Runs `tools.explain` with these flags, and returns the step's entry. Raises ConfigError if it fails."""
  begun, words = header.started(), flags.split()
  folders = [f"--config.init_from={PUBLISHED / word.partition('=')[2]}" for word in words if "init_from=" in word]
  given = [word for word in words if "init_from=" not in word] + folders
  with tempfile.TemporaryDirectory() as at:
    file = Path(at) / "found.json"
    command = [sys.executable, "-m", "tools.explain", *given, f"--json={file}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
      raise ConfigError(f"steps={name!r} cannot be compiled: {(done.stderr or done.stdout).strip().splitlines()[-1]}")
    found = json.loads(file.read_text())
  package = COMPILER["gpu" if "h100" in flags else "tpu"]
  versions = {"jax": metadata.version("jax"), package: metadata.version(package)}
  made = {"command": f"python -m tools.explain {flags}", "machine": f"compiled on {header.host()['machine']}"}
  return made | {"versions": versions} | begun | {"figures": figures(found)}


def figures(found: Mapping[str, Any]) -> dict[str, Any]:
  """What is kept of the JSON of `tools.explain`. `sent` and `theory` are the bytes of a device in a step."""
  sent = {"sent": sum(one["sent_in_step"] for one in found["communication"]),
          "gathered": sum(one["sent_in_step"] for one in found["communication"] if one["kind"] == "all-gather"),
          "theory": sum(one["bytes"] for one in found["theory"]), "excess": len(found["excess"])}  # fmt: skip
  kept = {name: found[name] for name in ("mesh", "device", "batch_size", "memory", "time", "compile_seconds")}
  return kept | sent


def gigabytes(size: float) -> str:
  return f"{size / 1e9:,.1f} GB" if size >= 4e10 else f"{size / 1e9:,.2f} GB"


def milliseconds(seconds: float) -> str:
  return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:,.1f} ms"


def tables(record: Mapping[str, Any]) -> dict[str, str]:
  """The generated parts of the pages, by the names of their places."""
  of = lambda name: record["steps"][name]["figures"]
  made = {}
  rows = []
  for name in ("unroll/scan", "unroll/all", "unroll/scan-8", "unroll/all-8"):
    found, where = of(name), "h100:1x8, `fsdp`, batches of 64" if name.endswith("8") else "h100:1x1"
    predicted = found["memory"]["predicted"]["saved"] + found["memory"]["predicted"]["working"]
    sizes = (found["time"]["traffic"], found["memory"]["temporary"], predicted)
    rows.append((where, f"`{name[7:].partition('-')[0]}`", f"{sizes[0] / 1e9:.1f} GB", *map(gigabytes, sizes[1:])))
  heads = ("`lm_1b`, compiled for", "`model.unroll`", "Read and written in a step", "Temporary memory", "Predicted")
  made["unroll"] = below(heads, rows, record, "unroll")
  rows = []
  for kind, where in (("h100", "h100:1x8"), ("v5p", "v5p:2x2x2")):
    for way, fields in (("full", "`remat=full`"), ("offload", "`remat=offload`, `on_host=True`")):
      memory, time = of(f"host/{kind}-{way}")["memory"], of(f"host/{kind}-{way}")["time"]
      host = (gigabytes(memory["host"]), f"{1e3 * time['host']:,.0f} ms") if memory["host"] else ("", "")
      rows.append((where, fields, gigabytes(memory["total"]), *host, f"{1e3 * time['seconds']:,.0f} ms"))
  heads = ("Devices", "Fields", "Device, by the compiler", "Host", "Link to the host", "Step at best")
  made["host"] = below(heads, rows, record, "host")
  rows = []
  for what, before, after in (
    ("`lm_1b`, one H100, `model.unroll=auto`", "unroll/all", "float8/lm_1b"),
    ("8B, `fsdp` on h100:1x8, 16 texts of 8,192 tokens, remat full", "float8/8B-bfloat16", "float8/8B"),
  ):
    old, new = of(before), of(after)
    times = [found["time"]["seconds"] for found in (old, new)]
    moved = f"{BINDS[new['time']['binds']]}; {beside('read and written', old['time'], new['time'], 'traffic')}"
    moved += f", {beside('sent', old, new, 'sent')}" if new["sent"] else ""
    rows.append((what, *(f"{1e3 * time:,.1f} ms" for time in times), f"{times[1] / times[0]:.2f}", moved))
  made["bound"] = below(
    ("Model, device", "Bound in bfloat16", "In float8", "Ratio", "What binds"), rows, record, "float8"
  )
  rows = []
  for name, shown in (("Mixtral", "Mixtral-8x7B"), ("Qwen3", QWEN)):
    for kind in ("h100", "v5p"):
      found, flags = of(f"mixtures/{name}-{kind}"), STEPS[f"mixtures/{name}-{kind}"]
      rows.append(
        (shown, devices(flags), f"{found['batch_size']:,}", mesh(found), *step(found), BINDS[found["time"]["binds"]])
      )
  columns = ("Memory of a device", "Sent", "Of theory", "Links busy", "Exposed", "A step at best", "MFU at most")
  made["mixtures"] = below(("Model", "Devices", "Sequences", "Mesh", *columns, "Binds"), rows, record, "mixtures")
  rows = []
  for name in ("long/v5p", "long/h100", "long/h100-8"):
    found, length = of(name), int(STEPS[name].partition("seq_len=")[2].split()[0])
    rows.append((devices(STEPS[name]), f"{found['batch_size']} of {length:,} tokens", mesh(found), *step(found)))
  made["long"] = below(("Devices", "Texts", "Mesh", *columns), rows, record, "long")
  return made


def beside(what: str, old: Mapping[str, Any], new: Mapping[str, Any], name: str) -> str:
  return f"{new[name] / 1e9:,.0f} GB {what} (bfloat16: {old[name] / 1e9:,.0f})"


def devices(flags: str) -> str:
  """A topology and the number of its devices."""
  topology = flags.partition("--topology=")[2].split()[0]
  count = 1
  for size in topology.partition(":")[2].split("x"):
    count *= int(size)
  return f"{topology} ({count})"


def mesh(found: Mapping[str, Any]) -> str:
  return " × ".join(f"{axis}={size}" for axis, size in found["mesh"].items() if size > 1)


def step(found: Mapping[str, Any]) -> tuple[str, ...]:
  """Memory, bytes and times of a step, as cells."""
  time = found["time"]
  return (
    f"{found['memory']['total'] / 1e9:.1f} GB", f"{found['sent'] / 1e9:.1f} GB",
    f"{found['sent'] / found['theory']:.2f}",
    milliseconds(time["communication"]), milliseconds(time["exposed"]), f"{time['seconds']:.3g} s",
    f"{time['mfu']:.1%}",
  )  # fmt: skip


def below(heads: Sequence[str], rows: Sequence[tuple[str, ...]], record: Mapping[str, Any], part: str) -> str:
  """A table, and below it what made it."""
  runs = [run for name, run in record["steps"].items() if name.startswith(f"{part}/")]
  dates = " and ".join(sorted({run["date"] for run in runs}))
  jax = " and ".join(sorted({run["versions"]["jax"] for run in runs}))
  command = f"`python -m tools.benchmark explained`; jax {jax}; {dates}."
  return "\n".join([*table(tuple(heads), rows), "", command])


def write(record: Mapping[str, Any]) -> None:
  """Writes the tables into the pages."""
  made = tables(record)
  for page, places in PAGES.items():
    page.write_text(fill(page.read_text(), {name: made[name] for name in places}))


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--tables", action="store_true", help="write the tables from the existing record")
  parser.add_argument("--steps", default="", help="which to compile (default: all)")
  options = parser.parse_args()
  record = json.loads(RECORD.read_text()) if RECORD.exists() else {"kind": "explained", "steps": {}}
  with command_line.bad_input_ends_the_program():
    asked = [one_of("steps", name, list(STEPS)) for name in options.steps.split(",") if name]
    if not options.tables:
      for name in asked or STEPS:
        record["steps"][name] = measure(name, STEPS[name])
        record["steps"] = {step: record["steps"][step] for step in STEPS if step in record["steps"]}
        header.write(RECORD, record)
        print(f"{name}: {record['steps'][name]['figures']['time']['seconds']:.3g} s at best", flush=True)
  write(record)
