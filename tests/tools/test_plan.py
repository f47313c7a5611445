"""The planner: what it finds fits, is ordered, can be run, and is what its formulas say."""

import itertools
import math
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import command_line_of, one_sentence

import strategies
from analysis import predict, search
from analysis.topology import slice_of
from configs import base
from models.config import ModelConfig
from runtime import command_line
from strategies.mesh import abstract_mesh, resolve
from tools import plan as tool
from training import settings

SLICE = "v5p:4x4x4"
ROOT = Path(__file__).parents[2]


def model(params: float = 7e9, length: int = 2048) -> ModelConfig:
  config = base.get_config("lm", "fsdp")
  config.model.update(tool.model_of(params, length))
  return settings.program(config, "tpu").model


@pytest.fixture(scope="module")
def found() -> list[search.Candidate]:
  return search.search(model(), 256, slice_of(SLICE))


def test_all_that_is_found_fits_and_the_fastest_comes_first(found: list[search.Candidate]):
  chip = slice_of(SLICE).chip
  assert len(found) > 50
  assert all(candidate.memory <= search.USABLE * chip.memory for candidate in found)
  assert all(a.times.seconds <= b.times.seconds for a, b in itertools.pairwise(found))
  assert {"fsdp", "hsdp", "two_d", "three_d"} <= {candidate.strategy for candidate in found}


@pytest.mark.parametrize("topology, batch_size", [(SLICE, 256), ("v5p:8x8x16", 1024)])
def test_a_candidate_is_what_its_config_makes(found: list[search.Candidate], topology: str, batch_size: int):
  """The fields that are printed, given to train.py, are the case that was judged, and what train.py accepts."""
  where = slice_of(topology)
  if topology != SLICE:
    found = search.search(model(), batch_size, where)
  asked = base.get_config("lm", "fsdp")
  asked.model.update(tool.model_of(7e9, 2048))
  asked.batch_size = batch_size
  for candidate in search.best(found, 10):
    config = tool.config_of(candidate, asked)
    layout = resolve(strategies.layout_of(config.strategy), where.devices, config.mesh)
    runner = strategies.build(config, layout, settings.program(config, "tpu"), abstract_mesh(layout))
    runner.check_batch("batch_size", config.batch_size, config.accumulation)
    runner.check_batch("eval_batch_size", config.eval_batch_size)
    case = predict.Case.of(runner, config.batch_size, "tpu")
    assert predict.memory(case).total == candidate.memory
    assert predict.flops(case) == pytest.approx(candidate.times.compute * where.chip.flops)


def test_what_does_not_fit_is_dropped():
  """Data parallelism needs 16 bytes a parameter on each device, so 7 B do not fit into 32 GB."""
  names = {candidate.strategy for candidate in search.search(model(), 256, slice_of("v6e:8x8"))}
  assert "data_parallel" not in names
  assert "fsdp" in names


def test_more_than_fits_anywhere_leaves_nothing():
  assert search.search(model(70e9), 64, slice_of("v5e:2x2")) == []


def test_one_device_is_planned_for_as_such():
  """Any strategy is `single` there, the simplest of equals; on more devices it would leave them idle."""
  one, two = slice_of("v5e:1x1"), slice_of("v5e:1x2")
  assert {candidate.strategy for candidate in search.search(model(1e8), 8, one)} == {"single"}
  assert "single" not in {candidate.strategy for candidate in search.search(model(1e8), 8, two)}
  assert search.search(model(1e8), 8, two, ["single"]) == []
  assert {candidate.strategy for candidate in search.search(model(1e8), 8, one, ["fsdp"])} == {"fsdp"}


def test_at_most_two_of_a_strategy_are_shown(found: list[search.Candidate]):
  shown = [candidate.strategy for candidate in search.best(found, 10)]
  assert max(map(shown.count, shown)) == 2
  assert shown[0] == found[0].strategy
  alike = [candidate for candidate in found if candidate.strategy == found[0].strategy][:5]
  other = next(candidate for candidate in reversed(found) if candidate.strategy != found[0].strategy)
  assert search.best([*alike, other], 4) == [*alike[:3], other]  # more of one, where there are not enough others


def test_gathers_over_a_whole_closed_torus_cost_twice():
  """There the compiler writes them as all-reduce."""
  where = slice_of(SLICE)
  assert where.is_whole([4, 4, 4])
  assert not where.is_whole([4, 4, 2])
  assert not slice_of("v5e:16x16").is_whole([16, 16])


@pytest.mark.parametrize("params", [1e8, 1e9, 7e9, 70e9, 405e9])
def test_a_model_of_a_size_has_about_that_size(params: float):
  made = model(params)
  assert sum(weight.size for weight in predict.weights(made)) == pytest.approx(params, rel=0.2)


@pytest.mark.parametrize("topology", [None, "v5p", "v5p:8x8", "v5p:0x4x4", "v5e:2x2x2", "h100:8"])
def test_a_slice_that_is_none_is_refused(topology: str):
  with one_sentence(f"topology={topology!r}", "sizes"):
    slice_of(topology)


@pytest.mark.parametrize("params", [0, 10, -1, 1e15])
def test_a_size_that_no_model_has_is_refused(params: float):
  with one_sentence("params=", "1e8"):
    tool.model_of(params, 2048)


@pytest.mark.parametrize(
  "tokens, length, devices, batch",
  [
    (4e6, 4096, 1024, 1024),
    (1e6, 4096, 1024, 256),
    (8e6, 4096, 1024, 2048),
    (2**20, 1024, 8, 1024),
    (5000, 4096, 8, 1),
  ],
)
def test_the_batch_is_near_what_was_asked_and_splits(tokens: float, length: int, devices: int, batch: int):
  assert tool.batch_of(tokens, length, devices) == batch


def test_a_batch_below_one_text_is_refused():
  for tokens in (0, -5, 100, math.inf, math.nan):
    with one_sentence("batch-tokens=", "4096"):
      tool.batch_of(tokens, 4096, 8)
  with one_sentence("batch-tokens=0", "4096"):
    tool.main(command_line_of(tool.define, "--params=7e9", f"--topology={SLICE}", "--batch-tokens=0"))
  config = f"--config={ROOT}/configs/fsdp.py"
  with one_sentence("batch_size=-8", "at least 1"):
    tool.main(command_line_of(tool.define, config, f"--topology={SLICE}", "--config.batch_size=-8"))


def test_axes_of_one_device_count():
  """Pure pipelines and stage × model are plans too, and a single chip has one."""
  meshes = [dict(layout.mesh) for _, layout in search._layouts(strategies.names(), model(), 16)]
  assert {"stage": 16, "data": 1} in meshes
  assert {"stage": 4, "data": 1, "model": 4} in meshes
  assert search.search(model(1e8, 128), 8, slice_of("v5e:1x1"))


def test_the_command_prints_ten_commands_that_train_what_it_found(
  found: list[search.Candidate], capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
  """Each is read as train.py reads it."""
  monkeypatch.chdir(ROOT)
  tool.main(command_line_of(tool.define, "--params=7e9", f"--topology={SLICE}", "--batch-tokens=5e5", "--seq-len=2048"))
  table, printed = capsys.readouterr().out.split("to train, or")
  rows = table.split("---\n")[1].splitlines()
  lines = [line.split(maxsplit=1)[1] for line in printed.splitlines()[1:]]
  assert len(lines) == 10
  for line, row, candidate in zip(lines, rows, search.best(found, 10), strict=False):
    python, program, *arguments = shlex.split(line)
    assert (python, program) == ("python", "train.py")
    command_line._check(arguments, needs_config=True)
    config = command_line_of(lambda flags: None, *arguments).config
    assert config.strategy == candidate.strategy
    assert config.batch_size == 256
    assert {name: size for name, size in config.mesh.items() if size} == candidate.case.layout.mesh
    assert settings.program(config, "tpu").model == candidate.case.model
    assert config.accumulation == candidate.case.accumulation
    if candidate.case.schedule:
      assert config.pipeline.microbatches == candidate.case.schedule.microbatches
    assert f"{candidate.memory / 1e9:.2f} GB" in row


def run(*arguments: str) -> subprocess.CompletedProcess:
  return subprocess.run(
    [sys.executable, "-m", "tools.plan", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300
  )


def test_the_command_prints_commands_that_train_what_was_asked():
  done = run("--config=configs/fsdp.py:cifar10", "--topology=v5e:2x2", "--config.model.width=64", "--strategies=fsdp")
  assert done.returncode == 0, done.stderr
  assert "images/s" in done.stdout
  for field in ("--config.data.name=cifar10", "--config.model.inputs=images", "--config.model.width=64"):
    assert field in done.stdout


@pytest.mark.parametrize(
  "arguments, parts",
  [
    (("--topology=v5e:2x2",), ("params", "config")),
    (("--topology=v5e:2x2", "--params=1e9", "--batch-tokens=10"), ("batch-tokens=10",)),
    (("--topology=v5e:2x2", "--config=configs/nope.py"), ("nope.py", "does not exist")),
    (("--topology=v5e:2x2", "--config=configs/fsdp.py", "--config.model.widht=5"), ("model.widht", "width")),
  ],
)
def test_a_mistake_is_one_line(arguments: tuple[str, ...], parts: tuple[str, ...]):
  done = run(*arguments)
  assert done.returncode == 2
  assert len(done.stderr.strip().splitlines()) == 1
  assert all(part in done.stderr for part in parts)


def test_equal_layouts_are_tried_once():
  """Of groups of one device hsdp is data_parallel, and of one group fsdp, whatever their mesh axes are called."""
  names = ("data_parallel", "fsdp", "hsdp", "pmap_ddp", "tensor_parallel", "two_d")
  tried = [(name, *layout.mesh.values()) for name, layout in search._layouts(names, model(1e9, 1024), 8)]
  assert sorted(tried) == [
    ("data_parallel", 8), ("fsdp", 8), ("hsdp", 2, 4), ("hsdp", 4, 2), ("tensor_parallel", 8), ("two_d", 2, 4),
    ("two_d", 4, 2),
  ]  # fmt: skip
