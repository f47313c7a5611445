"""What a folder gave comes out again bit for bit, and a trained model becomes a folder that computes the same."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import jax
import ml_dtypes
import model_folders
import numpy as np
import pytest
from helpers import config, each_once, model_sizes, one_sentence, program, random_params, strategy
from safetensors.numpy import load_file
from tokenizers import Tokenizer

import train
from checkpointing import pretrained
from checkpointing.pretrained import families
from checkpointing.pretrained.export import export
from checkpointing.pretrained.tensors import adapter_tensors
from errors import ConfigError
from models.lora import LoraSizes
from tools import export as tool

SMALL = {
  "steps": 2, "batch_size": 16, "eval_batch_size": 16, "eval_examples": 16, "sample_length": 0, "model__seq_len": 16,
  "model__width": 32, "model__depth": 2, "model__mlp_width": 64,
}  # fmt: skip


def weights_of(folder: Path) -> dict[str, np.ndarray]:
  return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


def shape_of(folder: Path) -> families.Shape:
  return families.read(json.loads((folder / "config.json").read_text()), "it")


def unpacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """With the numbers of those that are stored in four bits each, which are written as they are trained."""
  found = {name: x for name, x in tensors.items() if not name.endswith(("_blocks", "_scales"))}
  for name in (name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")):
    blocks, scales = tensors[f"{name}_blocks"], tensors[f"{name}_scales"].view(ml_dtypes.float8_e8m0fnu)
    bits = np.stack([blocks % 16, blocks // 16], axis=-1).reshape(*scales.shape, 32)
    numbers = bits.view(ml_dtypes.float4_e2m1fn).astype(np.float32) * scales.astype(np.float32)[..., None]
    found[name] = numbers.reshape(*scales.shape[:2], -1).swapaxes(1, 2)
  return found


@pytest.mark.parametrize("name, shard_bytes", each_once(model_folders.NAMES, [10**9, 10_000]))
def test_what_comes_in_goes_out_bit_for_bit(name: str, shard_bytes: int, tmp_path: Path):
  """In one file, and in several with an index."""
  out, given = tmp_path / "out", model_folders.FOLDER / name
  runner, params = model_folders.loaded(name, "single")
  read = lambda weight: np.asarray(model_folders.weight(params, weight))
  export(out, runner.program.sizes, read, {}, shard_bytes=shard_bytes, context=1 << 17)
  ours, theirs = weights_of(out), unpacked(weights_of(given))
  assert ours.keys() == theirs.keys()
  for tensor, x in theirs.items():
    np.testing.assert_array_equal(ours[tensor], x)
  assert (out / "model.safetensors").exists() == (shard_bytes == 10**9)
  head_dim = {"head_dim": runner.program.sizes.head_dim}
  assert pretrained.Folder(str(out)).fields == pretrained.Folder(str(given)).fields | head_dim
  assert shape_of(out).context == 1 << 17
  if name == "llama3":
    assert '"original_max_position_embeddings": 16\n' in (out / "config.json").read_text()  # and no 16.0
  pretrained.Folder(str(out)).check(runner.program.sizes)


def test_a_mixture_with_dense_layers_goes_out_and_comes_in(tmp_path: Path):
  """A folder numbers all layers; here those with experts are a stack of their own: layers 3 and 5."""
  fields = {"width": 16, "heads": 2, "kv_heads": 2, "mlp_width": 40, "experts": 4, "expert_width": 24, "depth": 6}
  sizes = model_sizes(**fields, dense_layers=3, experts_every=2, qk_norm=True, router="topk_softmax", router_aux=0.03)
  params = random_params(sizes)
  export(tmp_path / "out", sizes, lambda weight: model_folders.weight(params, weight), {})
  written, mlps = weights_of(tmp_path / "out"), [params[stack]["mlp"] for stack in ("dense_blocks", "blocks")]
  np.testing.assert_array_equal(written["model.layers.0.mlp.up_proj.weight"], mlps[0]["up"][0].T)
  np.testing.assert_array_equal(written["model.layers.4.mlp.up_proj.weight"], mlps[0]["up"][3].T)
  np.testing.assert_array_equal(written["model.layers.5.mlp.experts.3.up_proj.weight"], mlps[1]["up"][1, 3].T)
  np.testing.assert_array_equal(written["model.layers.3.mlp.gate.weight"], mlps[1]["router"][0].T)
  said = json.loads((tmp_path / "out/config.json").read_text())
  assert (said["mlp_only_layers"], said["decoder_sparse_step"]) == ([0, 1, 2], 2)
  assert said["router_aux_loss_coef"] == pytest.approx(0.03 * 2 / sizes.experts.per_token)  # of two layers
  read = shape_of(tmp_path / "out").fields
  assert {name: read[name] for name in ("dense_layers", "experts_every", "mlp_width", "expert_width")} == {
    "dense_layers": 3, "experts_every": 2, "mlp_width": 40, "expert_width": 24
  }  # fmt: skip
  assert read["router_aux"] == pytest.approx(0.03)
  runner = strategy("expert_fsdp", dataclasses.replace(program(), sizes=sizes))
  loaded = pretrained.load(pretrained.Folder(str(tmp_path / "out")), sizes, runner.abstract_state().params)
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(loaded), params)
  adapted = dataclasses.replace(sizes, lora=LoraSizes(2, 4.0, ("query",)))
  names = {tensor.name.partition(".self_attn")[0] for tensor in adapter_tensors(adapted)}
  assert names == {f"base_model.model.model.layers.{layer}" for layer in range(6)}


def test_dense_layers_of_another_family_are_refused():
  with one_sentence("model.dense_layers=1", "model.qk_norm=False", "model.dense_layers=0"):
    families.of(model_sizes(experts=4, dense_layers=1))


@pytest.mark.full
def test_a_model_keeps_the_context_of_its_base(tmp_path: Path, capsys: pytest.CaptureFixture):
  """Through two trainings on shorter texts; a longer text than any before gets a note, and counts from then on."""
  folder = shutil.copytree(model_folders.FOLDER / "llama", tmp_path / "base")
  given = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 24}
  (folder / "config.json").write_text(json.dumps(given))
  shape = {f"model__{name}": size for name, size in shape_of(folder).fields.items()}
  fields = SMALL | shape | {"data__name": "synthetic", "steps": 1}
  base = folder
  for length, expected in ((16, 24), (16, 24), (48, 48)):
    run, out = tmp_path / f"run-{base.name}", tmp_path / f"out-{base.name}"
    train.train(config("single", **fields | {"init_from": str(base), "model__seq_len": length}), run)
    tool.main([str(run), f"--out={out}"])
    assert shape_of(out).context == expected
    assert f"{expected} tokens" in (out / "README.md").read_text()
    note = "note      model.seq_len=48 is more than the 24 tokens that they were made for"
    assert (note in capsys.readouterr().out) == (length > 24)
    base = run


def test_a_failed_export_leaves_no_folder(tmp_path: Path):
  def read(weight: str) -> np.ndarray:
    raise ConfigError("damaged")

  with pytest.raises(ConfigError):
    export(tmp_path / "out", model_sizes(depth=1), read, {})
  assert not (tmp_path / "out").exists()


@pytest.mark.full
@pytest.mark.parametrize("tokenizer, vocab_size", [("bytes", 256), ("bpe", 300)])
def test_a_trained_model_goes_out_with_its_tokenizer_and_in_again(tokenizer: str, vocab_size: int, tmp_path: Path):
  """Its loss as a model folder is what it was; the ids of texts are the same."""
  text = tmp_path / "text"
  text.mkdir()
  (text / "a.txt").write_text("Some words, and others; Ā, é and 😀 take several bytes.\n" * 300)
  data = {"data__name": "text", "data__path": str(text), "data__tokenizer": tokenizer, "model__vocab_size": vocab_size}
  first = train.train(config("two_d", **SMALL | data), tmp_path / "run")
  out = tmp_path / "out"
  tool.main([str(tmp_path / "run"), f"--out={out}"])
  sample = "Words, é\n 😀!"
  dataset = train.data.load(config(**SMALL | data))
  assert Tokenizer.from_file(str(out / "tokenizer.json")).encode(sample).ids == dataset.text.encode(sample)
  assert Tokenizer.from_file(str(out / "tokenizer.json")).decode(dataset.text.encode(sample)) == sample
  ends = json.loads((out / "generation_config.json").read_text())["eos_token_id"]
  assert ends == json.loads((out / "config.json").read_text())["eos_token_id"] == (0 if tokenizer == "bytes" else ends)
  again = SMALL | data | {"data__tokenizer": "bytes", "init_from": str(out), "model__width": 64}
  frozen = {"optimizer__learning_rate": 1e-30, "steps": 1}
  assert train.train(config("fsdp", **again | frozen), tmp_path / "new")["loss"] == pytest.approx(
    first["loss"], rel=1e-5
  )


@pytest.mark.full
def test_the_model_card_says_how_the_model_was_made(tmp_path: Path):
  train.train(config("fsdp", **SMALL | {"data__name": "synthetic"}), tmp_path / "run")
  tool.main([str(tmp_path / "run"), f"--out={tmp_path / 'out'}", "--dtype=bfloat16"])
  card = (tmp_path / "out/README.md").read_text()
  for part in ("synthetic", "2 with 16 sequences", "fsdp on mesh data=8", "nats per token"):
    assert part in card
  assert "Command" not in card
  assert {str(x.dtype) for x in weights_of(tmp_path / "out").values()} == {"bfloat16"}


def test_a_model_card_shows_local_paths_only_if_asked():
  """The command, the data and the base are named by the paths that the user gave."""
  saved = {
    "arrays": {"params/embedding": ((4, 2), "float32")}, "loss": 1.5, "context": 16, "loop": {"step": 3},
    "data": {"names": ["", "/home/me/secret/texts", "synthetic", "~/se`c|ret\n/more/"], "batch_size": 8},
    "strategy": "fsdp on mesh data=8", "versions": {"jax": "1.2.3"}, "base": {"path": "/home/me/secret/base"},
    "command": "python train.py --workdir=/home/me/secret/run",
  }  # fmt: skip
  card = tool.card(model_sizes(), saved, whole=True)
  assert "secret" not in card
  assert "/" not in card.partition("| Data")[2].partition("|\n")[0]
  assert "| Data | `the Python standard library`, `texts`, `synthetic`, `more` |" in card
  assert "| Fine-tuned from | `base` |" in card
  assert "Window" not in card
  assert "| Window | 512 tokens |" in tool.card(model_sizes(window=512), saved, whole=True)
  whole = tool.card(model_sizes(), saved, whole=True, with_paths=True)
  assert "| Command | `python train.py --workdir=/home/me/secret/run` |" in whole
  assert "`/home/me/secret/texts`" in whole
  assert "| Fine-tuned from | `/home/me/secret/base` |" in whole
  assert "`~/se'c\\|ret /more/`" in whole  # a name does not break the table


@pytest.mark.parametrize(
  "arguments, parts",
  [
    (["nowhere", "--out=new"], ["'nowhere'", "no workdir with a checkpoint"]),
    (["nowhere", "--out=new", "--dtype=int8"], ["dtype='int8'", "float32"]),
  ],
)
def test_mistakes_get_one_sentence(arguments: list[str], parts: list[str]):
  with one_sentence(*parts):
    tool.main(arguments)


def test_a_folder_with_files_is_not_written_over(tmp_path: Path):
  (tmp_path / "a").write_text("")
  with one_sentence(f"out={str(tmp_path)!r}", "exists already"):
    export(tmp_path, model_sizes(depth=1), lambda weight: np.zeros(1), {})


@pytest.mark.parametrize(
  "fields, parts",
  [
    ({"router": "sigmoid_bias"}, ["model.router='sigmoid_bias'", "use model.router='softmax_topk'"]),
    ({"router": "topk_softmax"}, ["model.router='topk_softmax'", "model.qk_norm=False"]),
    ({"qkv_bias": True}, ["model.qkv_bias=True", "without biases"]),
    ({"shared_experts": 1}, ["model.shared_experts=1", "use 0"]),
    ({"router_scale": 2.5}, ["model.router_scale=2.5", "1.0"]),
  ],
)
def test_a_mixture_of_no_family_is_refused(fields: dict, parts: list[str], tmp_path: Path):
  with one_sentence(*parts):
    export(tmp_path / "out", model_sizes(experts=4, **fields), lambda weight: np.zeros(1), {})


def test_an_image_classifier_is_refused(tmp_path: Path):
  images = model_sizes(inputs="images", objective="class", image_size=8, channels=1, classes=2)
  with one_sentence("model.inputs='images'", "predict the next token"):
    export(tmp_path / "out", images, lambda weight: np.zeros(1), {})


def test_a_family_may_scale_positions_unless_a_config_denies_it():
  """In the library, gpt-oss without `rope_scaling`, or with null, is scaled by YaRN. What is exported says so."""
  given = json.loads((model_folders.FOLDER / "gpt_oss" / "config.json").read_text())
  del given["rope_parameters"]
  for said in ({}, {"rope_scaling": None}, {"rope_parameters": None}):
    fields = families.read(given | said, "it").fields
    assert fields["rope_scaling_kind"] == "yarn_unrounded"
    assert fields["rope_scaling"] == pytest.approx((32, 1, 32, 4096, 0.1 * math.log(32) + 1))
    assert fields["rope_base"] == 150_000
  denied = families.read(given | {"rope_scaling": {"rope_type": "default"}}, "it").fields
  assert denied["rope_scaling"] == ()
  sizes = model_folders.program_of("gpt_oss").sizes
  written = families.write(dataclasses.replace(sizes, rope_scaling=()), "float32", None)
  assert families.read(written, "it").fields["rope_scaling"] == ()
