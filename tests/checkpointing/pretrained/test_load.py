"""Models in the form of Hugging Face compute what the library transformers does, under every strategy."""

import dataclasses
import json
import math
import re
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import model_folders
import numpy as np
import pytest
from helpers import ROOT, assert_trees_close, config, in_full, model_sizes, one_sentence, program, strategy
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

import strategies
import train
from checkpointing import pretrained, record
from checkpointing.pretrained.export import export
from models.ops.loss import Targets
from models.ops.routing import penalty
from models.parameters import bind
from reporting.source import open_model
from tools import launch
from training.program import Params

TOLERANCE = 1e-4
FRESH = {"steps": 1, "eval_examples": 16, "batch_size": 16, "eval_batch_size": 16, "sample_length": 0}


# Gemma 3 and OLMo 3 have all that others have but biases: scaled angles, norms, windows. `llama_untied` has a
# head, and a config.json that denies it.
@pytest.mark.parametrize("name", in_full(model_folders.NAMES, "gemma3", "mixtral"))
def test_logits_and_gradients_equal_those_of_transformers(name: str):
  expected = np.load(model_folders.FOLDER / name / "expected.npz")
  runner, params = model_folders.loaded(name)
  sizes, tokens = runner.program.sizes, jnp.asarray(expected["tokens"], jnp.int32)

  def loss_and_logits(params: Params) -> tuple[jax.Array, jax.Array]:
    logits = bind(sizes, params)(tokens[:, :-1])
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1)
    return -chosen.mean(), logits

  (loss, logits), gradients = jax.jit(jax.value_and_grad(loss_and_logits, has_aux=True))(params)
  assert float(loss) == pytest.approx(float(expected["loss"]), rel=TOLERANCE)
  assert_trees_close(logits, expected["logits"], TOLERANCE)
  ours = model_folders.of_tensors(sizes, gradients)
  theirs = {key.removeprefix("gradient "): expected[key] for key in expected if key.startswith("gradient ")}
  assert ours.keys() == theirs.keys()
  assert_trees_close(ours, theirs, TOLERANCE)


@pytest.mark.parametrize(
  "name",
  in_full(
    ["mixtral", "qwen3_moe", "qwen3_moe_dense", "qwen3_moe_every_second", "qwen3_moe_unnormed", "gpt_oss"], "qwen3_moe"
  ),
)
def test_the_balance_loss_counts_as_in_transformers(name: str):
  """Of one text. In the library the blocks of a model have one loss together, here each has its own."""
  expected = np.load(model_folders.FOLDER / name / "expected.npz")
  runner, params = model_folders.loaded(name)
  sizes, tokens = dataclasses.replace(runner.program.sizes, seq_len=39), expected["tokens"][:1].astype(np.int32)
  targets = Targets(tokens[:, 1:], np.ones((1, 39), bool))
  added = lambda params: penalty(bind(sizes, params).loss_sums(tokens[:, :-1], targets)[1], sizes.experts)
  assert float(jax.jit(added)(params)) / 39 == pytest.approx(float(expected["balance"]), rel=1e-5)


@pytest.mark.parametrize(
  "name, under",
  in_full(
    [
      *(("llama", name) for name in strategies.names() if name != "single"),
      ("mixtral", "expert"),
      ("mixtral", "fsdp"),
      ("gpt_oss_mxfp4", "fsdp"),
      ("gpt_oss_mxfp4", "two_d"),
      ("gpt_oss_mxfp4", "hsdp"),
    ],
    ("llama", "two_d"),
  ),
)
def test_every_strategy_loads_the_same_weights_to_where_its_layout_wants_them(
  name: str, under: str, monkeypatch: pytest.MonkeyPatch
):
  """A tensor at a time and some of its rows, as large models are read."""
  _, expected = model_folders.loaded(name)
  monkeypatch.setattr(sys.modules["checkpointing.pretrained.load"], "PART_BYTES", 0)
  monkeypatch.setattr(sys.modules["checkpointing.pretrained.folder"], "READ_BYTES", 1000)
  runner, params = model_folders.loaded(name, under)
  jax.tree.map(np.testing.assert_array_equal, params, expected)
  assert jax.tree.map(lambda x: x.sharding, params) == runner.state_sharding.params


@pytest.mark.full
def test_no_process_holds_more_than_its_share_and_the_largest_tensor(tmp_path: Path, capfd: pytest.CaptureFixture):
  """Two processes of 4 devices load 180 MB, a third of it the embedding. Reading all of it would need twice as much."""
  sizes = model_sizes(width=256, depth=4, experts=32, expert_width=128, kv_heads=4, vocab_size=1 << 16)
  shapes = {
    name: x.shape
    for name, x in record.named(strategy("single", dataclasses.replace(program(), sizes=sizes)).abstract_state().params)
  }
  export(tmp_path / "model", sizes, lambda weight: np.ones(shapes[weight], np.float32), {})
  whole = 4 * sum(math.prod(shape) for shape in shapes.values())
  arguments = [f"--config={ROOT}/configs/fsdp.py:tiny", f"--config.init_from={tmp_path / 'model'}"]
  assert launch.launch(2, 4, arguments, Path(__file__).with_name("load_memory.py")) == 0
  needed = [int(found) for found in re.findall(r"needed (\d+) bytes", capfd.readouterr().out)]
  assert len(needed) == 2
  assert min(needed) > 0.9 * whole / 2, "the measured memory does not include the weights"
  assert max(needed) < whole / 2 + 4 * math.prod(shapes["embedding"])


def words(folder: Path) -> None:
  """Writes a tokenizer of a few words."""
  vocabulary = {word: number for number, word in enumerate(["?", "a", "few", "words", "and", "more", "<end>"])}
  made = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
  made.pre_tokenizer = pre_tokenizers.Whitespace()
  made.save(str(folder / "tokenizer.json"))


@pytest.mark.full
def test_a_run_starts_from_a_model_folder_and_its_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture):
  """With its sizes, whatever the config says of them, and the loss of these weights."""
  folder = shutil.copytree(model_folders.FOLDER / "qwen3", tmp_path / "model")
  change(folder, lambda x: x | {INV_FREQ: x[NORM]})
  words(folder)
  (tmp_path / "a.txt").write_text("a few words and a few more words " * 400)
  fields = {"data__name": "text", "data__path": str(tmp_path / "a.txt"), "init_from": str(folder)}
  frozen = FRESH | fields | {"model__seq_len": 16, "optimizer__learning_rate": 1e-30}
  losses = [train.train(config(name, **frozen), tmp_path / name)["loss"] for name in ("fsdp", "single")]
  assert losses[0] == pytest.approx(losses[1], rel=1e-5)
  shown = capsys.readouterr().out
  assert f"initial   parameters of {folder}, a qwen3 model in F32" in shown
  assert f"note      tensors such as '{INV_FREQ}' (1) are not read: they follow from config.json" in shown
  made = json.loads((tmp_path / "fsdp/config.json").read_text())["model"]
  assert (made["width"], made["head_dim"], made["qk_norm"], made["vocab_size"]) == (32, 8, True, 64)


def edit(folder: Path, **fields: object) -> None:
  file = folder / "config.json"
  file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def change(folder: Path, f: Callable[[dict], dict]) -> None:
  save_file(f(load_file(folder / "model.safetensors")), folder / "model.safetensors")


def cut(folder: Path) -> None:
  file = folder / "model.safetensors"
  file.write_bytes(file.read_bytes()[:-1])


def index(folder: Path, **places: str) -> None:
  every = dict.fromkeys(load_file(folder / "model.safetensors"), "model.safetensors")
  (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": every | places}))


def one_tensor_as(folder: Path, dtype: str) -> None:
  """Changes the header only: as many bytes in another type."""
  data = (folder / "model.safetensors").read_bytes()
  (size,) = struct.unpack("<Q", data[:8])
  header = data[8 : 8 + size].replace(b'"F32"', f'"{dtype}"'.encode(), 1)
  (folder / "model.safetensors").write_bytes(data[:8] + header.ljust(size) + data[8 + size :])


def shards(folder: Path, *files: str) -> None:
  """Copies of the weights as these files, and an index that names them in the first."""
  weights = load_file(folder / "model.safetensors")
  for file in files:
    save_file(weights, folder / file)
  (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(weights, files[0])}))


def renamed(f: Callable[[str], str]) -> Callable[[Path], None]:
  return lambda folder: change(folder, lambda x: {f(name): w for name, w in x.items()})


def adapters_of_many_letters(folder: Path) -> None:
  (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "x" * 100_000}))


def adapters(folder: Path) -> None:
  for file in ("config.json", "model.safetensors"):
    (folder / file).unlink()
  (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "some/base"}')


def pickled(folder: Path) -> None:
  (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def pointer(folder: Path) -> None:
  (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")


def beside_the_index(folder: Path) -> None:
  """A tensor in a file of the index, which does not name it."""
  index(folder)
  change(folder, lambda x: x | {"model.norm.bias": x[NORM]})


NORM = "model.norm.weight"
HEAD, EMBEDDING, INV_FREQ = (
  "lm_head.weight",
  "model.embed_tokens.weight",
  "model.layers.0.self_attn.rotary_emb.inv_freq",
)


@pytest.mark.parametrize(
  "break_it, parts",
  [
    (lambda f: edit(f, model_type="gpt2"), ["model_type", "'gpt2'", "gemma3_text, gpt_oss, llama, mistral"]),
    (lambda f: edit(f, hidden_act="gelu"), ["config.json", "hidden_act='gelu'"]),
    (lambda f: edit(f, alibi=True), ["config.json", "'alibi'", "not known"]),
    (lambda f: edit(f, attention_bias=True), ["attention_bias=True"]),
    (lambda f: edit(f, hidden_size="many"), ["hidden_size='many'", "positive number"]),
    (lambda f: edit(f, rope_parameters={"rope_type": "longrope", "factor": 4.0}), ["'longrope'", "'llama3'", "'yarn'"]),
    (lambda f: edit(f, rope_parameters={"rope_type": "yarn", "factor": "4"}), ["'factor': '4'", "with a factor"]),
    (
      lambda f: edit(f, rope_parameters={"rope_type": "yarn", "factor": 4.0, "truncate": "no"}),
      ["'truncate': 'no'", "'yarn'"],
    ),
    (lambda f: (f / "config.json").write_text("{"), ["config.json", "copy it again"]),
    (lambda f: (f / "model.safetensors").unlink(), ["'model.safetensors'", "copy it there"]),
    (cut, ["'model.safetensors' is damaged"]),
    (lambda f: index(f, **{NORM: "model-2.safetensors"}), ["'model-2.safetensors'", "copy it there"]),
    (lambda f: index(f, **{NORM: "../model.safetensors"}), ["'../model.safetensors'", "in the same folder"]),
    (lambda f: index(f, **{NORM: ["model.safetensors"]}), ["['model.safetensors']", "in the same folder"]),
    (lambda f: index(f, **{"model.norm.bias": "model.safetensors"}), ["'model.norm.bias'", "which holds none"]),
    (lambda f: change(f, lambda x: x | {"model.norm.bias": x[NORM]}), ["'model.norm.bias'", "llama"]),
    (lambda f: change(f, lambda x: {k: v for k, v in x.items() if k != NORM}), [f"lacks the tensor '{NORM}'"]),
    (lambda f: change(f, lambda x: x | {NORM: x[NORM][:-2]}), [NORM, "[30]", "[32]"]),
    (lambda f: one_tensor_as(f, "I32"), ["I32", "F64, F32, F16, BF16"]),
    (lambda f: change(f, lambda x: x | {NORM: x[NORM].astype(jnp.float8_e4m3fn)}), ["F8_E4M3", "F64, F32, F16, BF16"]),
    (adapters, ["adapters (adapter_config.json) of 'some/base'", "merge_and_unload()"]),
    (lambda f: (f / "adapter_config.json").write_text("{}"), ["adapters (adapter_config.json)"]),
    (adapters_of_many_letters, ["adapters (adapter_config.json) of 'xxx", "xxx … xxx"]),
    (renamed(lambda name: name.removeprefix("model.")), [EMBEDDING, "without its head", "AutoModelForCausalLM"]),
    (renamed(lambda name: "_orig_mod." + name), [EMBEDDING, "under '_orig_mod.'", "by itself"]),
    (lambda f: edit(f, tie_word_embeddings=False), [f"lacks the tensor '{HEAD}'", "set tie_word_embeddings to true"]),
    (lambda f: shards(f, "model-1.safetensors"), ["'model.safetensors', and an", "of other files; remove"]),
    (beside_the_index, ["'model.norm.bias' in 'model.safetensors'", "does not name it"]),
    (lambda f: edit(f, rope_parameters={"partial_rotary_factor": 0.5}), ["'partial_rotary_factor': 0.5", "'llama3'"]),
    (lambda f: edit(f, rope_scaling="linear"), ["rope_scaling='linear'", "fields"]),
    (lambda f: edit(f, num_key_value_heads="2"), ["num_key_value_heads='2'", "positive number"]),
    (lambda f: edit(f, rms_norm_eps=None), ["rms_norm_eps=None", "a number"]),
    (lambda f: edit(f, tie_word_embeddings="false"), ["tie_word_embeddings='false'", "true or false"]),
    (lambda f: edit(f, num_hidden_layers=10**40), ["num_hidden_layers=1000", "positive number"]),
    (lambda f: change(f, lambda x: x | {NORM: x[NORM][:0]}), [NORM, "without its numbers", "[0]", "gathered"]),
    (lambda f: (f / "model.safetensors").rename(f / "model-1.safetensors"), ["['model-1.safetensors']", "neither"]),
    (pickled, ["pytorch_model*.bin", "safetensors", "save_pretrained"]),
    (pointer, ["'model.safetensors'", "Git LFS", "git lfs pull"]),
  ],
)  # fmt: skip
def test_a_damaged_or_unknown_model_gets_one_sentence(
  break_it: Callable[[Path], object], parts: list[str], tmp_path: Path
):
  folder = shutil.copytree(model_folders.FOLDER / "llama3", tmp_path / "model")
  break_it(folder)
  with one_sentence(*parts):
    adopted = pretrained.adopt(config(init_from=str(folder)))
    pretrained.Folder(str(folder)).check(train.settings.program(adopted, "cpu").sizes)


@pytest.mark.parametrize(
  "layers, parts",
  [
    ([1], ["mlp_only_layers=[1]", "only the first layers"]),
    ([0, 2], ["mlp_only_layers=[0, 2]", "only the first layers"]),
    ("first", ["mlp_only_layers='first'"]),
    ([0, 1], ["mlp_only_layers=[0, 1]", "not all"]),
    ([0], ["'model.layers.0.mlp.experts.0.", "does not have"]),  # its weights say that layer 0 has experts
  ],
)
def test_dense_layers_that_are_not_the_first_get_one_sentence(layers: object, parts: list[str], tmp_path: Path):
  folder = shutil.copytree(model_folders.FOLDER / "qwen3_moe", tmp_path / "model")
  edit(folder, mlp_only_layers=layers)
  with one_sentence(*parts):
    adopted = pretrained.adopt(config(init_from=str(folder), model__seq_len=48))
    pretrained.Folder(str(folder)).check(train.settings.program(adopted, "cpu").sizes)


@pytest.mark.parametrize(
  "name, part",
  [
    ("snapshots", "snapshots/REVISION"),
    ("a.gguf", "as GGUF"),
    ("a.safetensors", "without a config.json"),
    ("", "a hub"),
  ],
)
def test_a_model_in_another_form_is_recognised(name: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.chdir(tmp_path)
  if name:
    (tmp_path / "some/model" / name).mkdir(parents=True)
  with one_sentence("'some/model'", "no folder with a model's safetensors", part):
    open_model("some/model")


def test_a_head_that_is_the_embedding_is_tied_to_it(tmp_path: Path):
  """Also if it is stored in another type. One that differs anywhere is not."""
  folder = shutil.copytree(model_folders.FOLDER / "llama3", tmp_path / "model")
  change(folder, lambda x: x | {EMBEDDING: x[EMBEDDING].astype(jnp.bfloat16)})
  change(folder, lambda x: x | {HEAD: x[EMBEDDING].astype(np.float32)})
  found, sizes = pretrained.Folder(str(folder)), model_folders.program_of("llama3").sizes
  assert found.fields["tied_embedding"]
  assert found.notes == (
    f"config.json ties the head to the embedding, and '{HEAD}' is the embedding: it is used for both",
  )
  found.check(sizes)

  change(folder, lambda x: x | {HEAD: x[HEAD] + np.eye(*x[HEAD].shape, k=-63)[:, ::-1].astype(np.float32)})
  found = pretrained.Folder(str(folder))
  assert not found.fields["tied_embedding"]
  assert found.notes == (
    f"config.json ties the head to the embedding, and '{HEAD}' is another than the embedding: it is used",
  )
  with one_sentence(HEAD, "does not have"):  # a run that took it for the embedding
    found.check(sizes)


EXPERT = "model.layers.1.block_sparse_moe.experts.5.w3.weight"


@pytest.mark.parametrize(
  "break_it, parts",
  [
    (lambda f: change(f, lambda x: {k: v for k, v in x.items() if k != EXPERT}), [f"lacks the tensor '{EXPERT}'"]),
    (lambda f: change(f, lambda x: x | {EXPERT: x[EXPERT][:-1]}), [EXPERT, "[15, 16]", "[16, 16]"]),
    (lambda f: edit(f, num_local_experts=7), ["experts.7.w1.weight'", "mixtral"]),
    (lambda f: edit(f, num_local_experts=None), ["num_local_experts=None", "positive number"]),
    (lambda f: edit(f, num_experts_per_tok=9), ["model.experts_per_token=9", "model.experts=8"]),
    (lambda f: edit(f, router_jitter_noise=0.1), ["router_jitter_noise=0.1"]),
    (lambda f: edit(f, decoder_sparse_step=2), ["decoder_sparse_step=2"]),
    (lambda f: edit(f, mlp_only_layers=[0]), ["mlp_only_layers=[0]"]),
    (lambda f: edit(f, model_type="mistral"), ["'num_experts_per_tok'", "not known"]),
    (lambda f: edit(f, model_type="olmoe"), ["olmoe", "norms over all heads"]),
  ],
)  # fmt: skip
def test_a_damaged_mixture_gets_one_sentence(break_it: Callable[[Path], object], parts: list[str], tmp_path: Path):
  folder = shutil.copytree(model_folders.FOLDER / "mixtral", tmp_path / "model")
  break_it(folder)
  with one_sentence(*parts):
    adopted = pretrained.adopt(config(init_from=str(folder), model__seq_len=48))
    pretrained.Folder(str(folder)).check(train.settings.program(adopted, "cpu").sizes)


@pytest.mark.parametrize("vocab_size, parts", [(6, ["7 ids", "knows 6"]), (None, ["damaged tokenizer.json"])])
def test_a_tokenizer_that_does_not_fit_is_refused(vocab_size: int | None, parts: list[str], tmp_path: Path):
  folder = shutil.copytree(model_folders.FOLDER / "llama3", tmp_path / "model")
  words(folder)
  if vocab_size:
    edit(folder, vocab_size=vocab_size)
  else:
    (folder / "tokenizer.json").write_text("{")
  with one_sentence("init_from=", *parts):
    pretrained.adopt(config(init_from=str(folder), data__name="text"))


@pytest.mark.parametrize("in_vocabulary", [False, True])
def test_a_tokenizer_may_have_added_tokens_that_its_model_lacks(in_vocabulary: bool, tmp_path: Path):
  """As models that others have published do: [PAD] was added, and the embedding was not made larger."""
  folder = shutil.copytree(model_folders.FOLDER / "llama3", tmp_path / "model")
  words(folder)
  file = folder / "tokenizer.json"
  if in_vocabulary:
    stored = json.loads(file.read_text())
    stored["model"]["vocab"]["[PAD]"] = 7
    file.write_text(json.dumps(stored))
  made = Tokenizer.from_file(str(file))
  made.add_special_tokens(["[PAD]"])
  made.save(str(file))
  assert made.token_to_id("[PAD]") == 7
  edit(folder, vocab_size=7)
  adopted = pretrained.adopt(config(init_from=str(folder), data__name="text"))
  assert (adopted.data.tokenizer, adopted.model.vocab_size) == (str(folder), 7)


@pytest.mark.parametrize("names", [["tokenizer.model"], ["merges.txt", "vocab.json"]])
def test_a_tokenizer_in_another_form_is_refused(names: list[str], tmp_path: Path):
  """The model would be trained on bytes. Unless the config names the tokenizer."""
  folder = shutil.copytree(model_folders.FOLDER / "llama3", tmp_path / "model")
  for name in names:
    (folder / name).write_text("{}")
  with one_sentence("has no tokenizer.json", f"only {', '.join(names)}", "save_pretrained", "data.tokenizer"):
    pretrained.adopt(config(init_from=str(folder), data__name="text"))
  with one_sentence("has no tokenizer.json"):
    open_model(str(folder))
  pretrained.adopt(config(init_from=str(folder), data__name="text", data__tokenizer="my/tokenizer.json"))


def test_half_and_double_precision_are_read_as_they_are(tmp_path: Path):
  """And becomes the dtype of the parameters."""
  folder = shutil.copytree(model_folders.FOLDER / "llama", tmp_path / "model")
  whole = load_file(folder / "model.safetensors")
  rounded = {name: x.astype(jnp.bfloat16 if "mlp" in name else np.float64) for name, x in whole.items()}
  save_file(rounded, folder / "model.safetensors")
  runner, _ = model_folders.loaded("llama")
  params = pretrained.load(pretrained.Folder(str(folder)), runner.program.sizes, runner.abstract_state().params)
  found = model_folders.of_tensors(runner.program.sizes, params)
  for name, x in rounded.items():
    assert found[name].dtype == np.float32
    np.testing.assert_array_equal(found[name], x.astype(np.float32))
