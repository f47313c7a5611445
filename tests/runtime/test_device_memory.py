"""How much of a device a program may use: the share of a GPU that runs ask for, and the error if it is too little."""

import contextlib
import ctypes
import json
import os
import re
import types
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import config, one_sentence, program, strategy

import train
from checkpointing import restore
from lab.analysis import gpus
from lab.analysis.topology import TPUS
from reporting import summary
from runtime import device_memory, fitting, hardware
from runtime.device_memory import SETTINGS

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "lab/benchmarks/results" / "accelerator-1-nvidia-h100-80gb-hbm3.json"
H100 = "NVIDIA H100 80GB HBM3"
SHARES = SETTINGS[:2]


class Driver:
  """NVML as CUDA's driver has it, on a machine with these cards: (kind, GB in use, cut into parts)."""

  def __init__(self, *cards: tuple[str, float | None, bool]):
    self.cards, self.open = cards, 0

  def nvmlInit_v2(self) -> int:
    self.open += 1
    return 0

  def nvmlShutdown(self) -> int:
    self.open -= 1
    return 0

  def nvmlDeviceGetCount_v2(self, count) -> int:
    count._obj.value = len(self.cards)
    return 0

  def nvmlDeviceGetHandleByIndex_v2(self, index, handle) -> int:
    if index.value >= len(self.cards):
      return 2  # invalid argument
    handle._obj.value = index.value + 1
    return 0

  def nvmlDeviceGetHandleByUUID(self, name: bytes, handle) -> int:
    return self.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name[-1:])), handle) if name[:4] == b"GPU-" else 6

  def nvmlDeviceGetName(self, handle, name, length) -> int:
    name.value = self.cards[handle.value - 1][0].encode()
    return 0

  def nvmlDeviceGetMemoryInfo(self, handle, usage) -> int:
    used = self.cards[handle.value - 1][1]
    if used is None:
      return 3  # not supported, as where the card has no memory of its own
    usage._obj.total, usage._obj.used = 85_520_809_984, int(1e9 * used)
    return 0

  def nvmlDeviceGetMigMode(self, handle, now, later) -> int:
    now._obj.value = self.cards[handle.value - 1][2]
    return 0


FREE, BUSY, CUT, LAPTOP = (H100, 0.6, False), (H100, 5, False), (H100, 0.6, True), ("NVIDIA GeForce RTX 4060", 0, False)


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
  """No setting of this machine counts, JAX has not started, and what is set here is forgotten."""
  for name in (*SETTINGS, "CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY"):
    monkeypatch.setenv(name, "")
    monkeypatch.delenv(name)
  monkeypatch.setattr(device_memory.xla_bridge, "backends_are_initialized", lambda: False)
  with contextlib.ExitStack() as after:
    after.callback(jax.config.update, "jax_cuda_visible_devices", "all")
    after.callback(jax.config.update, "jax_pjrt_client_create_options", jax.config.jax_pjrt_client_create_options)
    yield monkeypatch


def share(patch: pytest.MonkeyPatch, *cards: tuple[str, float, bool]) -> str | None:
  """What `ask` sets on a machine with these cards."""
  driver = Driver(*cards)
  patch.setattr(ctypes, "CDLL", lambda name: driver)
  device_memory.ask()
  assert driver.open == 0
  return os.environ.get("XLA_CLIENT_MEM_FRACTION")


@pytest.mark.parametrize(
  "cards, visible, own, asks",
  [
    ([FREE], None, "all", True),
    ([FREE] * 8, None, "all", True),
    ([BUSY], None, "all", False),  # a desktop, or another run
    ([CUT], None, "all", False),  # MIG: a part's memory is not that of the card
    ([(H100, None, False)], None, "all", False),
    ([LAPTOP], None, "all", False),  # 10% of a small card would be too little for the rest
    ([FREE, BUSY], None, "all", False),
    ([FREE, BUSY], "0", "all", True),  # another user's card
    ([BUSY, FREE], "0,1", "1", True),  # one process for each card: the first one has started
    ([BUSY, FREE], "1,0", "0", True),  # JAX counts those that are visible
    ([FREE, BUSY], "GPU-0", "all", True),
    ([FREE, BUSY], "GPU-1", "all", False),
    ([FREE], "MIG-0", "all", False),
    ([FREE], "", "all", False),  # no card at all
    ([FREE], "7", "all", False),
    ([FREE], "0", "3", False),
    ([], None, "all", False),
  ],
)
def test_a_larger_share_is_asked_for_on_known_cards_that_nobody_uses(
  cards: list, visible: str | None, own: str, asks: bool, clean: pytest.MonkeyPatch
):
  if visible is not None:
    clean.setenv("CUDA_VISIBLE_DEVICES", visible)
  jax.config.update("jax_cuda_visible_devices", own)
  assert share(clean, *cards) == ("0.9" if asks else None)


@pytest.mark.parametrize(
  "name, value",
  [(name, value) for name, value in zip(SETTINGS, ("0.5", "0.5", "false", "platform"), strict=True)]
  + [
    ("XLA_FLAGS", "--xla_gpu_memory_fraction_policy=0.5 --xla_dump_to=x"),  # newer versions of JAX
    ("CUDA_MPS_PIPE_DIRECTORY", "/tmp/mps"),
    ("jax_pjrt_client_create_options", "memory_fraction:0.5"),
  ],
)
def test_a_users_own_setting_stays(name: str, value: str, clean: pytest.MonkeyPatch):
  if name.startswith("jax"):
    jax.config.update(name, value)
  else:
    clean.setenv(name, value)
  before = dict(os.environ)
  share(clean, FREE)
  assert dict(os.environ) == before
  assert device_memory.chosen() == f"{name}={value.split()[0]}"
  card = device(63_763_906_560)
  assert device_memory.described([card]) == f"63.76 GB of each GPU, as {name}={value.split()[0]} says"


@pytest.mark.parametrize(
  "given, parts",
  [
    ({SHARES[0]: "abc"}, ("XLA_CLIENT_MEM_FRACTION=abc", "could not convert", "unset it")),
    ({SHARES[0]: "0.5", SHARES[1]: "0.5"}, ("XLA_CLIENT_MEM_FRACTION=0.5", SHARES[1], "unset it")),
    ({SETTINGS[3]: "pool"}, ("XLA_PYTHON_CLIENT_ALLOCATOR=pool", "bfc", "unset it")),
    ({SHARES[0]: "90"}, ("XLA_CLIENT_MEM_FRACTION=90 is not a share", "such as 0.9")),
    ({SHARES[1]: "0"}, ("XLA_PYTHON_CLIENT_MEM_FRACTION=0 is not a share", "such as 0.9")),
  ],
)
def test_a_setting_that_jax_cannot_use_is_refused(given: dict, parts: tuple, clean: pytest.MonkeyPatch):
  """JAX logs it and computes on the CPU."""
  for name, value in given.items():
    clean.setenv(name, value)
  with one_sentence(*parts):
    share(clean, FREE)


def test_a_share_beyond_the_card_is_valid_with_the_hosts_memory(clean: pytest.MonkeyPatch):
  clean.setenv(SHARES[0], "4.0")
  clean.setenv("TF_FORCE_UNIFIED_MEMORY", "1")
  assert share(clean, FREE) == "4.0"


def test_nothing_is_asked_for_after_jax_has_started_or_without_a_driver(clean: pytest.MonkeyPatch):
  missing = lambda name: (_ for _ in ()).throw(OSError(name))
  clean.setattr(ctypes, "CDLL", missing)
  device_memory.ask()
  assert "XLA_CLIENT_MEM_FRACTION" not in os.environ
  clean.setattr(device_memory.xla_bridge, "backends_are_initialized", lambda: True)
  assert share(clean, FREE) is None


def test_the_share_and_its_reason_are_in_a_line(clean: pytest.MonkeyPatch):
  card = device(76_516_687_872)
  assert share(clean, FREE) == "0.9"
  assert device_memory.described([card]) == (
    "76.52 GB of each GPU: 90% of the card, where JAX alone takes 75%; 10% stays for CUDA, NCCL and others (set "
    "XLA_CLIENT_MEM_FRACTION to change that)"
  )
  clean.delenv("XLA_CLIENT_MEM_FRACTION")
  assert device_memory.described([card]).endswith("not known here (set XLA_CLIENT_MEM_FRACTION=0.9 for more)")
  assert device_memory.described(jax.devices()) == ""


def device(limit: int | None, kind: str = H100, process: int = 0, there: bool = True) -> types.SimpleNamespace:
  """A device whose backend says that programs may use `limit` bytes."""

  def stats() -> dict | None:
    if not there:
      raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: MemoryStats is only supported for addressable PjRt devices.")
    return None if limit is None else {"bytes_limit": limit, "bytes_in_use": 0}

  return types.SimpleNamespace(device_kind=kind, memory_stats=stats, process_index=process, platform="gpu")


def test_memory_is_what_the_backend_says_or_else_the_tables():
  part = f"{H100} MIG 1g.10gb"
  table = hardware.chip(H100).memory
  for devices, expected in (
    ([device(7_851_737_088, part)], 7_851_737_088),
    ([device(60), device(50), device(40, process=1)], 50),  # those of another process cannot be asked
    ([device(None)], table),  # the allocator `platform` has no limit
    ([device(1, there=False)], table),  # to compile for
    ([device(None, part)], None),
    (jax.devices(), None),
  ):
    assert hardware.usable_memory(devices) == expected


def test_the_table_says_of_an_h100_what_was_measured():
  """JAX's own 75% of the card were 63.76 GB there. The table is for all H100s, of which some have a little less."""
  hardware_found = json.loads(RECORD.read_text())["steps"]["throughput"]["values"]["hardware"]
  assert hardware_found["device_memory_bytes"] == 63_763_906_560
  real = 63_763_906_560 / 0.75 * 0.9
  assert 0.998 * real < hardware.chip(H100).memory <= real
  assert hardware.chip(H100).memory < 79.97e9  # lm_1b with 36 examples, by the compiler


@pytest.mark.parametrize(
  "kind, reported",
  [
    ("NVIDIA A100-SXM4-40GB", 42_298_834_944), ("NVIDIA A100-SXM4-80GB", 85_100_068_864), (H100, 84_942_979_072),
    ("NVIDIA H100 PCIe", 84_942_979_072), ("NVIDIA H200", 151_397_597_184), ("NVIDIA B200", 191_514_411_008),
    ("NVIDIA GB200", 197_897_748_480),
  ],
)  # fmt: skip
def test_a_run_may_use_nine_tenths_of_what_cuda_reports(kind: str, reported: int):
  """The bytes in XLA's target configurations. Other cards of a kind have up to 1% less, so the table has, too."""
  assert 0.99 * 0.9 * reported < hardware.chip(kind).memory < 0.9 * reported


def test_the_guide_has_the_numbers_of_the_table():
  page, found = (ROOT / "docs" / "memory.md").read_text(), []
  for kinds, sizes in re.findall(r"^\| [TG]PUs: (.*?) \| ([\d., ]+) GB", page, re.MULTILINE):
    found += zip(re.findall(r"\w+", kinds), sizes.split(", "), strict=True)
  assert dict(found).keys() == {*TPUS, *gpus.TARGETS}
  for kind, size in found:
    known = hardware.chip(TPUS.get(kind) or gpus.TARGETS[kind].kind)
    assert float(size) == round(known.memory / 1e9, 2), kind


OTHER = "RESOURCE_EXHAUSTED: Received message larger than max (5000000 vs. 4194304)"  # of processes to one another


@pytest.mark.parametrize("part", ["set_up", "loop"])
@pytest.mark.parametrize("kind", ["gpu", "cpu"])
def test_a_run_that_needs_too_much_memory_says_so_in_a_sentence(
  part: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
  """The error is that of XLA's allocator, for 64 TiB: while the state is made, or in the loop."""
  entered = lambda *names: types.SimpleNamespace(**dict.fromkeys(names, contextlib.nullcontext()))
  keeper, reporter = entered("requests", "tier", "checkpoints"), entered("journal", "writer", "profiler")
  asked = config(batch_size=16)
  run = types.SimpleNamespace(keeper=keeper, reporter=reporter, config=asked)
  fails = lambda *_: jax.device_put(np.broadcast_to(np.uint8(0), (2**46,))).block_until_ready()
  monkeypatch.setattr(train, "announce", lambda *_: None)
  if part == "loop":
    monkeypatch.setattr(train, "set_up", lambda *_: run)
    monkeypatch.setattr(train, "loop", fails)
  else:
    monkeypatch.setattr(restore, "begin", fails)
  if kind == "gpu":
    monkeypatch.setattr(hardware, "usable_memory", lambda devices: 76_516_687_872)
  has = ["the 76.52 GB of a device's memory"] if kind == "gpu" else ["does not fit into memory ("]
  what, fix = ("batch_size=16", "use model") if part == "loop" else ("the state of strategy='single'", "use a strategy")
  with one_sentence(what, *has, f"allocating 70368744177664 bytes); {fix}", "tools.explain"):
    train.train(asked, tmp_path / "run")


GPU = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 85899345920 bytes."
TPU = (
  "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 20.51G of 15.75G "
  "hbm. Exceeded hbm capacity by 4.76G.\n\nTotal hbm usage >= 20.76G:\n    reserved 263.00M"
)


@pytest.mark.parametrize("message, platform", [(GPU, "gpu"), (TPU, "tpu")])
@pytest.mark.parametrize("tools", [pytest.param(True, marks=pytest.mark.full), False])
def test_a_run_without_enough_memory_ends_with_what_would_fit(
  message: str, platform: str, tools: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
  capsys: pytest.CaptureFixture,
):  # fmt: skip
  """The status says that another start would fail, too. Without the commands there is the sentence alone."""

  def fails(*_: object) -> None:
    raise jax.errors.JaxRuntimeError(message)

  if not tools:
    monkeypatch.setattr(fitting, "PROGRAM", "no_such_folder.explain")
  flags = ["--config=configs/data_parallel.py:tiny", f"--workdir={tmp_path}", "--config.batch_size=64"]
  monkeypatch.setattr("sys.argv", ["train.py", *flags])
  monkeypatch.chdir(ROOT)
  asked = config("data_parallel", batch_size=64)
  card = types.SimpleNamespace(platform=platform)
  given = config("data_parallel", batch_size=64, model__vocab_size=256)
  asked.model.vocab_size = 0  # which the data said
  monkeypatch.setattr(hardware, "usable_memory", lambda _: 3e6)

  def runs(*_: object) -> None:
    with device_memory.in_words(given, [card] * 8):
      fails()

  monkeypatch.setattr(train, "train", runs)
  with pytest.raises(SystemExit) as ended:
    train.main(asked, tmp_path)
  assert ended.value.code == 2
  first, *more = capsys.readouterr().err.splitlines()
  assert first.startswith("error: batch_size=64 does not fit into the 0.00 GB of a device's memory")
  assert message.splitlines()[0].rstrip(".") in first
  if not tools:
    assert more == []
    return
  assert "MB in all, and a program may use 3.00 MB" in more[1]
  assert len([line for line in more if "It would fit with" in line]) == 3
  rest = "--config=configs/data_parallel.py:tiny --config.batch_size=64 --config.model.vocab_size=256"
  assert more[-1] == f"python -m tools.explain --fit={platform}:8:3000000 {rest}"


def test_the_workdir_is_no_flag_of_explain():
  card = types.SimpleNamespace(platform="gpu")
  error = device_memory.TooLittle("", config(), [card], 1e9)
  for given in (["--workdir=x y"], ["--workdir", "x y"], ["-workdir", "--config"], []):
    assert fitting.arguments(error, config(), ["--config=a", *given, "--b=c"]) == [
      "--fit=gpu:1:1000000000", "--config=a", "--b=c",
    ]  # fmt: skip


def test_other_errors_are_not_about_memory():
  for message in (OTHER, "INTERNAL: a collective failed"):
    with pytest.raises(jax.errors.JaxRuntimeError), device_memory.in_words(config(), jax.devices()):
      raise jax.errors.JaxRuntimeError(message)
  for message in (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (512.00G) exceeds "
    "available HBM (15.75G).",
    "RESOURCE_EXHAUSTED: Error allocating device buffer: Attempting to allocate 1.00G. That was not possible.",
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 85899345920 bytes.",
    "RESOURCE_EXHAUSTED: Used 20.5M of 16.0M vmem.",
  ):
    assert device_memory.is_too_little(jax.errors.JaxRuntimeError(message))


def test_a_run_says_at_its_start_how_much_memory_it_may_use(clean: pytest.MonkeyPatch):
  """Only on GPUs: elsewhere nothing is said, because nothing was asked for."""
  runner = strategy("single", program(), devices=1)
  about = lambda devices: summary.about(devices, "single", runner, types.SimpleNamespace(description="text"))
  clean.setenv("XLA_CLIENT_MEM_FRACTION", "0.5")
  assert "memory    42.51 GB of each GPU, as XLA_CLIENT_MEM_FRACTION=0.5 says" in summary.start_lines(
    about([device(42_509_271_040)])
  )
  assert set(about(jax.devices())) == {"devices", "strategy", "attention", "data"}
