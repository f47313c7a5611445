"""docs/questions.md: JAX and this repository say each error text that the page quotes, and each entry leads somewhere.

An entry begins with a bold question. Code in it is what somebody would see and search for, and `...` stands for
anything. `SAYS` has a function for each that makes JAX say it, on every supported version. `CITED` has the source of
texts that only GPUs and TPUs give.
"""

import contextlib
import functools
import math
import re
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import NamedTuple

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import mesh_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from configs import base
from lab.benchmarks.pages import ROOT

PAGE = ROOT / "docs/questions.md"
ISSUES = "https://github.com/"
CITED = {  # texts that no CPU gives: an issue that shows it
  "Ran out of memory in memory space hbm": "erfanzar/EasyDeL/issues/78",
  "This thread has been waiting for ... and may be stuck": "jax-ml/jax/issues/22740",
  "NCCL operation ncclCommInitRank(...) failed": "jax-ml/jax/issues/22747",
  "An NVIDIA GPU may be present on this machine, but a CUDA-enabled jaxlib is not installed": "jax-ml/jax/issues/29068",
  "The TPU is already in use by process with pid": "jax-ml/jax/issues/22070",
}
SAYS: dict[str, Callable[[], object]] = {}
SEVERAL: dict[str, Callable[[], object]] = {}  # said by a job of several processes


class Entry(NamedTuple):
  question: str
  answer: str  # with the links that follow the question

  @property
  def quoted(self) -> list[str]:
    return re.findall(r"`([^`]+)`", self.question)


@functools.cache
def entries() -> list[Entry]:
  found = re.findall(r"^\*\*(.+?)\*\*(.*?)(?=\n\n|\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
  return [Entry(*(" ".join(part.split()) for part in one)) for one in found]


def says(*texts: str, where: dict[str, Callable[[], object]] = SAYS) -> Callable:
  def keep(function: Callable[[], object]) -> Callable[[], object]:
    where.update(dict.fromkeys(texts, function))
    return function

  return keep


def mesh(kind: AxisType = AxisType.Auto, devices: int = 8) -> jax.sharding.Mesh:
  return jax.make_mesh((devices,), ("data",), axis_types=(kind,), devices=jax.devices()[:devices])


def split(x: np.ndarray, *spec: str | None, kind: AxisType = AxisType.Auto) -> jax.Array:
  return jax.device_put(x, NamedSharding(mesh(kind), P(*spec)))


@says("RESOURCE_EXHAUSTED: Out of memory")
def too_large():
  jax.device_put(np.broadcast_to(np.uint8(0), (1 << 50,)))


@says("donated buffers were not usable")
def donated_in_vain():
  jax.jit(lambda x: x[:1], donate_argnums=0).lower(np.ones(3))


@says("Array has been deleted")
def used_after_donation():
  x = jax.device_put(np.ones(3))
  jax.jit(lambda x: x, donate_argnums=0)(x)
  np.asarray(x)


@says("TRACING CACHE MISS")
def another_shape():
  step = jax.jit(lambda x: x)
  with jax.explain_cache_misses(True):
    step.lower(np.ones(3))
    step.lower(np.ones(4))


def moved(between: bool = False) -> jax.stages.Compiled:
  """Moves an array from one sharding to another, also by way of a third."""
  both = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)

  def function(x: jax.Array) -> jax.Array:
    if between:
      x = jax.lax.with_sharding_constraint(x, NamedSharding(both, P("y", "x", None)))
    return jax.lax.with_sharding_constraint(x + 1, NamedSharding(both, P(None, ("x", "y"), None)))

  jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)  # not kept: XLA says it only when it compiles
  placed = NamedSharding(both, P("y", None, "x"))
  return jax.jit(function).lower(jax.ShapeDtypeStruct((8, 16, 16), jnp.float32, sharding=placed)).compile()


says("Involuntary full rematerialization")(moved)


@says("invalid value (nan) encountered")
def not_a_number():
  with jax.debug_nans(True):
    jax.lax.log(np.float32(-1))


@says("device_put_replicated is deprecated")
def replicated():
  jax.device_put_replicated(np.ones(2), jax.devices())


@says("Received incompatible devices for jitted computation")
def two_places():
  jax.jit(lambda x, y: x + y).lower(split(np.ones(8), "data"), jax.device_put(np.ones(8), jax.devices()[0]))


@says("Length of device assignment")
def one_device_for_a_mesh():
  sharding = NamedSharding(mesh(AxisType.Explicit).abstract_mesh, P("data"))
  jax.jit(lambda x: jax.reshard(x, sharding)).lower(np.ones(8))


@says("acts as an assert")
def constrained_under_explicit_axes():
  with jax.set_mesh(mesh(AxisType.Explicit)):
    jax.jit(lambda x: jax.lax.with_sharding_constraint(x, P("data"))).lower(np.ones(8))


@says("axis names that are of type Auto")
def resharded_under_auto_axes():
  with jax.set_mesh(mesh()):
    jax.jit(lambda x: jax.reshard(x, P("data"))).lower(np.ones(8))


@says("Contracting dimensions are sharded and it is ambiguous")
def ambiguous():
  columns, rows = (split(np.ones((8, 8)), *spec, kind=AxisType.Explicit) for spec in ((None, "data"), ("data",)))
  with jax.set_mesh(mesh(AxisType.Explicit)):
    jax.jit(jnp.matmul).lower(columns, rows)


@says("produces an illegally sharded result")
def split_in_two_ways():
  x = split(np.ones((8, 8)), "data", kind=AxisType.Explicit)
  with jax.set_mesh(mesh(AxisType.Explicit)):
    jax.jit(lambda x: x + x.T).lower(x)


@says("to provide output PartitionSpec for the gather indexing")
def looked_up():
  table = split(np.ones((8, 8)), "data", kind=AxisType.Explicit)
  with jax.set_mesh(mesh(AxisType.Explicit)):
    jax.jit(lambda table: table[jnp.array([0, 1])]).lower(table)


@says("implies that array axis ... is partitioned ... times")
def seven_rows():
  split(np.ones(7), "data")


@says("are not evenly divisible")
def seven_rows_by_hand():
  jax.jit(jax.shard_map(lambda x: x, mesh=mesh(), in_specs=P("data"), out_specs=P("data"))).lower(np.ones(7))


@says("does not divide model.heads=")
def three_of_eight_heads():
  helpers.strategy("tensor_parallel", helpers.program(model__heads=8, model__kv_heads=8), devices=3, mesh__model=3)


@says("must be called before any JAX calls")
def initialized_late():
  jax.devices()
  jax.distributed.initialize("127.0.0.1:1", 1, 0)


@says("does not have attribute slice_index")
def no_slices():
  mesh_utils.create_hybrid_device_mesh((4,), (2,), jax.devices())


@says("Unknown backend", "Platforms present are")
def no_gpu():
  jax.devices("gpu")


@says("jax_num_cpu_devices config should be updated before backends are initialized")
def simulated_late():
  jax.devices()
  jax.config.update("jax_num_cpu_devices", 4)


@says("Number of devices ... must")
def too_many():
  jax.make_mesh((4, 4), ("data", "model"))


@says("is not found in mesh")
def another_axis():
  NamedSharding(mesh(), P("model"))


@says("requires a non-empty mesh")
def without_mesh():
  jax.jit(lambda x: jax.lax.with_sharding_constraint(x, P("data"))).lower(np.ones(8))


@says("Found an unbound axis name")
def sum_in_jit():
  jax.jit(lambda x: jax.lax.psum(x, "data")).lower(np.ones(8))


@says("out_specs which require replication")
def unequal_results():
  jax.jit(jax.shard_map(jnp.sum, mesh=mesh(), in_specs=P("data"), out_specs=P())).lower(np.ones(8))


@says("carry input and carry output must have equal types")
def equal_at_first():
  total = lambda x: jax.lax.scan(lambda sum, y: (sum + y, None), 0.0, x)[0][None]
  jax.jit(jax.shard_map(total, mesh=mesh(), in_specs=P("data"), out_specs=P("data"))).lower(np.ones(8, np.float32))


JOB = """
import sys
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
jax.config.update("jax_cpu_collectives_implementation", "gloo")
address, process, wait = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
jax.distributed.initialize(address, 2, process, initialization_timeout=wait)
sharding = NamedSharding(jax.make_mesh((2,), ("data",)), P("data"))
np.asarray(jax.make_array_from_callback((2,), sharding, lambda index: np.ones(2)[index]))
"""


def job(processes: int, wait: int) -> None:
  """Starts some of two processes, each with a device, and shows what they say."""
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{free.getsockname()[1]}"
  started = [
    subprocess.Popen(
      [sys.executable, "-c", JOB, address, str(one), str(wait)], stderr=subprocess.PIPE, text=True,
      env={"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "PATH": ""},
    )
    for one in range(processes)
  ]  # fmt: skip
  print(*(one.communicate(timeout=120)[1] for one in started), file=sys.stderr)


@says("spans non-addressable (non process local) devices", where=SEVERAL)
def read_anywhere():
  job(2, wait=60)


@says("the JAX distributed service detected fatal errors", "DEADLINE_EXCEEDED", where=SEVERAL)
def alone():
  job(1, wait=2)


def said(makes: Callable[[], object], capfd: pytest.CaptureFixture, caplog: pytest.LogCaptureFixture) -> str:
  """Errors, warnings, logs and what is written to standard error, as one line."""
  texts: list[object] = []
  with warnings.catch_warnings(record=True) as warned, contextlib.suppress(Warning):
    warnings.simplefilter("always")
    try:
      makes()
    except Exception as error:
      texts.append(error)
  texts += [*(one.message for one in warned), *caplog.messages, capfd.readouterr().err]
  return " ".join(" ".join(map(str, texts)).split())


@pytest.mark.parametrize("text", [*SAYS, *(pytest.param(text, marks=pytest.mark.full) for text in SEVERAL)])
def test_a_quoted_text_is_what_is_said(text: str, capfd: pytest.CaptureFixture, caplog: pytest.LogCaptureFixture):
  found = said((SAYS | SEVERAL)[text], capfd, caplog)
  assert re.search(".*".join(map(re.escape, re.split(r" ?\.\.\. ?", text))), found), found[:2000]


def test_a_sharding_in_between_moves_pieces_only(capfd: pytest.CaptureFixture, caplog: pytest.LogCaptureFixture):
  """What the page advises against involuntary full rematerialization."""
  program = moved(between=True)
  assert "Involuntary" not in said(lambda: None, capfd, caplog)
  assert "all-gather" not in program.as_text()


def test_every_quoted_text_is_said_by_a_test_or_has_a_source():
  quoted = {text: entry for entry in entries() for text in entry.quoted}
  assert quoted.keys() == SAYS.keys() | SEVERAL.keys() | CITED.keys()
  for text, source in CITED.items():
    assert f"({ISSUES}{source})" in quoted[text].answer


def test_each_of_fifty_questions_leads_to_a_page():
  assert len(entries()) >= 50
  for entry in entries():
    assert re.search(r"\]\((?!https:)", entry.answer), entry.question


def test_the_commands_and_fields_of_the_answers_exist():
  fields = base.get_config().to_dict()
  code = re.findall(r"`([^`]+)`", " ".join(one.answer for one in entries()))
  for tool in re.findall(r"python -m ([\w.]+)", " ".join(code)):
    assert (ROOT / f"{tool.replace('.', '/')}.py").exists(), tool
  for config in re.findall(r"--config=(\S+)", " ".join(code)):
    assert (ROOT / config).exists(), config
  named = [name for one in code for name in re.findall(r"^(?:--config\.)?(\w+\.\w+)(?:=|$)|--config\.(\w+\.\w+)", one)]
  for section, field in (("".join(pair)).split(".") for pair in named):
    if isinstance(fields.get(section), dict) and section != "mesh":
      assert field in fields[section], f"{section}.{field}"
  assert len(named) > 15


# What people asked in public, in their words, and the heading or the entry that must answer it.
ASKED = """\
flax 3701, jax 19893 | weights run out of memory while they are initialized | Weights run out of memory
flax 5172 | can the optimizer's state have other shards than the weights | Can the optimizer's state
optax 548 | create the optimizer's state sharded | How do I create the optimizer's state
orbax 648 | open a checkpoint on another number of devices | Open a checkpoint on another number
maxtext 1760 | resume the data with another number of hosts | Resume the data with another
jax 3088 | last evaluation batch does not divide | The last evaluation batch
transformers 19494 | mean of my devices' masked means wrong | Is the mean of my devices' masked means
jax 3970, 36886 | my gradient in shard_map is wrong by the number of devices | My gradient in shard_map
optax 528, torchtitan 292 | gradient accumulation memory, does each part communicate | Gradient accumulation
jax 15924 | step compiles twice after weights were loaded | My step compiles twice
jax 9237 | donated buffers were not usable | `donated buffers
jax 30095, 34811 | Explicit or Auto axes | Explicit or Auto axes
jax 18591, xla 15207 | involuntary full rematerialization which line | `Involuntary full
jax 21232, 40232 | random numbers depend on the sharding | Do random numbers
torchtitan 593, flax 1755 | bfloat16 losses differ between layouts and runs | How much may losses differ
EasyLM 65 | how large should tensor parallelism be | Which strategy, and how large
jax 37769, 13021 | which mesh axis crosses slices | Multi-slice
jax 38503 | a process is alive and stuck | Training hangs forever
jax 3638, 2926 | instead of pmap | What is right instead of pmap
optax 472, openpi 286 | out of memory | Out of memory
jax 10969 | multi gpu randomly hangs forever | Training hangs forever
openpi 607 | global size of its dimension 0 should be divisible | `implies that array axis
jax 11357 | gpu memory slowly increases out of memory | Memory slowly increases
bmpc-jax 2 | always uses 75% of gpu memory | JAX always takes 75%
EasyLM 42 | difference between FSDP and model parallelism | FSDP or tensor (model) parallelism
orbax 1110 | warning sharding info not provided restore | Open a checkpoint on another number
orbax 683 | load checkpoint on a single cpu | Open a checkpoint on another number
maxtext 1602 | arithmetic intensity of sharding strategies | How large must the batch be
maxtext 752 | 1F1B pipeline parallelism in jax | Pipeline parallelism in JAX
orbax 211 | save checkpoint gets stuck | Saving a checkpoint gets stuck
flax 900 | write checkpoints asynchronously | Saving a checkpoint gets stuck
jax 6887 | xla_force_host_platform_device_count does not work | Simulated CPU devices
jax 5155 | simulate several hosts on one machine | How do I start a multi-host
jax 16788, maxtext 865 | slurm process sees only one gpu | Under SLURM
axlearn 1329 | each process loads part of the data make_array_from_process_local_data | Per-host data loading
jax 2777 | slow compile unrolled loop | Compiling is slow
flax 4342 | fsdp nnx optimizer state example | How do I create the optimizer's state
algorithmic-efficiency 797 | shard optimizer state across devices to save memory | Can the optimizer's state
maxtext 623 | unexpected collective-permute sharding mismatch | An unexpected all-gather
jax 4274 | how to detect recompilation reason | The step recompiles
jax 3163 | compiles twice in loop python integer weak type | The step recompiles
jax 15412 | recompile different shapes of input | The step recompiles
numpyro 463 | compilation happens twice weak types | My step compiles twice
jax 802 | jit is fast but printing takes a minute | My timings are too good
jax 1219 | why is the first call slow | My timings are too good
flax 2417 | batch norm mean across devices different batch sizes | Batch norm over several devices
jax 4823 | same code two runs varied results | How much may losses differ
jax 26946 | constraint silently replicated not divisible | `implies that array axis
jax 12417 | jax.checkpoint policies | Gradient checkpointing
flax 5205 | embedding lookup out_sharding explicit | `Contracting dimensions
jax 18165 | bfloat16 results do not match | How much may losses differ
"""
QUESTIONS = [tuple(part.strip() for part in line.split("|")) for line in ASKED.splitlines()]


def stems(text: str) -> list[str]:
  """The words of a text, as far as their forms have them in common: "compiles", "compile" and "compilation"."""
  return [re.sub(r"(ing|ation|ed|es|s|e|ly)$", "", word) for word in re.findall(r"[a-z0-9_]+", text.lower())]


@functools.cache
def places() -> list[tuple[str, set[str]]]:
  """What a search finds: each section of README and docs by its heading, each entry of this page by its question."""
  found = [(entry.question, set(stems(f"{entry.question} {entry.answer}"))) for entry in entries()]
  for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
    if page != PAGE:
      sections = re.split(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
      found += [
        (title, set(stems(f"{title} {text}"))) for title, text in zip(sections[1::2], sections[2::2], strict=True)
      ]
  return found


def search(question: str) -> list[str]:
  """The places by the question's words that they have. A word counts the more, the fewer places have it."""
  asked = {word for word in stems(question) if any(word in words for _, words in places())}
  rare = {word: math.log(len(places()) / sum(word in words for _, words in places())) for word in asked}
  score = lambda words: sum(rare[word] for word in asked & words) / len(words) ** 0.1  # of two, the shorter
  return [name for name, words in sorted(places(), key=lambda place: -score(place[1]))]


@pytest.mark.parametrize(("thread", "question", "place"), QUESTIONS, ids=[one[0] for one in QUESTIONS])
def test_a_question_that_was_asked_is_answered_in_one_search(thread: str, question: str, place: str):
  found = search(question)[:3]
  assert any(name.startswith(place) for name in found), found


def test_fifty_questions_were_asked():
  assert len(QUESTIONS) >= 50
  assert sum(search(question)[0].startswith(place) for _, question, place in QUESTIONS) > 35  # found first


def test_the_lines_of_a_run_are_in_its_code():
  """Those of the table below, but for what the system says."""
  code = ["errors.py", "limits.py", "train.py"]
  folders = ("checkpointing", "data", "job", "reporting", "runtime", "strategies", "training")
  code += [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
  text = " ".join((ROOT / file).read_text() for file in code)
  joined = " ".join(re.sub(r'"\s*(#.*)?\n\s*f?"', "", text).split())
  system = {"Permission denied", "Read-only file system", "No space left on device", "Disk quota exceeded"}
  rows = re.findall(r"^\| (.*?) \| [–\d]+ \|", PAGE.read_text().partition("## What a run says")[2], re.MULTILINE)
  parts = [
    part.strip() for row in rows for one in re.findall(r"`(.*?)`", row) for part in re.split(r"\.\.\.|[(),;=]", one)
  ]
  assert len(rows) > 12
  assert not [part for part in parts if part not in joined and part not in system]
