"""`make accelerator`, without an accelerator: its steps at small sizes on the CPU, records, page and exit status."""

import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers import config, one_sentence, relative_difference
from machines import GPUS, Machine

from configs import base
from errors import ConfigError
from lab.benchmarks import pages
from lab.benchmarks.accelerator import (
  attention,
  blocks,
  cifar10,
  command,
  language_model,
  memory,
  page,
  parity,
  record,
  steps,
  throughput,
  training,
)
from lab.benchmarks.accelerator.step import Aim, Measurement, Verdict, Where, largest
from models.ops import context, halo
from models.ops.attention import blockwise, plain
from runtime import hardware
from training import settings

FOUND = {
  "hardware": GPUS["hardware"] | {"devices": 1, "kind": "NVIDIA H200", "device_memory_bytes": 10**11},
  "versions": {"python": "3", "jax": "0"},
}


def where(folder: Path = Path("/none"), seconds: float = 500, **fields: Any) -> Where:
  return Where(FOUND["hardware"] | fields, FOUND["versions"], folder, sys.executable, time.monotonic() + seconds)


# The command


@pytest.mark.full
def test_without_an_accelerator_it_says_so_before_anything_else_and_fails():
  program = [sys.executable, "-m", "tools.benchmark", "accelerator", "--step=parity"]
  done = subprocess.run(program, capture_output=True, text=True, cwd=pages.ROOT, env=os.environ | {"XLA_FLAGS": ""})
  assert done.returncode == 1
  assert done.stdout == ""
  (line,) = done.stderr.strip().splitlines()
  assert line.startswith("error: no accelerator: JAX looked for GPUs and TPUs and found only the CPU; ")


def test_an_accelerator_that_cannot_be_used_is_none():
  with pytest.raises(command.NoAccelerator, match=r"failed \(no driver\)"):
    command.machine(lambda *_: {"error": "no driver"})
  assert command.machine(lambda *_: FOUND) == FOUND


@pytest.mark.parametrize(
  "arguments, parts",
  [
    (["--step=party"], ["step='party'", "did you mean 'parity'"]),
    (["--peer-python=/no/python"], ["peer-python='/no/python'", "PyTorch"]),
  ],
)
def test_a_mistake_on_the_command_line_is_one_sentence(arguments: list[str], parts: list[str]):
  with one_sentence(*parts):
    command.parse(arguments)


def test_list_shows_every_step(capsys: pytest.CaptureFixture[str]):
  assert command.main(["--list"]) == 0
  shown = capsys.readouterr().out
  for step in steps.STEPS.values():
    assert f"{step.name} (at most 540 s)\n  {step.about}\n" in shown


ROW = {"strategy": "fsdp", "variant": "text", "against": parity.ONE, "bound": 1e-5}
PARITY = {"steps": 20, "rows": [ROW | {"loss": 0.0, "gradient": 0.0, "parameter": "w"}]}
NETWORK = {
  "preset": "lm_1b", "device": "NVIDIA H200", "batch_size": 16, "steps": 60, "tokens_per_second": 1e5, "step_ms": 330.0,
  "all_step_ms": [320.0, 330.0], "data_wait": 0.001, "mfu": 0.55, "palm_mfu": 0.59, "peak_gib": 51.0, "loss": 6.0,
}  # fmt: skip


def run_with(results: dict[str, Any], folder: Path, *arguments: str, found: dict[str, Any] = FOUND) -> bool:
  """Runs the command on a machine whose steps give these results; a step that is not named fails."""
  to = folder / "page.md"
  if not to.exists():
    to.write_text(page.PAGE.read_text())
  run = lambda name, *_: results.get(name, {"error": "out of order"})
  return command.run_all(command.parse(list(arguments)), found, run, folder, to)


def test_steps_run_apart_and_keep_each_others_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
  assert run_with({"parity": {"values": PARITY}}, tmp_path, "--step=parity")
  assert run_with({"language_model": {"values": NETWORK}}, tmp_path, "--step=language_model")
  (made,) = record.read(tmp_path)
  assert (tmp_path / "accelerator-1-nvidia-h200.json").exists()
  assert {name: entry["values"] for name, entry in made["steps"].items()} == {
    "parity": PARITY, "language_model": NETWORK,
  }  # fmt: skip
  assert made["steps"]["parity"]["command"] == "python -m tools.benchmark accelerator --step=parity"
  shown = capsys.readouterr().out
  assert "parity: holds" in shown
  missed = "language_model: aim missed: MFU 59.0% as PaLM counts, of 60% on an NVIDIA H200"
  assert missed in shown  # an aim is not a promise


def test_a_step_that_fails_fails_the_command_and_the_others_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
  wrong = PARITY | {"rows": [PARITY["rows"][0] | {"gradient": 2e-5}]}
  assert not run_with({"parity": {"values": wrong}, "language_model": {"values": NETWORK}}, tmp_path)
  (made,) = record.read(tmp_path)
  assert {name for name, entry in made["steps"].items() if "error" in entry} == set(steps.STEPS) - {
    "parity", "language_model",
  }  # fmt: skip
  shown = capsys.readouterr().out
  assert "parity: fails: text, fsdp against one device: the gradients of w differ by 2.0e-05, more than 1e-05" in shown
  assert "failed: parity, blocks, throughput, attention, memory, cifar10\n" in shown


def test_an_error_does_not_replace_what_was_measured(tmp_path: Path):
  assert run_with({"parity": {"values": PARITY}}, tmp_path, "--step=parity")
  assert not run_with({}, tmp_path, "--step=parity,attention")
  (made,) = record.read(tmp_path)
  assert made["steps"]["parity"]["values"] == PARITY
  assert made["steps"]["attention"]["error"] == "out of order"


def test_a_step_that_the_platform_lacks_is_left_out_and_fails_if_asked_for(
  tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
  tpu = FOUND | {"hardware": FOUND["hardware"] | {"platform": "tpu"}}
  good = {name: {"values": PARITY} for name in ("parity",)}
  run_with(good, tmp_path, found=tpu)
  assert "throughput: left out; it needs gpu, and this machine has tpu" in capsys.readouterr().out
  assert "throughput" not in record.read(tmp_path)[0]["steps"]
  assert run_with(good, tmp_path, "--step=parity", found=tpu)
  assert not run_with(good, tmp_path, "--step=parity,throughput", found=tpu)


# The process of a step


def of(script: str, *arguments: str) -> list[str]:
  return [sys.executable, "-S", "-c", script, *arguments]


def alive(pid: int) -> bool:
  """Whether a process runs; a process that has ended but was not waited for does not."""
  try:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
  except FileNotFoundError:
    return False


@pytest.mark.full
def test_a_step_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path: Path):
  child = "import time; time.sleep(600)"
  script = (
    "import os, subprocess, sys, time\n"
    f"child = subprocess.Popen([sys.executable, '-S', '-c', {child!r}])\n"
    "open(sys.argv[1], 'w').write(f'{os.getpid()} {child.pid}')\n"
    "child.wait()"
  )
  file = tmp_path / "pids"
  assert steps.run("parity", FOUND, "python", 3.0, of(script, str(file))) == {
    "error": "not finished after 3 s, the limit of a step"
  }
  pids = [int(pid) for pid in file.read_text().split()]
  assert len(pids) == 2
  assert not any(map(alive, pids))


def test_a_step_gets_its_specification_and_returns_its_result():
  script = (
    "import json, sys; spec = json.load(sys.stdin); open(spec['result'], 'w').write(json.dumps({'values': spec}))"
  )
  spec = steps.run("parity", FOUND, "mine", 60.0, of(script))["values"]
  assert spec == {"step": "parity", "limit": 60.0, "result": spec["result"], "peer_python": "mine", **FOUND}
  assert steps.run("parity", FOUND, "mine", 60.0, of("raise SystemExit(7)")) == {
    "error": "its process ended with exit status 7"
  }


def test_what_a_step_raises_is_its_error(capsys: pytest.CaptureFixture[str]):
  def step(measure: Callable[[Where], Any]) -> dict[str, Measurement]:
    return {"parity": dataclasses.replace(parity.STEP, measure=measure)}

  def fails(error: Exception) -> Callable[[Where], Any]:
    def measure(here: Where) -> Any:
      raise error

    return measure

  spec = {"step": "parity", "limit": 100, "peer_python": "mine", **FOUND}
  assert steps.measure(spec, step(fails(ConfigError("no data")))) == {"error": "no data"}
  assert capsys.readouterr().err == ""
  assert steps.measure(spec, step(fails(ValueError("wrong\nat length")))) == {"error": "wrong"}
  assert "Traceback" in capsys.readouterr().err
  got = steps.measure(spec, step(lambda here: {"left": here.left(), "devices": here.devices}))["values"]
  assert 90 < got["left"] <= 100
  assert got["devices"] == 1


def test_a_step_without_time_starts_nothing():
  assert where(seconds=10).run(["/no/such/program"], {}) == {"error": "the step had no time left for it"}
  assert "cannot be started" in where(seconds=100).run(["/no/such/program"], {})["error"]


# parity


@pytest.mark.full
def test_strategies_on_eight_devices_equal_one_device():
  devices = jax.devices()
  rows = parity.compare_all(devices, devices[7], names=["fsdp", "pipeline"], variants=["text"])
  assert [(row["strategy"], row["against"]) for row in rows] == [
    ("single", parity.CPU), ("fsdp", parity.ONE), ("pipeline", parity.ONE),
  ]  # fmt: skip
  assert parity.judge({"rows": rows}) == Verdict()
  assert rows[0]["loss"] == rows[0]["gradient"] == 0  # the same device, under another number
  for row in rows[1:]:  # sums in another order, so not zero: both runs are real
    assert 0 < row["loss"] < parity.BETWEEN_STRATEGIES
    assert 0 < row["gradient"] < parity.BETWEEN_STRATEGIES
  count, *differences = parity.row({"rows": rows})
  assert count == "2"
  assert differences[:2] == ["0.0e+00", "0.0e+00"]


@pytest.mark.full
def test_a_small_change_of_the_weights_is_found():
  single, start = parity.train("single", "text", jax.devices()[:1])
  changed = dataclasses.replace(start, params=jax.tree.map(lambda x: x * 1.0003, start.params))
  other, _ = parity.train("single", "text", jax.devices()[:1], changed)
  made = parity.compare(other, single)
  assert made["gradient"] == pytest.approx(
    max(relative_difference(other[1][name], single[1][name]) for name in single[1])
  )
  verdict = parity.judge({"rows": [ROW | made]})
  assert len(verdict.broken) == 2
  assert f"the gradients of {made['parameter']} differ" in verdict.broken[1]


@pytest.mark.full
def test_what_does_not_fit_or_fails_does_not_pass():
  names = ["tensor_parallel", "fsdp"]  # 3 devices divide neither 16 heads nor a width of 64
  rows = parity.compare_all(jax.devices()[:3], jax.devices()[0], names=names, variants=["text"])
  assert "model.heads=16" in rows[1]["left_out"]
  assert parity.judge({"rows": rows[:2]}).broken == ("no strategy could be compared",)
  assert parity.row({"rows": rows[:2]})[0] == "0; left out: tensor_parallel"
  assert parity.judge({"rows": rows}).broken == ()
  assert 0 < rows[2]["gradient"] < parity.BETWEEN_STRATEGIES
  failed = parity.judge({"rows": [ROW | {"error": "out of memory"}, *PARITY["rows"]]})
  assert failed.broken == ("text, fsdp against one device: out of memory",)
  nan = parity.compare((jnp.array([1, math.nan]), {"w": jnp.ones(2)}), (jnp.ones(2), {"w": jnp.ones(2)}))
  assert nan == {"loss": None, "gradient": 0.0, "parameter": "w"}
  broken = parity.judge({"rows": [ROW | nan]}).broken
  assert broken == ("text, fsdp against one device: the losses differ by not finite, more than 1e-05",)


def test_the_largest_value_is_not_finite_if_one_is_not():
  assert largest([1.0, 3.0, 2.0]) == 3.0
  assert largest([1.0, None]) is None


# attention

SMALL = [
  attention.Kind(4, 2, 16, causal=causal, segments=segments)
  for causal, segments in ((True, False), (True, True), (False, True))
]
LOCAL = [attention.Kind(4, 2, 16, True, window > 0, window=window, sinks=True) for window in (0, 33)]


@pytest.mark.full
def test_kernels_are_compared_in_output_gradients_and_time():
  values = {
    "bound": attention.BOUND,
    "rows": attention.check_all(attention.kernels("cpu"), SMALL + LOCAL, batch=2, length=128),
  }
  assert attention.judge(values) == Verdict()
  for made in values["rows"]:
    for errors in made["errors"].values():
      assert len(errors) == 4 + made["case"]["sinks"]
      assert all(0.001 < errors[part] < 0.01 for part in attention.PARTS[:4])  # of bfloat16: 0.4%
      assert 0 < errors.get("sink gradient", 0.001) < 0.01  # a sum over all queries
    assert all(seconds > 0 for seconds in made["seconds"].values())
  values["long"] = attention.windows(blockwise, 256, (0, 64))
  assert attention.row(values)[0] == "5 of 5"
  assert re.fullmatch(r"no window: [\d.]+ ms; 64: [\d.]+ ms", attention.row(values)[3])
  assert list(attention.kernels("gpu")) == ["cudnn", "cudnn in pieces", "plain"]
  assert list(attention.kernels("tpu")) == ["splash", "splash in pieces", "plain"]


def test_the_cases_of_attention_have_any_three_of_their_four_choices_in_all_combinations():
  choices = [(case.kv_heads, case.head_dim, case.causal, case.segments) for case in attention.CASES[:8]]
  for left_out in range(4):
    assert len({choice[:left_out] + choice[left_out + 1 :] for choice in choices}) == 8


def test_cases_of_attention_without_time_fail():
  rows = attention.check_all({}, SMALL, left=lambda: attention.LONGEST)
  assert [row["failed"] for row in rows] == 3 * [{"the reference": "the step had no time left for it"}]
  assert len(attention.judge({"bound": attention.BOUND, "rows": rows}).broken) == 3
  assert attention.row({"rows": rows})[0] == "0 of 3"


@pytest.mark.full
def test_wrong_kernels_are_found(monkeypatch: pytest.MonkeyPatch):
  def sees_other_documents(*args: jax.Array, causal: bool, segments: jax.Array | None) -> jax.Array:
    return plain(*args, causal=causal)

  def sees_the_next_key(*args: jax.Array, causal: bool, segments: jax.Array | None) -> jax.Array:
    return plain(*args, causal=causal, offset=1, segments=segments)

  def scaled(q: jax.Array, *args: jax.Array, **options: Any) -> jax.Array:
    return plain(1.1 * q, *args, **options)

  def nans(*args: jax.Array, **options: Any) -> jax.Array:
    return blockwise(*args, **options) * jnp.nan

  def fails(*args: jax.Array, **options: Any) -> jax.Array:
    raise NotImplementedError("no such head size")

  wrong = {"documents": sees_other_documents, "next": sees_the_next_key, "scaled": scaled, "nans": nans}
  rows = attention.check_all(wrong, SMALL[1:2], batch=2, length=128)
  hides_a_piece = lambda a, b: a
  monkeypatch.setattr(context, "merge", hides_a_piece)
  (ring,) = attention.check_all({"ring": attention.by_sharers("blockwise")}, SMALL[1:2], batch=2, length=128)
  rows.append(ring)
  monkeypatch.setattr(halo, "merge", hides_a_piece)
  halos = {"halos": attention.by_sharers("blockwise")}
  rows += attention.check_all(halos, [attention.Kind(4, 2, 16, True, False, window=33)], batch=2, length=128)
  rows += attention.check_all({"fails": fails, "plain": plain}, SMALL[:1], batch=2, length=128)
  broken = attention.judge({"bound": attention.BOUND, "rows": rows}).broken
  assert [sentence.partition(",")[0] for sentence in broken] == [*wrong, "ring", "halos", "fails"]
  assert "an error of not finite" in broken[3]
  assert broken[6] == "fails, causal, 4/2 heads of 16: no such head size"
  assert attention.row({"rows": attention.check_all({"fails": fails}, SMALL[:1], batch=2, length=128)}) == [
    "0 of 1",
    "–",
    "–",
    "–",
  ]
  complete, errors, *_ = attention.row({"rows": rows[3:]})
  assert complete == "0 of 1"
  assert errors.startswith("plain: output 0.")
  assert "fails" not in errors


# memory


def test_the_largest_batch_that_fits_is_measured():
  needed = lambda size: 100 + 10 * size
  assert memory.largest(needed, devices=2, room=500) == 32  # 420; 64 need 740
  assert memory.largest(needed, devices=2, room=420) == 32
  assert memory.largest(needed, devices=3, room=131) == 3
  assert memory.largest(lambda size: 0, devices=2, room=1) == 2 * memory.LARGEST
  assert memory.largest(needed, devices=8, room=100) == 0


@pytest.mark.full
def test_a_case_compares_prediction_plan_and_peak(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
  monkeypatch.setattr(hardware, "memory_in_use", lambda devices: {"memory_peak_gib": 0.25})
  monkeypatch.setitem(memory.CASES, "256M", ("tiny", {}))
  asked = memory.spec("256M", where(devices=8, device_memory_bytes=10**7), "")
  assert asked["config"]["strategy"] == "fsdp"
  assert asked["room"] == 6 * 10**6
  made = memory.measure_case(asked)
  assert made["real"] == 2**28
  assert made["batch_size"] == 64  # the fit of predictions on the CPU; twice as much needs over 6 MB
  assert made["predicted"] <= asked["room"]
  assert made["compiler"] == pytest.approx(made["predicted"], rel=0.2)
  too_large = memory.measure_case(asked | {"room": 10**5})
  assert too_large == {"left_out": "too large: needs 0.0 GB, of 0.0 GB to use here"}


def test_a_wrong_prediction_or_a_missing_case_breaks_the_promise():
  sizes = {"batch_size": 8, "remat": "full", "compiler": 10e9}
  made = {"predicted": 11.4e9, "real": 10e9, **sizes}
  others = [{"predicted": 11.6e9}, {"predicted": 8.4e9}, {"real": None}]
  answers = iter([made, *(made | other for other in others), {"error": "no"}, {"left_out": "too large"}])
  values = memory.measure(where(), run=lambda command, spec: next(answers))
  assert list(values["cases"]) == list(memory.CASES)
  names = list(memory.CASES)
  assert memory.judge(values).broken == (
    f"{names[1]}: predicted 1.16 of the real peak, more than 15% off",
    f"{names[2]}: predicted 0.84 of the real peak, more than 15% off",
    f"{names[3]}: the backend reports no peak",
    f"{names[4]}: no",
  )
  assert memory.row(values)[0] == "10.0 GB: 1.14 / 1.00"
  assert memory.row(values)[3:] == ["no peak reported", "no", "too large"]
  alone = {name: {"left_out": "too large"} for name in memory.CASES}
  assert memory.judge(values | {"cases": alone}).broken == ("every case is too large for this device",)
  with one_sentence("does not report the memory"):
    memory.measure(where(device_memory_bytes=None))


@pytest.mark.parametrize("name", memory.CASES)
@pytest.mark.parametrize("devices", [1, 8])
def test_every_case_can_be_made(name: str, devices: int):
  asked = memory.spec(name, where(devices=devices), "")
  made = base.get_config("lm", "single")
  made.update(asked["config"])
  assert made.data.name == "synthetic"
  assert made.strategy == ("single" if devices == 1 else "fsdp")
  settings.program(made, "gpu")


# throughput


class Peer(Machine):
  """A machine on which PyTorch is `slower` times slower than we are."""

  def __init__(self, slower: float = 1.25, device: str = "cuda", precision: str = throughput.PEER):
    super().__init__({"single/None": slower}, FOUND)
    self.device, self.precision = device, precision

  def __call__(self, command: Sequence[str], spec: dict[str, Any]) -> dict[str, Any]:
    if spec.get("task") == "device":
      return {"device": self.device, "versions": {"torch": "2"}}
    found = super().__call__(command, spec)
    return found | {"precision": self.precision, "versions": {"torch": "2"}} if "attention" in spec else found


def test_our_speed_is_compared_with_pytorch():
  values = throughput.measure(where(), Peer())
  assert set(values["cells"]) == {"single/1", "peer/sdpa", "peaks"}
  assert values["rounds"] == throughput.ROUNDS
  assert throughput.judge(values) == Verdict(aim=Aim("1.25 times the speed of transformers' Llama, of 1.00", True))
  assert throughput.row(values)[2] == "1.25"
  assert throughput.row(values)[1] == "26,214 tokens/s, 1,250 ms (torch 2)"  # 32 · 1,024 tokens in 1.25 s
  assert throughput.judge(throughput.measure(where(), Peer(0.8))).aim == Aim(
    "0.80 times the speed of transformers' Llama, of 1.00", False
  )


def test_without_a_peer_on_the_gpu_the_step_fails():
  with one_sentence("PyTorch cannot be measured", "no torch", "pip install"):
    throughput.measure(where(), lambda *_: {"error": "no torch; pip install '.[peer]'"})
  with one_sentence("PyTorch 2 finds no GPU", "--peer-python"):
    throughput.measure(where(), Peer(device="cpu"))
  eager = throughput.judge(throughput.measure(where(), Peer(precision="float32, eager")))
  assert eager.broken == ("peer/sdpa ran in float32, eager, not in bfloat16, compiled",)
  values = throughput.measure(where(), Peer())
  values["cells"]["peer/sdpa"] |= {"error": "out of memory", "rounds": []}
  assert throughput.judge(values).broken == ("peer/sdpa: out of memory",)
  assert throughput.row(values) == ["not measured"] * 4
  del values["cells"]["peer/sdpa"]
  assert throughput.judge(values).broken == ("PyTorch was left out: no cell",)


def test_a_peer_without_torch_is_reported_with_the_fix():
  blind = dataclasses.replace(where(), peer_python="/no/such/python")
  with one_sentence("PyTorch cannot be measured: cannot be started"):
    throughput.check_peer(blind)


def test_complete_rounds_are_kept_when_time_is_over():
  class Late(Peer):
    """Its time is over after so many runs of the reference."""

    def __init__(self, at: int):
      super().__init__()
      self.at = at

    def __call__(self, command: Sequence[str], spec: dict[str, Any]) -> dict[str, Any]:
      found = super().__call__(command, spec)
      if self.asked.count(("steps", "single/1")) > self.at:
        object.__setattr__(here, "deadline", time.monotonic())
      return found

  here = where()
  assert throughput.measure(here, Late(at=2))["rounds"] == 2
  here = where()
  with one_sentence("not one round"):
    throughput.measure(here, Late(at=0))


# The steps that train


def lines(step: int, accuracy: float | None = None) -> list[dict[str, Any]]:
  trained = {"step": step, "split": "train", "images_per_second": 9e3, "data_wait": 0.1}
  ended = [] if accuracy is None else [{"step": step, "split": "validation", "accuracy": accuracy}]
  return [trained, *ended]


def test_cifar10_continues_where_it_was_stopped(tmp_path: Path):
  steps_asked = base.get_config("cifar10_gpu", "data_parallel").steps
  given: list[dict[str, Any]] = []
  folders: list[Path] = []

  def train(arguments: list[str], workdir: Path, seconds: float) -> list[dict[str, Any]]:
    assert arguments == ["--config=configs/data_parallel.py:cifar10_gpu"]
    assert 0 < seconds < 500 - training.TO_STOP
    folders.append(workdir)
    workdir.mkdir(exist_ok=True)
    with (workdir / "metrics.jsonl").open("a") as file:
      file.writelines(json.dumps(line) + "\n" for line in given)
    return given

  given = lines(100)
  values = cifar10.measure(where(tmp_path), train)
  assert cifar10.judge(values).broken == (f"step 100 of {steps_asked:,} so far; run this step again to continue",)
  given = lines(steps_asked, 0.9399)
  values = cifar10.measure(where(tmp_path), train)
  assert len(values["seconds"]) == 2
  assert cifar10.judge(values) == Verdict(aim=Aim("93.99% of the test images, of 94%", False))
  assert cifar10.row(values | {"seconds": [60.0, 30.0]})[:2] == ["93.99%", "1.5 min in 2 calls"]
  given = lines(steps_asked, 0.94)
  values = cifar10.measure(where(tmp_path), train)  # the run before has ended, so this is a new one
  assert folders[0] == folders[1] != folders[2]
  assert len(values["seconds"]) == 1
  assert cifar10.judge(values).aim == Aim("94.00% of the test images, of 94%", True)
  assert cifar10.judge(values | {"accuracy": None}).broken


def test_ways_of_blocks_are_compared_with_the_loop():
  took = dict(zip(blocks.WAYS, (0.40, 0.36, 0.32, 0.24, 0.30), strict=True))
  asked: list[dict[str, Any]] = []

  def run(command: Any, spec: dict[str, Any], *_: Any) -> dict[str, Any]:
    asked.append(spec)
    way = list(blocks.WAYS)[len(asked) - 1]
    return {"seconds": [took[way]] * 3, "loss": 1.0, "peak_bytes": 30 << 30}

  values = blocks.measure(where(), run)
  model = [(spec["config"]["model"]["unroll"], spec["config"]["model"]["products"]) for spec in asked]
  assert model == [("scan", "dtype"), ("all", "dtype"), ("all", "dtype"), ("all", "float8"), ("all", "float8")]
  values |= {"peak": 989e12, "device": "NVIDIA H100 80GB HBM3"}
  verdict = blocks.judge(values)
  assert not verdict.broken
  assert verdict.aim
  assert verdict.aim.reached
  assert verdict.aim.text == "MFU 66.7% as PaLM counts, of 60%; float8 1.33 times as fast, of 1.28"
  assert blocks.row(values)[:2] == ["400 ms; 30.0 GiB; 1.00", "360 ms, 0.90; 30.0 GiB; 1.00"]
  values["ways"]["float8"] = {"error": "too large"}
  assert blocks.judge(values).broken == ("float8: too large",)
  assert blocks.judge(values).aim.reached is False
  assert blocks.row(values)[3] == "not measured"


@pytest.mark.full
def test_ways_of_blocks_run_for_real():
  values = blocks.measure(where(devices=2), preset="tiny")
  assert blocks.judge(values | {"peak": None}) == Verdict()
  assert all(len(one["seconds"]) == blocks.STEPS for one in values["ways"].values())


@pytest.mark.full
def test_a_language_model_trains_for_real_and_gives_its_speed():
  values = language_model.measure(where(devices=2), preset="tiny")
  assert values["batch_size"] == 32
  assert values["steps"] == 40  # the preset has no more
  assert len(values["all_step_ms"]) == 8 - language_model.WARM_UP
  assert values["tokens_per_second"] == pytest.approx(32 * 32 / values["step_ms"] * 1e3, rel=0.2)
  assert values["mfu"] is values["palm_mfu"] is None
  verdict = language_model.judge(values | {"device": "cpu"})
  assert verdict == Verdict(aim=Aim("MFU unknown, of 60% on an NVIDIA H200", None))
  assert language_model.row(values)[4:] == [f"{values['data_wait']:.1%}", "32"]


def test_the_speed_is_the_median_after_the_warm_up():
  made = [
    {"step": 5 * i, "split": "train", "loss": 9.0 - i, "step_ms": ms, "tokens_per_second": 1e6 / ms, "data_wait": 0.0}
    | {"mfu": 100 / ms, "palm_mfu": 110 / ms, "memory_peak_gib": 40.0}
    for i, ms in enumerate([9000, 900, 200, 400, 250], start=1)
  ]
  made.insert(3, {"step": 15, "split": "validation", "loss": 1.0})
  values = language_model.steady(made)
  assert (values["step_ms"], values["tokens_per_second"], values["peak_gib"]) == (250, 4000, 40.0)
  assert (values["mfu"], values["palm_mfu"]) == (0.4, 0.44)
  assert (values["steps"], values["loss"], values["all_step_ms"]) == (25, 4.0, [200, 400, 250])
  with one_sentence("ended after 2 lines of metrics"):
    language_model.steady(made[:2])


def test_the_aim_of_a_language_model_is_for_one_kind_of_device():
  reached = lambda **fields: language_model.judge(NETWORK | fields).aim.reached
  assert reached(palm_mfu=0.60) is True
  assert reached() is False
  assert reached(device="NVIDIA H100 80GB HBM3") is None
  assert language_model.judge(NETWORK | {"loss": None}).broken == ("the loss is not finite",)


@pytest.mark.full
def test_a_run_that_is_too_long_is_asked_to_stop(tmp_path: Path):
  script = (
    "import pathlib, signal, sys\n"
    "folder = pathlib.Path(sys.argv[-1].removeprefix('--workdir='))\n"
    "def stop(*_):\n"
    '  (folder / \'metrics.jsonl\').write_text(\'{"step": 7, "split": "train"}\')\n'
    "  sys.exit(0)\n"
    "signal.signal(signal.SIGTERM, stop)\n"
    "signal.pause()"
  )
  found = training.train(["--config=x"], tmp_path, 3.0, of(script))
  assert found == [{"step": 7, "split": "train"}]
  assert training.last(found, "train") == found[0]
  assert training.last(found, "validation") is None


def test_a_run_that_fails_is_reported_with_its_last_line(tmp_path: Path):
  with one_sentence("train.py ended with status 1: error: no data"):
    training.train([], tmp_path, 60.0, of("import sys; print('hint', file=sys.stderr); sys.exit('error: no data')"))
  with one_sentence(f"train.py ended with status -{int(signal.SIGKILL)}: no message"):
    training.train([], tmp_path, 60.0, of("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"))


def test_the_preset_has_a_billion_parameters_and_a_batch_of_32_768_tokens():
  asked = config(preset="lm_1b")
  program = settings.program(asked, "gpu")
  state = jax.eval_shape(program.init, jax.random.key(0))
  assert round(sum(math.prod(x.shape) for x in jax.tree.leaves(state.params)) / 1e9, 2) == 1.01
  assert asked.batch_size * asked.model.seq_len == 32_768
  assert (program.sizes.attention, program.sizes.dtype) == ("cudnn", "bfloat16")


# The page


def test_the_page_shows_the_records():
  text = page.PAGE.read_text()
  assert pages.fill(text, page.parts(record.read())) == text, "run python -m tools.benchmark accelerator --tables"
  assert page.parts([])["summary"] == page.parts([])["parity"] == "No accelerator's record exists yet."


def test_the_page_has_a_row_for_each_record(tmp_path: Path):
  rows_of = lambda text: [row.split("|")[1:-1] for row in text.splitlines() if row.startswith("|") and "NVIDIA" in row]
  cells_of = lambda text: [[cell.strip() for cell in row] for row in rows_of(text)]
  run_with({"parity": {"values": PARITY}, "language_model": {"values": NETWORK}}, tmp_path)
  h100 = FOUND | {"hardware": FOUND["hardware"] | {"kind": "NVIDIA H100", "devices": 4}}
  other = NETWORK | {"device": "NVIDIA H100"}
  run_with({"language_model": {"values": other}}, tmp_path, "--step=language_model", found=h100)
  made = page.parts(record.read(tmp_path))
  assert cells_of(made["parity"])[0] == ["1 × NVIDIA H200", "1", "–", "–", "0.0e+00", "0.0e+00", "holds"]
  speed = ["100,000", "330 (320–330) ms", "55.0% (59.0% as PaLM counts)", "51.0 GiB", "0.1%", "16"]
  assert cells_of(made["language_model"]) == [
    ["1 × NVIDIA H200", *speed, "aim missed: MFU 59.0% as PaLM counts, of 60% on an NVIDIA H200"],
    ["4 × NVIDIA H100", *speed, "aim is for another device: MFU 59.0% as PaLM counts, of 60% on an NVIDIA H200"],
  ]
  assert cells_of(made["memory"])[0][-1] == "**fails**: out of order"
  summary = {row[0]: row[1:] for row in cells_of(made["summary"])}
  assert summary["4 × NVIDIA H100"][0] == "not run"
  assert summary["1 × NVIDIA H200"][:2] == ["holds", "**fails**"]
  assert "`python -m tools.benchmark accelerator --step=parity`, 1 × NVIDIA H200; " in made["parity"]
