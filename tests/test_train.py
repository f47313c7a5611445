"""train.py as a user runs it: results, repeatability, clean exits, and one sentence for each mistake."""

import errno
import html
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import IMAGES, config, each_once, in_full, measured, one_sentence
from jobs import Job
from ml_collections import ConfigDict

import strategies
import train
from configs import base
from errors import Unavailable
from models.sizes import DTYPES, REMAT, with_sizes_made_up
from reporting import pages, recorded, report
from runtime import command_line
from strategies.layout import MESH_AXES
from training import settings

ROOT = Path(__file__).parents[1]
CACHE = "--config.data.cache_dir=~/.cache/meshwright/tests"
SHORT = {"steps": 4, "log_every": 2, "eval_every": 2, "sample_length": 8, "simulated_devices": 8}


def command(*arguments: str, workdir: Path) -> subprocess.CompletedProcess:
  return subprocess.run(
    [sys.executable, "train.py", *arguments, f"--workdir={workdir}", CACHE],
    cwd=ROOT, capture_output=True, text=True, check=False, env=os.environ | {"JAX_PLATFORMS": "cpu"},
  )  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
  """A short run of the README's command: its workdir and its output."""
  workdir = tmp_path_factory.mktemp("run")
  done = command("--config=configs/fsdp.py:tiny", "--config.steps=30", "--config.log_every=10", workdir=workdir)
  assert done.returncode == 0, done.stderr
  return workdir, done.stdout


def test_a_run_reports_its_set_up_and_learns(finished: tuple[Path, str]):
  workdir, printed = finished
  for expected in (
    "8 × CPU device, simulated", "fsdp on mesh data=8; batch over data, embed over data", "Python standard library",
    "blocks/attention/query", "byte bigram model", "sample\n  | def ", "wall time", "compile", "\ngoodput ",
  ):  # fmt: skip
    assert expected in printed
  lines = measured(workdir)
  assert [line["step"] for line in lines if line["split"] == "train"] == [10, 20, 30]
  assert [line["step"] for line in lines if line["split"] == "validation"] == [20, 30]
  assert {"loss", "grad_norm", "learning_rate"} <= lines[0].keys()
  assert "mfu" not in lines[0]  # the table of peak FLOP/s has no CPUs
  losses = [line["loss"] for line in lines if line["split"] == "train"]
  assert losses[-1] < losses[0]
  assert losses[-1] < 3.5  # a uniform guess gives ln 256 = 5.5


def test_a_run_writes_its_results(finished: tuple[Path, str]):
  workdir, _ = finished
  assert (workdir / "loss.png").read_bytes().startswith(b"\x89PNG")
  assert list((workdir / "tensorboard").glob("events.out.tfevents.*"))
  assert json.loads((workdir / "config.json").read_text())["strategy"] == "fsdp"


def test_a_run_writes_the_page_that_its_files_give(finished: tuple[Path, str]):
  workdir, printed = finished
  page, run = (workdir / "report.html").read_text(), recorded.load(workdir)
  assert page == report.page([run])
  happened = [json.loads(line)["event"] for line in (workdir / "journal.jsonl").read_text().splitlines()]
  assert happened == ["start", "evaluation", "evaluation", "end"]
  assert run.events[-1]["sample"].startswith("def ")
  assert run.checkpoints
  for expected in ("Finished at", "fsdp on mesh data=8", "step 30 of 30", "attention", "train.py --config="):
    assert expected in html.unescape(page)
  assert "report.html" in printed


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
  """The metrics of a run of SHORT."""
  workdir = tmp_path_factory.mktemp("whole")
  train.train(config("two_d", **SHORT), workdir)
  return measured(workdir)


def test_two_runs_are_bitwise_equal(whole: list[dict], tmp_path: Path):
  train.train(config("two_d", **SHORT), tmp_path)
  assert measured(tmp_path) == whole
  assert len(whole) == 4


@pytest.mark.full
def test_two_runs_on_images_are_bitwise_equal(tmp_path: Path):
  fields = SHORT | IMAGES | {"data__augment": True, "model__dropout": 0.1}
  for name in ("a", "b"):
    train.train(config("two_d", **fields), tmp_path / name)
  assert measured(tmp_path / "a") == measured(tmp_path / "b")
  assert len(measured(tmp_path / "a")) == 4


@pytest.mark.full
def test_another_seed_gives_another_loss(whole: list[dict], tmp_path: Path):
  train.train(config("two_d", seed=1, **SHORT), tmp_path)
  assert measured(tmp_path)[0]["loss"] != whole[0]["loss"]


def test_stop_after_ends_early_and_changes_no_earlier_step(whole: list[dict], tmp_path: Path):
  train.train(config("two_d", stop_after=2, **SHORT), tmp_path)
  assert measured(tmp_path) == whole[:2]


@pytest.mark.full
def test_one_simulated_device_equals_single(tmp_path: Path):
  job = Job("tensor_parallel", tmp_path / "one", tmp_path / "log", **SHORT | {"simulated_devices": 1})
  assert job.wait() == 0, job.output
  assert "tensor_parallel on one device: nothing to split, so this is the single-device run" in job.output
  train.train(config("single", **SHORT), tmp_path / "single")
  ours, reference = (measured(tmp_path / name) for name in ("one", "single"))
  np.testing.assert_allclose([line["loss"] for line in ours], [line["loss"] for line in reference], rtol=1e-5)


@pytest.mark.full
def test_a_diverging_run_stops_and_names_the_learning_rate(tmp_path: Path):
  fields = SHORT | {"steps": 40, "model__depth": 1, "model__width": 32, "eval_every": 0, "sample_length": 0}
  broken = config("single", optimizer__learning_rate=1e30, optimizer__warmup=0, max_skipped=3, **fields)
  with pytest.raises(train.Diverged, match=r"last 3 updates.*optimizer\.learning_rate=1e\+30"):
    train.train(broken, tmp_path)


@pytest.mark.full
def test_updates_that_are_not_finite_are_reported_as_skipped(tmp_path: Path, capsys: pytest.CaptureFixture):
  broken = config("fsdp", optimizer__learning_rate=1e30, optimizer__warmup=0, **SHORT)
  train.train(broken, tmp_path)
  last = [line for line in measured(tmp_path) if line["split"] == "train"][-1]
  assert last["grad_norm"] is None
  assert last["skipped_updates"] == 2  # since the line at step 2
  assert "2 skipped" in capsys.readouterr().out


@pytest.mark.parametrize(
  "strategy, fields, parts",
  [
    ("fdsp", {}, ["strategy='fdsp'", "did you mean 'fsdp'"]),
    ("fsdp", {"mesh__data": 3}, ["mesh.data=3", "8 devices"]),
    ("two_d", {"mesh__data": -1, "mesh__model": -1}, ["mesh.data=-1, mesh.model=-1", "only one"]),
    ("fsdp", {"batch_size": 3}, ["batch_size=3", "8 (devices", "use 8"]),
    ("fsdp", {"accumulation": 3}, ["batch_size=16", "3 (accumulation)", "use 15"]),
    ("fsdp", {"eval_batch_size": 3}, ["eval_batch_size=3", "use 8"]),
    ("tensor_parallel", {"model__heads": 4, "model__kv_heads": 4}, ["mesh.model=8", "model.heads=4", "1, 2 or 4"]),
    ("tensor_parallel", {"model__kv_heads": 4}, ["mesh.model=8", "model.kv_heads=4"]),
    ("tensor_parallel", {"model__mlp_width": 100}, ["mesh.model=8", "model.mlp_width=100"]),
    ("fsdp", {"data__path": "/no/such/file"}, ["data.path='/no/such/file'", "does not exist"]),
    ("fsdp", {"model__vocab_size": 64}, ["model.vocab_size=64", "token id", "256"]),
    ("fsdp", {"batch_size": -16}, ["batch_size=-16", "at least 1"]),
    ("fsdp", {"simulated_devices": 100_000}, ["simulated_devices=100000", "1024"]),
    ("fsdp", {"steps": 0}, ["steps=0"]),
    ("fsdp", {"steps": -5}, ["steps=-5"]),
    ("fsdp", {"steps": 99999999999999999999}, ["steps=99999999999999999999", "32 bits"]),
    ("fsdp", {"seed": -1}, ["seed=-1"]),
    ("fsdp", {"optimizer__learning_rate": float("nan")}, ["optimizer.learning_rate=nan", "finite"]),
    ("fsdp", {"model__norm_eps": -1.0}, ["model.norm_eps=-1.0"]),
    ("fsdp", {"model__head_dim": 7}, ["model.head_dim=7", "multiple of 2"]),
    ("fsdp", {"model__inputs": "images"}, ["model.objective='next_token'", "model.inputs='images'"]),
    ("fsdp", {"sample_length": -1}, ["sample_length=-1", "0 for no sample"]),
    ("fsdp", {"log_every": 0}, ["log_every=0"]),
    ("fsdp", {"sample_temperature": -0.5}, ["sample_temperature=-0.5"]),
    ("fsdp", {"data__augment": True}, ["data.augment=True", "images"]),
    ("fsdp", IMAGES | {"eval_by_position": True}, ["eval_by_position=True", "model.objective='class'", "False"]),
    ("fsdp", {"model__attention": "cudnn"}, ["model.attention='cudnn'", "'cpu'", "'auto'"]),
    ("fsdp", {"stop_after": -1}, ["stop_after=-1"]),
    ("fsdp", {"stop__patience": -1}, ["stop.patience=-1"]),
    ("fsdp", {"stop__patience": 3, "eval_every": 0}, ["stop.patience=3", "eval_every=0", "smaller eval_every"]),
    ("fsdp", {"stop__patience": 3, "eval_every": 30, "steps": 30}, ["eval_every=30", "steps=30", "stop.patience=0"]),
    ("fsdp", {"runtime__check_every": -1}, ["runtime.check_every=-1", "use 0 to switch it off"]),
    ("fsdp", {"model__dtype": "float8"}, ["model.dtype='float8'"]),
    ("fsdp", {"sample_prompt": "x" * 32}, ["sample_prompt", "model.seq_len=32"]),
  ],
)
def test_mistakes_get_one_sentence_before_compilation(
  strategy: str, fields: dict, parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
  monkeypatch.setattr(strategies.Strategy, "init", lambda *_: pytest.fail("compiled before the check"))
  with one_sentence(*parts):
    train.train(config(strategy, **fields), tmp_path)


def test_a_correct_config_passes_the_checks_and_reaches_init(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  """Shows that the test above can fail: `init` is what runs after the checks."""
  monkeypatch.setattr(strategies.Strategy, "init", lambda *_: pytest.fail("reached"))
  with pytest.raises(pytest.fail.Exception, match="reached"):
    train.train(config("fsdp"), tmp_path)


def test_a_workdir_that_cannot_be_written_is_refused(tmp_path: Path):
  (tmp_path / "file").touch()
  with one_sentence("workdir=", "cannot be written"):
    train.train(config("fsdp"), tmp_path / "file" / "run")


@pytest.mark.full
def test_a_disk_that_is_full_at_the_start_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  def write(path: Path, text: str) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(pages, "write", write)
  with one_sentence(f"workdir={str(tmp_path)!r} cannot be written (No space", "free some space", kind=Unavailable):
    train.train(config("fsdp", **SHORT), tmp_path)


@pytest.mark.parametrize(
  "arguments, message",
  [
    (["--config=configs/fsdp.py:tyny"], "preset='tyny' does not exist; did you mean 'tiny'?"),
    (["--config=configs/fsdq.py"], "config='configs/fsdq.py' does not exist; did you mean 'configs/fsdp.py'?"),
    (
      ["--config=configs/fsdp.py", "--config.modle.width=3"],
      "config.modle.width is not a field; did you mean 'model.width'",
    ),
    (["--config=configs/fsdp.py", "--config.steps=many"], "config.steps=many"),
    (["--config=configs/fsdp.py", "steps=3"], "argument 'steps=3' is not understood"),
    (["--config=configs/fsdp.py:"], "preset='' does not exist"),
    (["--config=LICENSE"], "config='LICENSE' is not a Python file"),
    ([], "config is missing"),
  ],
)
def test_a_wrong_argument_gets_one_sentence(
  arguments: list[str], message: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
  monkeypatch.setattr(sys, "argv", ["train.py", *arguments])  # where ml_collections looks for fields
  with pytest.raises(SystemExit) as ended:
    command_line.parse(sys.argv)
  assert ended.value.code == 2
  error = capsys.readouterr().err
  assert error.startswith("error: ")
  assert message in error
  assert error.count("\n") == 1


def test_a_mistake_ends_the_program_with_status_2(tmp_path: Path):
  done = command("--config=configs/fsdp.py:tiny", "--config.mesh.data=3", workdir=tmp_path)
  assert done.returncode == 2
  assert done.stderr.strip().splitlines()[-1].startswith("error: mesh.data=3 ")
  assert "Traceback" not in done.stderr


def test_every_config_file_names_a_strategy_and_loads_with_every_preset():
  """Not every strategy needs a config file: a user's own may have none."""
  found = {f.stem for f in (ROOT / "configs").glob("*.py")} - {"__init__", "base", "project"}
  assert found <= set(strategies.names())
  for name, preset in itertools.product(found, base.PRESETS):
    loaded = command_line.load_config(str(ROOT / "configs" / f"{name}.py") + f":{preset}")
    assert loaded.strategy == name
  assert set(loaded.mesh) == set(MESH_AXES)


@pytest.mark.parametrize("name, preset", each_once(strategies.names(), base.PRESETS))
def test_every_preset_fits_every_strategy_on_eight_devices(name: str, preset: str):
  # Without a model there is nothing to adapt, and a made-up image is a single patch.
  needed = {"lora": {"init_from": "a model"}, "images": {"model__image_size": 32}}
  check(config(name, preset, **needed.get(preset, {})))


def check(asked: ConfigDict) -> None:
  """Makes the strategy of a config and checks its batch sizes, as train.py does before it compiles."""
  strategy = strategies.create(asked, settings.program(with_sizes_made_up(asked), "cpu"), jax.devices())
  strategy.check_batch("batch_size", asked.batch_size, asked.accumulation)
  strategy.check_batch("eval_batch_size", asked.eval_batch_size)


SCHEDULES = [{"pipeline__schedule": schedule} for schedule in ("gpipe", "1f1b", "interleaved", "zero_bubble")]
MODELS = [
  {"model__remat": remat, "model__attention": attention, "model__dtype": dtype}
  for remat, attention, dtype in itertools.product(REMAT, ("auto", "plain", "blockwise"), ("auto", *DTYPES))
]
OPTIONS = [*itertools.product(("pipeline", "three_d"), SCHEDULES), *itertools.product(("single",), MODELS)]


@pytest.mark.filterwarnings("ignore:.*nothing to interleave:UserWarning")
@pytest.mark.parametrize("preset", in_full(["lm", "tiny"], "tiny"))
@pytest.mark.parametrize("name, fields", OPTIONS)
def test_every_documented_option_works_with_a_preset(name: str, fields: dict, preset: str):
  check(config(name, preset, **fields))
