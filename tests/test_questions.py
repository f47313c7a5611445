"""docs/questions.md: JAX and this repository say each error text that the page quotes, and each entry leads somewhere.

An entry begins with a bold question. Code in it is what somebody would see and search for, and `...` stands for
anything. `SAYS` has a function for each that makes JAX say it, on every supported version. `CITED` has the source of
texts that only GPUs and TPUs give.
"""

import contextlib
import functools
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


# What people asked in public (word for word where it is an error text), each with a part of the entry's question.
ASKED = """\
weights run out of memory while they are initialized | can the optimizer's state have other shards than the weights
create the optimizer's state sharded | checkpoint on another number of devices
resume the data with another number of hosts | last evaluation batch does not divide
mean of my devices' masked means wrong | my gradient in shard_map is wrong by the number of devices
does each part communicate, what memory | compiles twice after weights were loaded | donated buffers were not usable
Explicit or Auto axes | Involuntary full rematerialization: which line | random numbers depend on the sharding
how much may losses differ between layouts and runs | how large should tensor parallelism be
which mesh axis crosses slices | a process is alive and stuck, deadlock | instead of pmap | out of memory
"""


def test_the_twenty_questions_are_found_by_their_words():
  """The entry that shares most words with what is asked shares nearly all of them."""
  known = [set(re.findall(r"[\w']+", f"{one.question} {one.answer}".lower())) for one in entries()]
  questions = [one.strip() for line in ASKED.splitlines() for one in line.split("|")]
  assert len(questions) == 20
  for question in questions:
    words = set(re.findall(r"[\w']+", question.lower()))
    best = max(len(words & entry) / len(words) for entry in known)
    assert best >= 0.8, (question, best)
