"""The throughput command: two cells measured for real, bad options, the peer, and processes that fail."""

import importlib
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import pytest
from helpers import PARITY, config, one_sentence
from machines import FOUND, GPUS, Machine, measured

from configs import base
from lab.benchmarks import cells, figures, pages, rounds, tables, throughput, torch_llama
from runtime import command_line, devices
from training import settings


@pytest.mark.full
def test_two_cells_measured_for_real(tmp_path: Path):
  faked = Machine()

  def run(command: Sequence[str], spec: dict[str, Any]) -> dict[str, Any]:
    return rounds.run(command, spec) if spec["task"] in ("compile", "steps") else faked(command, spec)

  asked = config(model__depth=2, model__seq_len=8)  # pipeline's default is 4 stages
  options, _ = throughput.parse(["--rows=pipeline", "--devices=2", "--rounds=1", "--steps=2", f"--record={tmp_path}/x"])
  made = throughput.measure(asked, options, FOUND, run)
  single, split = figures.rows(made)
  assert (single.name, split.name) == ("single/1", "pipeline/2")
  assert single.error is None
  assert split.error is None
  assert single.relative.median == 1
  assert split.mesh == {"stage": 2, "data": 1}
  assert split.seconds.low > 0
  assert split.compile_seconds > 0
  assert single.bytes > split.bytes > 0  # half the blocks
  assert [made["cells"][row.name]["devices_there"] for row in (single, split)] == [1, 2]
  sizes = made["cells"]["pipeline/2"]["bytes"]
  assert sizes["total"] < sizes["argument"] + sizes["output"] + sizes["temp"]  # the state is donated
  assert figures.loss_spread(made) < PARITY
  assert made["unit"] == "tokens"
  assert made["items"] == 16 * 8
  written = json.dumps(made)
  for place in (str(tmp_path), sys.executable, str(throughput.ROOT)):
    assert place not in written


@pytest.mark.full
def test_a_cell_with_a_nan_loss_is_an_error():
  asked = config(model__depth=1, model__seq_len=8, model__embedding_scale=1e39)  # infinite in float32
  spec = cells.training(asked, "single", 1) | {"task": "steps", "warmup": 2, "steps": 1}
  assert rounds.run(cells.WORKER, spec) == {"error": "the loss is nan"}


@pytest.mark.parametrize(
  "arguments, parts",
  [
    (["--rows=fdsp"], ["rows='fdsp'", "did you mean 'fsdp'"]),
    (["--devices=2,two"], ["devices='two'", "positive"]),
    (["--devices=0"], ["devices=0", "at least 1"]),
    (["--rounds=0"], ["rounds=0", "at least 1"]),
    (["--rounds=few"], ["rounds='few'", "--rounds=3"]),
    (["--peer-python=/no/such/python"], ["peer-python='/no/such/python'", "PyTorch"]),
    (
      ["--rows=single", f"--peer-python={sys.executable}"],
      [f"peer-python={sys.executable!r} has no use with rows=single", "add peer to the rows"],
    ),
    (["--check=x.json", "--rows=fsdp,two_d", "--peer-python=python3"], ["rows=fsdp,two_d", "add peer"]),
    (["--check=x.json", "--steps=9"], ["'--steps'", "cannot be combined with --check"]),
    (["--check=x.json", "--config.batch_size=8"], ["'--config.batch_size=8'", "cannot be combined with --check"]),
    (["--tables", "--peer-python=python3"], ["'--peer-python'", "cannot be combined with --tables"]),
  ],
)
def test_bad_options_are_one_sentence(arguments: list[str], parts: list[str]):
  with one_sentence(*parts):
    measured(*arguments)


def test_each_cause_that_prevents_measuring_is_one_sentence(tmp_path: Path):
  with one_sentence("devices=8", "this machine has 4", "at most 4"):
    measured("--devices=8", run=Machine(found=GPUS))
  asked = base.get_config("throughput", "single")
  asked.mesh.data = 4
  with one_sentence("mesh.data=4", "leave it out"):
    throughput.measure(asked, throughput.parse([])[0], FOUND, Machine())
  asked = base.get_config("throughput", "single")
  asked.simulated_devices = 4
  with one_sentence("simulated_devices=4", "--devices"):
    throughput.measure(asked, throughput.parse([])[0], FOUND, Machine())
  asked = base.get_config("throughput", "single")
  with one_sentence(f"record='{tmp_path}'", "is a folder"):
    throughput.keep(asked, "throughput", throughput.parse([f"--record={tmp_path}"])[0], FOUND)
  with one_sentence("the devices here cannot be used", "no driver"):
    throughput.machine(lambda command, spec: {"error": "no driver"})
  with one_sentence("no row can be measured", "out of memory"):
    throughput.measure(
      base.get_config("throughput", "single"), throughput.parse([])[0], FOUND, lambda *_: {"error": "out of memory"}
    )
  with one_sentence("check=", "absent.json", "use one of"):
    throughput.read(tmp_path / "absent.json")
  with one_sentence("check=", "pipeline.json", "not a throughput record"):
    throughput.read(tables.RESULTS / "pipeline.json")
  file = tmp_path / "half.json"
  file.write_text('{"kind": "throughput"}')
  with one_sentence("check=", "half.json", "not a throughput record"):
    throughput.read(file)
  made = measured("--rows=fsdp")
  file.write_text(json.dumps(made | {"config": made["config"] | {"of_old": 1}}))
  with one_sentence("check=", "half.json", "another version", "of_old"):
    throughput.again(file, throughput.parse([])[0], Machine())
  file = tmp_path / "gpu.json"
  file.write_text(json.dumps(measured("--rows=fsdp", run=Machine(found=GPUS))))
  with one_sentence("check=", "4 × NVIDIA H100", "such a machine"):
    throughput.again(file, throughput.parse([])[0], Machine())


def test_the_command_of_a_record_can_be_run_again():
  said = ["--rows", "fsdp,peer", "--record", "/mine/x.json", "--peer-python", sys.executable, "--config.data.path=a b"]
  options, rest = throughput.parse(said)
  assert options.command == "python -m tools.benchmark throughput --rows=fsdp,peer '--config.data.path=a b'"
  assert rest == ["--config.data.path=a b"]


def test_a_record_of_another_config_has_another_name():
  config = base.get_config("throughput", "single")
  name = lambda: throughput._name(config, "throughput", FOUND["hardware"])
  assert name() == "2-cores-of-made-up-throughput.json"
  config.strategy = "fsdp"  # the table sets it, so the name stays the same
  names = [name()]
  for config.batch_size in (32, 16):
    names.append(name())
  assert len(set(names)) == 3
  assert throughput._name(config, "throughput", GPUS["hardware"]).startswith("nvidia-h100-x4-throughput-")


@pytest.mark.parametrize(
  "fields, without",
  [
    ({}, None),
    ({"model__dtype": "bfloat16"}, "the peer is compared only with dtype=float32"),
    ({"model__remat": "full"}, "the peer is compared only with remat=minimal"),
    ({"model__dropout": 0.1}, "the peer is compared only with dropout=0.0"),
    ({"accumulation": 2}, "the peer is compared only with accumulation=1"),
    ({"preset": "cifar10"}, "the peer is a language model"),
  ],
)
def test_a_peer_that_cannot_do_the_same_work_is_left_out(fields: dict[str, Any], without: str | None):
  made = throughput.measure(config(**fields), throughput.parse(["--rows=peer"])[0], FOUND, Machine())
  assert ("peer/eager" in made["cells"]) == (without is None)
  assert made["left_out"].get("peer") == without


@pytest.mark.parametrize(
  "command, error",
  [
    (["lab.benchmarks.throughput", "--rounds=no"], "error: rounds='no' is not a whole number"),
    (["lab.benchmarks.pipeline_schedules", "--rounds=0"], "error: rounds=0 must be at least 1"),
    (["lab.benchmarks.checkpoint_cost", "--rounds=0"], "error: rounds=0 must be at least 1"),
    (["lab.benchmarks.predictions", "tpu", "--cases=99"], "error: cases='99' does not exist"),
    (["lab.benchmarks.input_pipeline", "--rounds=0"], "error: rounds=0 must be at least 1"),
    (["lab.benchmarks.preparation", "--size=10"], "error: size=10 must be a finite number of bytes"),
  ],
)
def test_a_mistake_on_the_command_line_ends_with_one_line(
  command: list[str], error: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
  monkeypatch.setattr(sys, "argv", command)
  monkeypatch.setattr(command_line, "use_utf8", lambda: None)  # which may start this process again
  with pytest.raises(SystemExit) as ended:
    importlib.import_module(command[0]).main()
  assert ended.value.code == 2
  assert capsys.readouterr().err.strip().splitlines()[-1].startswith(error)


@pytest.mark.parametrize(
  "fields",
  [{}, {"preset": "throughput"}, {"preset": "throughput_gpu"}, {"model__tied_embedding": True}],
  ids=["tiny", "throughput", "throughput_gpu", "tied"],
)
def test_the_peer_has_our_number_of_parameters(fields: dict[str, Any]):
  asked = config(**fields)
  program = settings.program(asked, "cpu")
  state = jax.eval_shape(program.init, jax.random.key(0))
  ours = sum(math.prod(x.shape) for x in jax.tree.leaves(state.params))
  theirs = torch_llama.llama_config(asked.model.to_dict(), "sdpa")
  assert torch_llama.parameter_count(theirs) == ours


def test_a_missing_peer_is_reported_with_the_fix():
  program = str(Path(torch_llama.__file__))
  spec = {"config": config().to_dict(), "attention": "eager", "compiled": False, "warmup": 1, "steps": 1}
  found = rounds.run([sys.executable, "-I", "-S", program], spec)  # without any installed package
  assert found == {"error": "torch is not installed; pip install '.[peer]', or name a Python with --peer-python"}


def test_a_process_that_fails_is_reported_with_its_last_line():
  assert rounds.run([sys.executable, "-c", "raise SystemExit('no memory')"], {}) == {
    "error": "exit status 1: no memory"
  }
  assert rounds.run([sys.executable, "-c", "print('{}'); print('something else')"], {}) == {
    "error": "exit status 0: something else"
  }
  assert rounds.run([sys.executable, "-c", "print('{}'); raise SystemExit('at the end')"], {}) == {
    "error": "exit status 1: at the end"
  }
  assert "cannot be started" in rounds.run(["/no/such/program"], {})["error"]


@pytest.mark.parametrize("has_gpus", [False, True])
def test_only_processes_that_compute_on_a_cpu_keep_freed_memory(monkeypatch: pytest.MonkeyPatch, has_gpus: bool):
  monkeypatch.delenv("JAX_PLATFORMS")
  monkeypatch.setattr(devices, "_has_tpus", lambda: False)
  for name in ("_has_gpus", "has_gpu_compiler"):
    monkeypatch.setattr(devices, name, lambda: has_gpus)
  program = "import json, os; print(json.dumps({'heaps': os.environ.get('MALLOC_ARENA_MAX')}))"
  assert rounds.run([sys.executable, "-c", program], {}) == {"heaps": None if has_gpus else "1"}


def test_filling_a_page_replaces_the_old_part():
  assert pages.fill("<!-- a -->\nold\n<!-- end -->", {"a": "new"}) == "<!-- a -->\nnew\n<!-- end -->"
