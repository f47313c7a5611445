"""Fine-tuning with adapters: checkpoints hold only them, any strategy goes on, and they go out alone or merged."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
from helpers import config, measured, one_sentence
from safetensors.numpy import load_file

import train
from checkpointing import reading
from models.parameters import bind, frozen
from reporting.source import laid_out, open_model
from tools import export
from tools.checkpoint import find, verify
from training.program import Params

SMALL = {
  "model__depth": 4, "model__width": 32, "model__mlp_width": 64, "model__seq_len": 16, "log_every": 1, "batch_size": 16,
  "eval_examples": 16, "eval_batch_size": 16, "sample_length": 0,
}  # fmt: skip
TUNED = {**SMALL, "steps": 6, "eval_every": 3, "model__lora_rank": 4, "optimizer__warmup": 0}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """A model that was trained here: the workdir `run`, and the model folder `folder`."""
  to = tmp_path_factory.mktemp("base")
  train.train(config("fsdp", **SMALL, steps=2), to / "run")
  export.main([str(to / "run"), f"--out={to / 'folder'}"])
  return to


@pytest.fixture(scope="module")
def tuned(base: Path) -> Path:
  """The workdir of a fine-tuned model."""
  train.train(config("fsdp", **TUNED, init_from=str(base / "folder")), base / "tuned")
  return base / "tuned"


def loaded(source: Path) -> tuple[Any, Params]:
  """A program and all parameters of its model, on a single device."""
  model = open_model(str(source))
  strategy = laid_out(model, "single", {}, 16, jax.devices()[:1])
  return strategy.program, jax.device_get(model.load(strategy))


def logits(source: Path) -> np.ndarray:
  program, params = loaded(source)
  return np.asarray(bind(program.sizes, params)(jnp.arange(32).reshape(2, 16)))


@pytest.mark.full
def test_a_run_goes_on_under_another_strategy(base: Path, tuned: Path, tmp_path: Path):
  """With the metrics of a run that was not stopped. It reads the other weights from the workdir of the base."""
  for name, stop in (("two_d", 2), ("pipeline", 4), ("zero1", 0)):
    fields = TUNED | {"init_from": str(base / "run"), "stop_after": stop, "pipeline__microbatches": 4}
    train.train(config(name, **fields), tmp_path / "run")
  whole, parts = measured(tuned), measured(tmp_path / "run")
  losses = lambda lines: [line["loss"] for line in lines if line["split"] == "train"]
  assert losses(parts) == pytest.approx(losses(whole), rel=1e-5)
  assert len(losses(parts)) == 6
  assert parts[-1]["loss"] == pytest.approx(whole[-1]["loss"], rel=1e-5)


@pytest.mark.full
def test_a_checkpoint_holds_only_adapters_and_their_state(tuned: Path):
  newest = reading.newest(tuned)
  saved = reading.read_record(newest)
  assert saved is not None
  names = [name for name in saved["arrays"] if name.count("/") > 3]
  assert len(names) == 3 * 14  # each with two moments
  assert all("/lora/" in name for name in names)
  assert saved["arrays"].keys() - names <= {"step", "opt_state/0/count"}
  # Not the files' sizes: they hold some bytes twice, more of them the more the machine has to do.
  store = tensorstore.KvStore.open({"driver": "ocdbt", "base": f"file://{newest}/params/"}).result()
  keys = store.list().result()
  assert all(b".lora." in key for key in keys)
  assert sum(len(store[key]) for key in keys) < 100_000 < (tuned.parent / "folder/model.safetensors").stat().st_size
  assert "whole, all 44 arrays verified" in verify(find(tuned)[-1]).health


@pytest.mark.full
def test_other_weights_stay_bit_for_bit(base: Path, tuned: Path):
  program, params = loaded(tuned)
  _, before = loaded(base / "folder")
  jax.tree.map(np.testing.assert_array_equal, frozen(program.sizes, params), before)


@pytest.mark.full
@pytest.mark.parametrize("source", ["folder", "run"])
def test_merged_adapters_compute_what_they_did_apart(source: str, base: Path, tuned: Path, tmp_path: Path):
  run = tuned
  if source == "run":
    run = tmp_path / "tuned"
    train.train(config("single", **TUNED | {"steps": 2}, init_from=str(base / "run")), run)
  export.main([str(run), f"--out={tmp_path / 'merged'}", "--merge"])
  ours = logits(tmp_path / "merged")
  np.testing.assert_allclose(ours, logits(run), rtol=1e-5, atol=1e-5)
  assert np.abs(ours - logits(base / "folder")).max() > 1e-2
  weights, before = (load_file(at / "model.safetensors") for at in (tmp_path / "merged", base / "folder"))
  np.testing.assert_array_equal(weights["lm_head.weight"], before["lm_head.weight"])


@pytest.mark.full
def test_adapters_go_out_in_the_form_of_peft(tuned: Path, tmp_path: Path):
  """The product of the two matrices is what merging adds. test_with_transformers.py loads such a folder."""
  out, merged = tmp_path / "adapters", tmp_path / "merged"
  export.main([str(tuned), f"--out={out}"])
  export.main([str(tuned), f"--out={merged}", "--merge"])
  found = json.loads((out / "adapter_config.json").read_text())
  assert (found["peft_type"], found["r"], found["lora_alpha"]) == ("LORA", 4, 16.0)
  assert found["base_model_name_or_path"] == str(tuned.parent / "folder")
  adapters, before = load_file(out / "adapter_model.safetensors"), load_file(tuned.parent / "folder/model.safetensors")
  after = load_file(merged / "model.safetensors")
  assert len(adapters) == 4 * 14
  for layer in range(4):
    for target in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
                   "mlp.up_proj", "mlp.down_proj"):  # fmt: skip
      name = f"model.layers.{layer}.{target}"
      a, b = (adapters[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
      expected = before[f"{name}.weight"] + 4 * b @ a
      np.testing.assert_allclose(after[f"{name}.weight"], expected, rtol=1e-5, atol=1e-6)
  assert "AutoPeftModelForCausalLM" in (out / "README.md").read_text()


@pytest.mark.full
def test_bfloat16_and_float32_share_a_run(base: Path, tmp_path: Path):
  """In bfloat16 the weights that are not trained are stored so, and are still known as the same."""
  for stop, dtype in ((1, "float32"), (2, "bfloat16"), (0, "float32")):
    fields = TUNED | {"steps": 3, "init_from": str(base / "run"), "model__dtype": dtype, "stop_after": stop}
    train.train(config("single", **fields), tmp_path / "run")
  assert [line["step"] for line in measured(tmp_path / "run") if line["split"] == "train"] == [1, 2, 3]


@pytest.mark.full
def test_another_base_is_refused(base: Path, tuned: Path, tmp_path: Path):
  other, run = tmp_path / "other", tmp_path / "run"
  train.train(config("single", **SMALL, steps=1, seed=7), tmp_path / "first")
  export.main([str(tmp_path / "first"), f"--out={other}"])
  shutil.copytree(tuned, run)
  with one_sentence("init_from=", "other", "is not the model that these adapters were trained with", str(base)):
    train.train(config("fsdp", **TUNED, init_from=str(other)), run)
  moved = tmp_path / "moved"
  shutil.copytree(base / "folder", moved)
  ended = train.train(config("fsdp", **TUNED, init_from=str(moved)), run)  # but a copy is the same
  assert ended["loss"] == pytest.approx(measured(tuned)[-1]["loss"])


@pytest.mark.full
def test_what_adapters_cannot_do_gets_one_sentence(base: Path, tuned: Path, tmp_path: Path):
  with one_sentence("init_from=", "holds only adapters", "tools.export", "--merge"):
    train.train(config("fsdp", **SMALL, init_from=str(tuned)), tmp_path / "run")
  with one_sentence("no adapters to merge", "leave --merge out"):
    export.main([str(base / "run"), f"--out={tmp_path / 'out'}", "--merge"])
  with one_sentence("model.lora_rank was 4 and is now 8", "name another workdir"):
    train.train(config("fsdp", **TUNED | {"model__lora_rank": 8}, init_from=str(base / "folder")), tuned)


@pytest.mark.full
def test_adapters_of_experts_are_trained_stored_and_merged(tmp_path: Path):
  """First each device has an expert, then half of four. Merged, they compute what they did apart."""
  mixture = {"model__experts": 8, "model__expert_width": 16, "model__depth": 2}
  train.train(config("single", **SMALL | mixture, steps=2), tmp_path / "base")
  fields = TUNED | mixture | {"steps": 4, "init_from": str(tmp_path / "base")}
  train.train(config("single", **fields), tmp_path / "whole")
  for name, stop in (("expert", 2), ("expert_fsdp", 0)):
    train.train(config(name, **fields, stop_after=stop), tmp_path / "run")
  losses = lambda run: [line["loss"] for line in measured(tmp_path / run) if line["split"] == "train"]
  assert losses("run") == pytest.approx(losses("whole"), rel=1e-5)
  program, params = loaded(tmp_path / "run")
  _, before = loaded(tmp_path / "base")
  jax.tree.map(np.testing.assert_array_equal, frozen(program.sizes, params), before)
  saved = reading.read_record(reading.newest(tmp_path / "run"))
  assert not [name for name in saved["arrays"] if name.startswith("params/") and "/lora/" not in name]
  assert saved["arrays"]["params/blocks/mlp/lora/up/a"][0] == [2, 8, 32, 4]
  with one_sentence("PEFT", "model.experts=8", "--merge"):
    export.main([str(tmp_path / "run"), f"--out={tmp_path / 'adapters'}"])
  assert not (tmp_path / "adapters").exists()
  export.main([str(tmp_path / "run"), f"--out={tmp_path / 'merged'}", "--merge"])
  ours = logits(tmp_path / "merged")
  np.testing.assert_allclose(ours, logits(tmp_path / "run"), rtol=1e-5, atol=1e-5)
  assert np.abs(ours - logits(tmp_path / "base")).max() > 1e-3
