"""Each figure with a unit in README, the guide or a docstring stands in one of three ways. Any other figure fails here.

- A command writes it from a record: a part between `<!-- NAME -->` and `<!-- end -->`. Lessons print their own outputs,
  and tests/tools compare the pages with what they print.
- A test computes it: `COMPUTED` has the sentence, and the value that a record, a formula or the code gives.
- It is cited: its paragraph links to another site.

`observed.json` is a record of lines and sentences of runs whose raw data was not kept: each has the commit and date
that brought it, and what is known of its machine. `SETTINGS` are no measurements: other programs, formats or words
define them.
"""

import ast
import contextlib
import functools
import io
import json
import math
import re
import statistics
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import pytest
from packaging.requirements import Requirement

import data
from checkpointing import interval
from checkpointing.pretrained import export
from configs import base
from data import opening
from data.text import tokenizers
from lab.analysis import memory, predict, search, theory
from lab.analysis.case import Case
from lab.analysis.topology import machine_of
from lab.analysis.weights import weights
from lab.benchmarks import explained, pipeline_schedules
from lab.benchmarks.accelerator import blocks
from lab.benchmarks.pages import RESULTS, ROOT, fill
from lab.benchmarks.predictions import case_on
from models.ops import loss
from reporting import journal, stragglers
from runtime import device_memory, hardware
from runtime.storage import answers, lease
from tools import failures
from training import settings

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LESSONS = re.compile(r"(tour(-.*)?|pmap|debugging)$")  # their blocks of code are what the lessons print

UNIT = (
  r"(?:[mµn]?s|sec|seconds?|minutes?|min|hours?|h|days?|%|[kKMGTP]i?B(?:/s)?|bytes|[MGTP]?FLOPs?(?:/s)?|W|"
  r"(?:tokens|images|examples|batches|steps)(?:/s| a second)|times|×(?! ?[\w(]))"
)
FIGURE = re.compile(rf"(?<![\w.,/=^-])(?<!\w [-−] )\d[\d,]*(?:\.\d+)?(?: |-)?{UNIT}(?![\w^=(])")
GENERATED = re.compile(r"<!-- (?!end)[\w -]+ -->\n.*?<!-- end -->", re.DOTALL)
CODE = re.compile(r"^( *```.*?^ *```)", re.DOTALL | re.MULTILINE)
NEXT = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*|]|\d+\.) )|\n(?=\|)|\n(?=#)")  # another paragraph, item of a list or row


@functools.cache
def docstrings() -> dict[str, list[str]]:
  """The paragraphs of each file's docstrings, without tests, and lessons, whose pages are compared with them."""
  found: dict[str, list[str]] = {}
  documented = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
  for folder in sorted(path for path in ROOT.iterdir() if path.name not in ("tests", "findings")):
    for file in [folder] if folder.suffix == ".py" else sorted(folder.rglob("*.py")) if is_package(folder) else []:
      name = file.relative_to(ROOT).as_posix()
      if not name.startswith("lab/lessons/"):
        nodes = (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, documented))
        found[name] = [part for node in nodes for part in passages(name, ast.get_docstring(node) or "")]
  return found


def is_package(folder: Path) -> bool:
  return folder.is_dir() and not folder.name.startswith(".") and any(folder.glob("*.py"))


def passages(page: str, text: str) -> list[str]:
  """What may stand alone of a page: paragraphs, items, rows of tables, and blocks of code, each on one line.

  Parts that a command writes are left out, and so are the blocks of code of a page of lessons.
  """
  found: list[str] = []
  for place, part in enumerate(CODE.split(GENERATED.sub("\n\n", text))):
    found += NEXT.split(part) if place % 2 == 0 else [] if LESSONS.match(page) else [part]
  return [" ".join(passage.split()) for passage in found if passage.strip()]


def loose(page: str, text: str, held: Sequence[str]) -> list[str]:
  """The figures of a page, each with its passage, that none of the `held` sentences contains and that nobody cites."""
  return loose_in(passages(page, text), held)


def loose_in(parts: Sequence[str], held: Sequence[str]) -> list[str]:
  """`loose` of paragraphs."""
  found = []
  for passage in parts:
    rest = functools.reduce(lambda left, sentence: left.replace(sentence, "…"), sorted(held, key=len)[::-1], passage)
    cited = re.search(r"\]\(https?://", passage)
    found += [] if cited else [f"{figure}: {passage}" for figure in FIGURE.findall(rest)]
  return found


@functools.cache
def record(name: str) -> dict[str, Any]:
  return json.loads((RESULTS / f"{name}.json").read_text())


def share_of_norms() -> float:
  """Of the weights of `lm`, the share of those of norms, rounded up to a hundredth."""
  made = weights(settings.program(base.get_config("lm", "fsdp"), "cpu").sizes)
  share = sum(w.size for w in made if "norm" in w.name) / sum(w.size for w in made)
  return math.ceil(100 * share) / 100


def step(name: str, device: str = "h100-80gb-hbm3") -> dict[str, Any]:
  """What a step of `make accelerator` has measured."""
  return record(f"accelerator-1-nvidia-{device}")["steps"][name]["values"]


def h200(way: str) -> float:
  """The median seconds of a step of `lm_1b` on an H200, run in one of the ways of step `blocks`."""
  return statistics.median(step("blocks", "h200")["ways"][way]["seconds"])


def explain(name: str) -> dict[str, Any]:
  """What `tools.explain` has said of a step of explained.py."""
  return record("explained")["steps"][name]["figures"]


def written(file: str, pattern: str) -> float:
  """The number that a file of code or a test has at a pattern's group, such as 1 << 24 or 0.15."""
  found = re.findall(pattern, (ROOT / file).read_text(), re.MULTILINE)
  assert len(found) == 1, f"{file} has {len(found)} places like {pattern}"
  first, _, second = found[0].replace("_", "").partition(" << ")
  return int(first) << int(second) if second else float(first)


def lm_1b() -> Case:
  return case_on(machine_of("h100:1x1"), base.get_config("lm_1b", "single"))


LOCAL = {"window": 1024, "layers_pattern": "local:5,global:1"}


@functools.cache
def keys_sent(**fields: Any) -> float:
  """GB of keys, values and their gradients that each of 64 v5p sends for 2^20 tokens; a 12B of Gemma 3's shape."""
  asked = base.get_config("lm", "long_context")
  sizes = {"width": 3840, "depth": 48, "heads": 16, "kv_heads": 8, "head_dim": 256, "mlp_width": 15_360}
  asked.model.update(**sizes, vocab_size=262_144, seq_len=1 << 20, remat="full", **fields)
  asked.update_from_flattened_dict({"mesh.data": 1, "mesh.context": 64, "batch_size": 1})
  sent = theory.sent(case_on(machine_of("v5p:4x4x4"), asked))
  return sum(row.bytes for row in sent if row.what.startswith(("local layers", "attention"))) / 1e9


def state_bytes() -> float:
  """Bytes of weights, gradients and the optimizer's state a parameter, as adamw makes them."""
  program = settings.program(base.get_config("lm", "single"), "cpu")
  state = jax.eval_shape(lambda: program.init(jax.random.key(0)))
  size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree) if x.ndim)
  return (2 * size(state.params) + size(state.opt_state)) / sum(x.size for x in jax.tree.leaves(state.params))


def ratio_to_peer() -> float:
  cells = step("throughput")["cells"]
  middle = lambda name: sorted(cells[name]["rounds"][0]["seconds"])[1]
  return middle("peer/sdpa") / middle("single/1")


def share_read() -> float:
  """Of the text's windows, the share that a run of `moe` reads."""
  config = base.get_config("moe", "single")
  return config.steps * config.batch_size / len(data.load(config).parts[0].train)


def tokens_of_throughput() -> float:
  model = base.get_config("throughput_gpu", "single")
  seconds = sorted(step("throughput")["cells"]["single/1"]["rounds"][0]["seconds"])[1]
  return round(model.batch_size * model.model.seq_len / seconds, -3)


def less_than_predicted() -> list[float]:
  return sorted(100 * (1 - case["real"] / case["predicted"]) for case in step("memory")["cases"].values())


def in_bfloat16() -> dict[str, float]:
  (row,) = [row for row in step("parity")["rows"] if row["variant"] == "kernel"]
  return row


def products() -> list[float]:
  peaks = step("throughput")["cells"]["peaks"]
  return sorted(turn["flops"] / 1e12 for turn in [*peaks["before"], *peaks["rounds"]])


def seconds_at_best(case: Case) -> float:
  where = machine_of("h100:1x1")
  return predict.times(case, where.chip, where.links(case.layout.mesh)).seconds


def adapted(name: str, kind: str) -> float:
  """A figure of `tools.explain`, in GB."""
  found = explain(name)
  return (found["time"]["traffic"] if kind == "traffic" else found["memory"][kind]) / 1e9


def memory_of(topology: str) -> float:
  return machine_of(topology).chip.memory


def after_four_failures() -> tuple[str, str]:
  """What a run says that has had four failures in eight hours, and whose saves stop training for two seconds."""
  found = interval.choose(pause=2, written=0, restart=120, running=8 * 3600, failures=4, hosts=1)
  return interval.duration(found.seconds), found.why.partition(";")[0]


def with_quick_starts() -> str:
  """The goodput that `tools.failures` prints for the job of the page, if a start takes two minutes."""
  with contextlib.redirect_stdout(io.StringIO()) as out:
    failures.main(["--devices=16384", "--start=120", "--policies=memory+spares"])
  goodput = re.search(r"^memory\+spares +([\d.]+)%", out.getvalue(), re.MULTILINE)
  assert goodput
  return f"{float(goodput[1]):.1f}%"


def of_70b() -> float:
  """Bytes of a device for the step of 70 billion parameters whose stream is split, from the record of predictions."""
  asked = ["two_d", "h100:16x8", "70B, GQA", 4096, 128, "full", {"mesh.model": 8}]
  return next(one["memory"] for one in record("predictions-gpu")["cases"] if one["case"] == asked)


# Page, sentence, and the values in it. "" stands for all pages.
COMPUTED: list[tuple[str, str, Callable[[], tuple[Any, ...]]]] = [
  ("", "{:.0f} bytes a parameter", lambda: (state_bytes(),)),
  ("README", "trains at {:,.0f} tokens a second, an MFU of {:.1%}, or {:.1%} as PaLM counts",
   lambda: (round(step("language_model", "h200")["tokens_per_second"], -2), step("language_model", "h200")["mfu"],
            step("language_model", "h200")["palm_mfu"])),
  ("README", "losses and gradients of the CPU, up to {:.1e}",
   lambda: (max(max(row["loss"], row["gradient"]) for row in step("parity", "h200")["rows"] if row["bound"] <= 1e-4),)),
  ("README", "was {:.2f} times as fast as transformers' Llama", lambda: (ratio_to_peer(),)),
  ("README", "needed {:.0f}% to {:.0f}% less memory than predicted",
   lambda: (less_than_predicted()[0], less_than_predicted()[-1])),
  ("README", "A run killed {:.0f} times gives",
   lambda: (written("tests/test_resume.py", r'\("fsdp", {}, (\d+), 120\)'),)),
  ("accelerator", "losses differed by {:.2%} and its gradients by {:.1%}",
   lambda: (in_bfloat16()["loss"], in_bfloat16()["gradient"])),
  ("accelerator", "A rounding to bfloat16 is up to {:.1%}", lambda: (2**-8,)),
  ("accelerator", "at most {:.0%} of what the allocator",
   lambda: (written("lab/benchmarks/accelerator/memory.py", r"^SHARE = ([\d.]+)"),)),
  ("accelerator", "JAX's own 75%, {:.2f} GB", lambda: (step("memory")["limit"] / 1e9,)),
  ("accelerator", "[asked for {:.0%}]", lambda: (hardware.GPU_SHARE,)),
  ("accelerator", "memory was {:.1f} GB, and ours {:.1f} GB",
   lambda: (step("throughput")["cells"]["peer/sdpa"]["rounds"][0]["peak_bytes"] / 1e9,
            step("throughput")["cells"]["single/1"]["bytes"]["total"] / 1e9)),
  ("accelerator", "needs {:.1f} GB of disk", lambda: (12 * sum(w.size for w in weights(lm_1b().sizes)) / 1e9,)),
  ("accelerator", "at least {:.1f} ms at the device's peaks and {:.1f} GB",
   lambda: (1e3 * seconds_at_best(lm_1b()), memory.of(lm_1b()).total / 1e9)),
  ("accelerator", "loop over blocks, took {:.1f} ms", lambda: (step("language_model")["step_ms"],)),
  ("accelerator", "was {:.1f} GB ({:.1f} GiB), {:.0%} less than predicted",
   lambda: (step("language_model")["peak_gib"] * 2**30 / 1e9, step("language_model")["peak_gib"],
            1 - step("language_model")["peak_gib"] * 2**30 / memory.of(lm_1b()).total)),
  ("accelerator", "8,192 × 8,192 matrices reached {:.0f} to {:.0f}", lambda: (products()[0], products()[-1])),
  ("accelerator", "× 32,768 tokens = {:.0f} TFLOP", lambda: (6 * 872e6 * 32_768 / 1e12,)),
  ("accelerator", "run at {:.0f} TFLOP/s, which is {:.0%} of the 989",
   lambda: (6 * 872e6 * 32_768 / 1e12 / 0.230, 6 * 872e6 * 32_768 / 0.230 / 989e12)),
  ("accelerator", "40,000 steps take at least {:.0f} minutes",
   lambda: (40_000 * explain("cifar10/h100")["time"]["seconds"] / 60,)),
  ("checkpoints", "renews it every {:.0f} seconds", lambda: (lease.RENEW,)),
  ("checkpoints", "waits up to {:.0f} seconds", lambda: (lease.PATIENCE,)),
  ("checkpoints", "is tried {:.0f} times", lambda: (answers.TRIES,)),
  ("checkpoints", "storage failed, {:.0f} times in a row", lambda: (answers.TRIES,)),
  ("checkpoints", "one in {:.0f} days for a host",
   lambda: (interval.HOURS_OF_A_HOST / 24,)),
  ("cluster", "ends them after {:.0f} s", lambda: (written("tools/launch.py", r"^SECONDS_TO_FOLLOW = ([\d.]+)"),)),
  ("cluster", "more than {:g} times the median", lambda: (stragglers.TIMES,)),
  ("cluster", "to {:.0%}.", lambda: (written("tests/reporting/test_account.py", r"approx\(took, rel=([\d.]+)\)$"),)),
  ("data", "at most {:.0f} MiB of it", lambda: (tokenizers.SAMPLE / 2**20,)),
  ("data", "windows up to {:.0f} GiB", lambda: (opening.WINDOW / 2**30,)),
  ("checkpoints", "interval a checkpoint every {}: {}", lambda: after_four_failures()),
  ("failures", "`memory+spares` reaches {}", lambda: (with_quick_starts(),)),
  ("memory", "{:.2f} GB ({:.2f}, {:.2f}, {:.2f}, {:.2f} GiB)",
   lambda: (memory_of("tpu7x:1x1x1") / 1e9, *(memory_of(f"{kind}:1x1x1" if kind[-1] in "px" else f"{kind}:1x1") / 2**30
            for kind in ("v5e", "v5p", "v6e", "tpu7x")))),
  ("memory", "{:.2f} GB | {:.0%} of what CUDA reports", lambda: (memory_of("gb200:1x4") / 1e9, hardware.GPU_SHARE)),
  ("optimizers", "is within {:.1%} of float32's, and each within {:.0%}. A test checks both",
   lambda: tuple(written("tests/training/test_optimizers.py", rf"exact\[moment\]\)\.{of}\) < ([\d.]+)")
                 for of in (r"mean\(\)\)", r"max\(\)"))),
  ("strategies", "sends {:.1f} times data_parallel's bytes", lambda: ((2 + 4) / (2 + 2),)),
  ("thousand-chips", "instead of (n−1)/n, {:.0%} more with 4 chips", lambda: ((4 + 1) / (4 - 1) - 1,)),
  ("why", "than the {:.0%} of the time that they idle in pairs",
   lambda: (dict(pipeline_schedules.schedules(4, 8, 2))["1f1b"].idle_time(),)),
  ("debugging", "by {:.1%} in bfloat16", lambda: (2**-8,)),
  ("evidence", "**Memory** is within {:.0%} of",
   lambda: (written("tests/lab/analysis/test_predict.py", r"^MEMORY = ([\d.]+)"),)),
  ("evidence", "[{:.0f}% to {:.0f}% lower]", lambda: (less_than_predicted()[0], less_than_predicted()[-1])),
  ("evidence", "**Operations** are within {:.0%}.",
   lambda: (written("tests/lab/analysis/test_predict.py", r'found\["flops"\], rel=([\d.]+)'),)),
  ("explain", "of plans within {:.0%} the simplest first", lambda: (search.ALIKE,)),
  ("memory", "asks for {:.0%} of", lambda: (hardware.GPU_SHARE,)),
  ("memory", "{:.2f} GB of each GPU: {:.0%} of the card, where JAX alone takes 75%; {:.0%} stays for CUDA",
   lambda: (step("memory")["limit"] / 0.75 * hardware.GPU_SHARE / 1e9,
            hardware.GPU_SHARE, 1 - hardware.GPU_SHARE)),
  ("memory", "use to at most {:.0%}", lambda: (device_memory.IN_USE,)),
  ("long-text", "tokens {:.0f} GB of keys, values and their gradients, {:.2f} of what global layers",
   lambda: (keys_sent(**LOCAL), keys_sent(**LOCAL) / keys_sent())),
  ("memory", "takes {:.2f} of the loop's time", lambda: (h200(blocks.UNROLLED) / h200(blocks.LOOP),)),
  ("float8", "is {:.2f} times as fast as in bfloat16", lambda: (h200(blocks.UNROLLED) / h200("float8"),)),
  ("memory", "send ({:.1f} ms exposed, with the loop {:.1f})",
   lambda: (1e3 * explain("unroll/all-8")["time"]["exposed"], 1e3 * explain("unroll/scan-8")["time"]["exposed"])),
  ("memory", "4,096 tokens and 32 heads, {:.1f} GB an example", lambda: (4096**2 * 32 * 4 / 1e9,)),
  ("memory", "logits take {:.0f} MB in float32", lambda: (4096 * 32_000 * 4 / 1e6,)),
  ("memory", "the tokens of {:.0f} MiB of logits", lambda: (4 * loss.LOGITS / 2**20,)),
  ("memory", "take more than {:.0f} MiB", lambda: (4 * loss.LOGITS_OF_GPU / 2**20,)),
  ("memory", "were {:.1f} and {:.1f} GB",
   lambda: (adapted("chunks/scan", "traffic"), adapted("chunks/all", "traffic"))),
  ("optimizers", "Neighbouring numbers differ by {:.1%} to {:.1%}", lambda: (2**-8, 2**-7)),
  ("optimizers", "for one seed, and allows {:.0%}",
   lambda: (written("tests/training/test_bfloat16_weights.py", r'losses\["float32"\], rel=([\d.]+)'),)),
  ("pages", "takes less than {:.0%} of the time since", lambda: (journal.SHARE,)),
  ("pipeline", "the bubble is {:.1%} of the time here",
   lambda: (dict(pipeline_schedules.schedules(4, 8, 2))["zero_bubble"].idle_time(3.0),)),
  ("pretrained", "files of at most {:.0f} GB", lambda: (export.SHARD_BYTES / 1e9,)),
  ("pretrained", "{:,.0f} bytes tokens", lambda: ((ROOT / "LICENSE").stat().st_size,)),
  ("questions", "asks for {:.0%} ([table]", lambda: (hardware.GPU_SHARE,)),
  ("strategies", "takes {:.0f} GB a device instead of {:.0f}",
   lambda: (adapted("stream/whole", "total"), of_70b() / 1e9)),
  ("configs/experiments/language_model.py", "at {:,.0f} tokens a second and needs {:.0f} GiB",
   lambda: (round(step("language_model")["tokens_per_second"], -2), step("language_model")["peak_gib"])),
  ("configs/experiments/throughput.py", "at {:,.0f} tokens a second, {:.2f} times as fast as PyTorch",
   lambda: (tokens_of_throughput(), ratio_to_peer())),
  ("configs/experiments/mixture.py", "300 steps read {:.0%} of the text", lambda: (share_read(),)),
  ("lab/benchmarks/throughput.py", "({:.0f} minutes at most)",
   lambda: (math.ceil(written("lab/benchmarks/throughput.py", r"^CHECKING = ([\d.]+)") / 60),)),
  ("strategies/fsdp.py", "{:.1f} times as many as in data parallelism", lambda: (3 / 2,)),
  ("strategies/fsdp.py", "the norms (under {:.0%} of the bytes)", lambda: (share_of_norms(),)),
  ("strategies/zero1.py", "{:.1f} times as many bytes", lambda: ((2 + 4) / (2 + 2),)),
  ("tour-placing", "f32[16,16], which has {:,.0f} bytes", lambda: (16 * 16 * 4,)),
]  # fmt: skip

# What other programs and formats define, sizes of examples, and words. Page, phrase, and what it is.
SETTINGS = [
  ("accelerator", "JAX's own 75%", "the default of XLA_CLIENT_MEM_FRACTION"),
  ("checkpoints", "often have 64 MB", "Docker's default for /dev/shm"),
  ("choosing-sizes", "needs 6 FLOPs for a token", "a multiplication and an addition, forward and twice backward"),
  ("choosing-sizes", "of its gradient, 6 bytes", "three times two bytes"),
  ("choosing-sizes", "all-reduces the gradient: 4 bytes", "twice two bytes"),
  ("cluster", "often 90 s", "the default lease time of NFS version 4"),
  ("cluster", "by default 5 minutes", "SLURM's SlurmdTimeout"),
  ("cluster", "(30 s)", "SLURM's KillWait"),
  ("cluster", "after about 100 s without", "the default of JAX's coordination service"),
  ("cluster", "counts as lost for 600 s", "the flag in the sentence"),
  ("cluster", "or 10 s with a bucket", "the interval at which a bucket's heartbeat is written"),
  ("data", "prepares 100 MB of", "the size of the text"),
  ("debugging", "at most 1.5 times as far", "a rule"),
  ("evidence", "shorter than 0.1 s", "the shortest of the rows"),
  ("explain", "- 6 FLOPs for each weight", "a multiplication and an addition, forward and twice backward"),
  ("explain", "MFU never exceeds 100%", "a share"),
  ("failures", "## 54 days on", "the run of Llama 3"),
  ("failures", "| 24 hours | assumed", "a default, which the row says"),
  ("float8", "can exceed 100% at best", "a share"),
  ("memory", "JAX takes 75% of", "the default of XLA_CLIENT_MEM_FRACTION"),
  ("optimizers", "3 to 10 times smaller", "a rule of the field"),
  ("optimizers", "takes 4 bytes a weight", "float32"),
  ("optimizers", "with 4 bytes a weight", "float32"),
  ("optimizers", "in bfloat16: 2 bytes each, not 4", "bfloat16"),
  ("profile", "run 4 times a step", "the number of blocks"),
  ("questions", "always takes 75% of", "the default of XLA_CLIENT_MEM_FRACTION"),
  ("why", "The price is 2 bytes a parameter", "bfloat16"),
  ("long-text", "n−1 times", "a count"),
  ("long-text", "a multiple of 2 × `mesh.context`", "a product"),
  ("README", "installs 1.5 GB of packages", "test_readme_says_how_much_make_train_installs compares it"),
  ("checkpointing/interval.py", "may take 0 seconds", "a limit"),
  ("checkpointing/interval.py", "such as 1.5 h", "an example"),
  ("configs/experiments/cifar10.py", "sized for 93% and more", "an aim, which the sentence says"),
  ("data/opening.py", "windows up to 2 GiB, as `zstd --long=31`", "2 to the power of 31"),
  ("data/recognition/verdicts.py", "(1.2 MB)", "an example"),
  ("data/records.py", "a block header of 24 bytes at each 64 KiB", "the format of Riegeli"),
  ("data/text/headers.py", "ids of 4 or 8 bytes", "integers"),
  ("data/text/headers.py", "of 2 or 4 bytes, follow", "integers"),
  ("data/text/headers.py", "A count of 4 bytes", "an integer"),
  ("data/text/megatron.py", "header 9 bytes", "the format of Megatron"),
  ("data/text/ranks.py", "each of the 256 bytes", "all values of a byte"),
  ("lab/analysis/compilers.py", "takes 512 bytes", "a row of a tile, 128 numbers of float32"),
  ("lab/analysis/gpus.py", "a block can have 1 kB less", "what CUDA reserves in a block's shared memory"),
  ("lab/analysis/trace.py", "H100 80GB HBM3", "a name"),
  ("lab/benchmarks/published.py", "does not fit into 80 GB", "the memory of the published run's GPU"),
  ("lab/benchmarks/replica_check.py", "and 1 GB on 2 simulated devices", "the size of the state"),
  ("lab/benchmarks/sizes.py", "20 bytes of each number of the stream", "6 gathers and 4 scatters of two bytes"),
  ("limits.py", "stay below 1 GB", "tests/data/test_limits.py measures the peaks of readers"),
  ("reporting/pages/axes.py", "2 and 5 times powers", "a rule"),
  ("runtime/command_line.py", "wait 300 s", "orbax's default"),
  ("runtime/device_memory.py", "JAX takes 75% of", "the default of XLA_CLIENT_MEM_FRACTION"),
  ("runtime/digests.py", "Those of 8 bytes", "integers"),
]


@functools.cache
def observed() -> list[tuple[str, str]]:
  """Pages and texts of the record of what was observed."""
  return [(run["page"], run["text"]) for run in record("observed")["steps"].values()]


@functools.cache
def computed() -> list[tuple[str, str]]:
  return [(page, sentence.format(*values())) for page, sentence, values in COMPUTED]


def text_of(name: str) -> str:
  return " ".join(
    GENERATED.sub(" ", (ROOT / (f"docs/{name}.md" if name != "README" else "README.md")).read_text()).split()
  )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_figure_is_written_computed_or_cited(page: Path):
  held = [*computed(), *observed(), *((name, phrase) for name, phrase, _ in SETTINGS)]
  found = loose(page.stem, page.read_text(), [text for name, text in held if name in ("", page.stem)])
  assert not found, "\n".join(found)


def test_every_figure_of_a_docstring_is_written_computed_or_cited():
  held = [*computed(), *observed(), *((name, phrase) for name, phrase, _ in SETTINGS)]
  texts_of = lambda name: [text for page, text in held if page in ("", name)]
  found = {name: loose_in(parts, texts_of(name)) for name, parts in docstrings().items()}
  assert len(found) > 200
  assert not {name: figures for name, figures in found.items() if figures}


def test_every_sentence_with_a_figure_is_on_its_page():
  texts = {page.stem: text_of(page.stem) for page in PAGES}
  texts |= {name: "\n".join(parts) for name, parts in docstrings().items()}
  missing = [
    (name, text)
    for name, text in [*computed(), *observed(), *((page, phrase) for page, phrase, _ in SETTINGS)]
    if not any(text in text_there for page, text_there in texts.items() if name in ("", page))
  ]
  assert not missing


def test_the_readme_says_how_much_make_train_installs():
  """1.5 GB with the bytecode that pip writes, which is a seventh; the lists of the packages' files are without it."""
  size = 0
  for line in (ROOT / "requirements.lock").read_text().splitlines():
    if found := re.match(r"([\w.-]+==[^ ;]+ *(?:;[^\\]*)?)", line):
      asked = Requirement(found[0].strip())
      if not asked.marker or asked.marker.evaluate():
        installed = [file.size or 0 for one in metadata.distributions(name=asked.name) for file in one.files or []]
        size += sum(installed)
  assert 0.8 * 1.5e9 < size < 1.5e9


def test_the_pages_show_what_explain_says_of_the_steps():
  made = explained.tables(record("explained"))
  for page, places in explained.PAGES.items():
    assert fill(page.read_text(), {name: made[name] for name in places}) == page.read_text()


@pytest.mark.parametrize(
  "text, found",
  [
    ("It took 3.5 s.", ["3.5 s"]),
    ("It took [3.5 s](other.md).", ["3.5 s"]),
    ("It took 3.5 s ([source](https://x.org)).", []),
    ("Cited ([here](https://x.org)).\n\nIt took 3.5 s.", ["3.5 s"]),
    ("- [a](https://x.org)\n- 12 GB, 7% and 1.2 TFLOP/s", ["12 GB", "7%", "1.2 TFLOP/s"]),
    ("| [a](https://x.org) |\n| 80,800 tokens/s |", ["80,800 tokens/s"]),
    ("<!-- a -->\n3 ms\n<!-- end -->\n4 ms\n<!-- timeline b -->\n5 ms\n<!-- end -->", ["4 ms"]),
    ("```\n267 ms/step\n```", ["267 ms"]),
    ("a held 2 GB and a loose\n2 GB", ["2 GB"]),
    ("a mesh of 4 × 2, 8 devices, step 20 and 2.5×", ["2.5×"]),
  ],
)
def test_a_figure_that_nothing_holds_is_found(text: str, found: list[str]):
  assert [line.partition(": ")[0] for line in loose("a", text, ["a held 2 GB"])] == found
