"""A model with a window keeps it: in the record, in everything that reads the workdir, and in what is exported."""

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import jax
import model_folders
import pytest
from helpers import config, model_sizes, one_sentence
from ml_collections import ConfigDict

import train
from checkpointing import initial, pretrained, record
from checkpointing.pretrained import families
from checkpointing.reading import read_record
from models import parameters
from models.windows import kinds_of_layers
from reporting.source import config_of, laid_out, open_model
from tools import evaluate, export, generate
from training import settings

S, F = "sliding_attention", "full_attention"
SIZES = {
  "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
  "num_key_value_heads": 4, "vocab_size": 64,
}  # fmt: skip
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "num_local_experts": 4}
ON = {"use_sliding_window": True}
# The window of each layer, as the layers of transformers 5.24 have it for this config.json; 0: none.
OF_LAYERS: list[tuple[str, dict[str, Any], list[int]]] = [
  ("llama", {}, [0, 0, 0, 0]),
  ("mistral", {}, [4096, 4096, 4096, 4096]),
  ("mistral", {"sliding_window": None}, [0, 0, 0, 0]),
  ("mistral", {"sliding_window": 8}, [8, 8, 8, 8]),
  ("mistral", {"sliding_window": 8, "use_sliding_window": False}, [8, 8, 8, 8]),
  ("mixtral", {}, [0, 0, 0, 0]),
  ("mixtral", {"sliding_window": 8}, [8, 8, 8, 8]),
  ("qwen2", {"sliding_window": 8}, [0, 0, 0, 0]),
  ("qwen2", ON, [0, 0, 0, 0]),
  ("qwen2", ON | {"max_window_layers": 0}, [4096, 4096, 4096, 4096]),
  ("qwen2", ON | {"sliding_window": 8, "max_window_layers": 3}, [0, 0, 0, 8]),
  ("qwen2", ON | {"sliding_window": 8, "max_window_layers": 4}, [0, 0, 0, 0]),
  ("qwen2", ON | {"sliding_window": 8, "max_window_layers": 2, "layer_types": [F, S, S, F]}, [0, 8, 8, 0]),
  ("qwen3", ON | {"sliding_window": 8, "max_window_layers": 1}, [0, 8, 8, 8]),
  ("qwen3", ON | {"sliding_window": 8, "layer_types": [F, F, F, F]}, [0, 0, 0, 0]),
  ("qwen3_moe", {"sliding_window": 8}, [0, 0, 0, 0]),
  ("qwen3_moe", ON, [4096, 4096, 4096, 4096]),
  ("qwen3_moe", ON | {"sliding_window": 8, "max_window_layers": 4}, [8, 8, 8, 8]),
]


def fields_of(family: str, fields: dict[str, Any]) -> dict[str, Any]:
  mixture = {"mixtral": {"num_local_experts", "num_experts_per_tok"}, "qwen3_moe": MIXTURE.keys()}.get(family, set())
  given = SIZES | {"model_type": family} | {name: MIXTURE[name] for name in mixture}
  return families.read(given | fields, "config.json").fields


@pytest.mark.parametrize("family, fields, expected", OF_LAYERS)
def test_each_layer_has_the_window_that_transformers_gives_it(family: str, fields: dict, expected: list[int]):
  """And what is written for the model means the same again."""
  found = fields_of(family, fields)
  windows = lambda model: [
    model["window"] * (kind == "local") for kind in kinds_of_layers(model["layers_pattern"], model["depth"])
  ]
  assert windows(found) == expected
  written = families.write(model_sizes(**found, seq_len=8), "float32", None)
  assert windows(families.read(written, "config.json").fields) == expected
  assert written["model_type"] == family or (not any(expected) and written["model_type"] == "llama")


@pytest.mark.parametrize(
  "family, fields, parts",
  [
    ("llama", {"sliding_window": 8}, ["sliding_window=8", "model_type='llama'"]),
    ("mistral", {"sliding_window": 8, "layer_types": [F, S, F, S]}, ["layer_types=", "model_type='mistral'"]),
    ("mistral", {"sliding_window": None, "layer_types": [S] * 4}, ["sliding_window=None", "layer_types="]),
    ("qwen2", {"sliding_window": 8, "layer_types": [F, F, F, S]}, ["use_sliding_window=None", "layer_types="]),
    ("qwen3", ON | {"layer_types": [S] * 3}, ["layer_types=", "each of its 4 layers"]),
    ("qwen3", {"layer_types": ["linear_attention", F, F, F]}, ["'linear_attention'", "'full_attention'"]),
    ("mistral", {"sliding_window": 0}, ["sliding_window=0", "positive number"]),
    ("qwen2", ON | {"max_window_layers": "all"}, ["max_window_layers='all'"]),
    ("qwen2", ON | {"max_window_layers": None}, ["max_window_layers=None", "a number of layers"]),
    ("qwen2", {"use_sliding_window": "no"}, ["use_sliding_window='no'", "true or false"]),
  ],
)
def test_windows_that_contradict_each_other_get_one_sentence(family: str, fields: dict, parts: list[str]):
  with one_sentence("config.json has", *parts):
    fields_of(family, fields)


@pytest.mark.parametrize("name", ["mistral", "mixtral", "qwen2_window", "qwen3_window"])
def test_an_exported_config_says_of_windows_what_that_of_transformers_says(name: str):
  given = json.loads((model_folders.FOLDER / name / "config.json").read_text())
  written = families.write(model_folders.program_of(name).sizes, "float32", None)
  for field in ("model_type", "sliding_window", "use_sliding_window", "layer_types"):
    assert written.get(field) == given.get(field), field
  assert written["sliding_window"] == 48


def test_a_pattern_of_no_family_is_refused():
  with one_sentence("model.window=64", "'local:1,global:1'", "no known family", "model.layers_pattern=''"):
    families.write(model_sizes(seq_len=8, window=64, layers_pattern="local:1,global:1"), "float32", None)


@pytest.mark.parametrize(
  "name, fields",
  [
    ("qwen3_local", {"rope_base_local": 100.0}),  # a base that its config.json cannot say
    ("olmo3", {"rope_base_local": 0.0}),  # its local layers would be scaled, too
    ("olmo3", {"rope_base_local": 100.0}),
    ("gemma3", {"rope_base_local": 0.0}),
  ],
)
def test_angles_of_local_layers_that_no_family_has_are_not_exported(name: str, fields: dict[str, Any]):
  sizes = model_folders.program_of(name).sizes
  assert families.of(sizes)
  with one_sentence(f"model.rope_base_local={fields['rope_base_local']}", "model.rope_scaling", "no known family"):
    families.of(dataclasses.replace(sizes, **fields))


def saved_of(asked: ConfigDict) -> dict[str, Any]:
  """The record of a run, as far as it says what the model is."""
  data = {"seed": 0, "batch_size": 16, "tokenizer": "synthetic", "fingerprints": [1], "turns": [1]}
  whose = {"strategy": "single", "devices": 1, "processes": 1}
  return whose | {"version": record.VERSION, "config": json.loads(asked.to_json()), "data": data}


def adopted(name: str, seq_len: int = 16, **fields: Any) -> ConfigDict:
  return pretrained.adopt(config(init_from=str(model_folders.FOLDER / name), model__seq_len=seq_len, **fields))


def of_old_version(saved: dict[str, Any]) -> dict[str, Any]:
  """A record of before windows were recorded."""
  model = {name: x for name, x in saved["config"]["model"].items() if name not in ("window", "layers_pattern")}
  return saved | {"config": saved["config"] | {"model": model}}


def test_a_run_keeps_the_window_of_the_model_it_began_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
  """Its workdir and its folder are the same model, whatever the length of the text."""
  saved = saved_of(adopted("qwen2_window"))
  monkeypatch.setattr("reporting.source.checkpoint_of", lambda workdir, step: (tmp_path / "checkpoints/1", saved))
  for source in (str(tmp_path), str(model_folders.FOLDER / "qwen2_window")):
    model = open_model(source)
    sizes = laid_out(model, "single", {}, 64, jax.devices()[:1]).program.sizes
    assert (sizes.window, sizes.layers_pattern, sizes.shown) == (48, "global:2,local:1", 48)


def test_a_run_that_begins_with_a_workdir_has_its_window():
  saved, where = saved_of(config(model__window=48)), "init_from='runs/a'"
  initial._check_same_model(saved, saved, where)
  initial._check_same_model(saved_of(config()), saved, where)  # a window of its own
  for other in (0, 47):
    with one_sentence(where, "model.window=48", f"model.window={other}", "use the same"):
      initial._check_same_model(saved, saved_of(config(model__window=other)), where)


@pytest.mark.parametrize(
  "field, other",
  [("mlp", "geglu"), ("norm_eps", 1e-3), ("norm_offset", 1.0), ("embedding_scale", 8.0), ("attention_scale", 0.5)],
)
def test_a_run_computes_what_the_workdir_that_it_begins_with_did(field: str, other: Any):
  """Weights of the same shapes would be another model without a word."""
  saved, now, where = saved_of(config()), saved_of(config(**{f"model__{field}": other})), "init_from='runs/a'"
  initial._check_same_model(now, now, where)
  with one_sentence(where, f"model.{field}={other!r}", "use the same"):
    initial._check_same_model(saved, now, where)
  model = {name: value for name, value in saved["config"]["model"].items() if name != field}  # older than the field
  older = saved | {"config": saved["config"] | {"model": model}}
  initial._check_same_model(older, saved, where)
  if field != "norm_eps":  # a record has always said it
    with one_sentence(where, f"model.{field}={other!r}", "use the same"):
      initial._check_same_model(older, now, where)


def test_a_record_of_before_windows_still_resumes_and_says_what_is_new(tmp_path: Path):
  now = saved_of(adopted("mistral"))
  old = of_old_version(now)
  record.check_same_run(old, now, "runs/a")
  assert record.changes(old, now) == [
    "model.window is now 48; the checkpoint was saved before it was recorded",
    "newer than the checkpoint, with their defaults: model.layers_pattern=''",
  ]
  record.check_same_run(of_old_version(saved_of(adopted("llama"))), saved_of(adopted("llama")), "runs/a")
  assert record.changes(of_old_version(saved_of(adopted("llama"))), saved_of(adopted("llama"))) == [
    "newer than the checkpoint, with their defaults: model.layers_pattern='', model.window=0"
  ]
  assert (config_of(old["config"], "runs/a").model.window, config_of(old["config"], "runs/a").model.width) == (
    48,
    32,
  )  # as the folder says
  gone = old | {"config": old["config"] | {"init_from": str(tmp_path / "gone")}}
  assert (config_of(gone["config"], "runs/a").model.window, config_of(gone["config"], "runs/a").model.width) == (0, 32)
  other = adopted("mistral")
  other.model.window = 0
  with one_sentence("model.window was 48 and is now 0"):
    record.check_same_run(now, saved_of(other), "runs/a")


@pytest.mark.full
def test_windows_hold_from_folder_to_run_to_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  """Trained, resumed under another strategy, evaluated, written, exported with and without adapters, and begun with."""
  monkeypatch.setattr(evaluate, "start_jax", lambda config: jax.devices())
  monkeypatch.setattr(generate, "start_jax", lambda config: jax.devices())
  folder = shutil.copytree(model_folders.FOLDER / "mistral", tmp_path / "model")
  shutil.copy(model_folders.FOLDER / "evaluate/tokenizer.json", folder)
  texts = model_folders.FOLDER / "evaluate/texts.jsonl"
  fields = {
    "steps": 2, "batch_size": 16, "eval_batch_size": 16, "eval_examples": 16, "sample_length": 0,
    "model__seq_len": 16, "init_from": str(folder), "data__name": "text", "data__path": str(texts),
    "data__text_field": "content", "data__tokenizer": str(folder), "optimizer__learning_rate": 1e-30,
  }  # fmt: skip
  plain, adapted = tmp_path / "plain", tmp_path / "adapted"
  train.train(config("fsdp", **fields, stop_after=1), plain)
  old = plain / "checkpoints/1/record.json"
  assert read_record(old.parent)["config"]["model"]["window"] == 48
  train.train(config("data_parallel", **fields), plain)
  train.train(config("fsdp", **fields, model__lora_rank=2), adapted)
  out = {name: tmp_path / f"out-{name}" for name in ("plain", "merged")}
  export.main([str(plain), f"--out={out['plain']}"])
  export.main([str(adapted), f"--out={out['merged']}", "--merge"])
  asked = [f"--data.path={texts}", "--data.text_field=content", f"--data.cache_dir={tmp_path}/cache", "--batch-size=16"]
  losses = []
  for source in (folder, plain, adapted, *out.values()):
    generate.main([str(source), "--prompt=so it is", "--length=48"])
    evaluate.main([str(source), *asked, "--seq-len=64", f"--json={tmp_path / 'found.json'}"])
    losses.append(json.loads((tmp_path / "found.json").read_text())["text"]["loss"])
  assert losses == pytest.approx([losses[0]] * 5, rel=1e-5)
  for name in out:
    said = json.loads((out[name] / "config.json").read_text())
    assert (said["model_type"], said["sliding_window"]) == ("mistral", 48)
  shape = {f"model__{name}": x for name, x in read_record(old.parent.parent / "2")["config"]["model"].items()}
  again = shape | fields | {"init_from": str(plain)}
  with one_sentence("init_from=", "model.window=48", "model.window=0"):
    train.train(config("fsdp", **again | {"model__window": 0}), tmp_path / "again")
  train.train(config("fsdp", **again), tmp_path / "again")


PUBLISHED = json.loads((model_folders.FOLDER / "published.json").read_text())


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_understood_without_their_weights(name: str, tmp_path: Path):
  """They have as many parameters as the library gives them, and what is written for them means the same again."""
  given = PUBLISHED[name]
  (tmp_path / "config.json").write_text(json.dumps(given["config"]))
  sizes = settings.program(pretrained.adopt(config(init_from=str(tmp_path), model__seq_len=8192)), "cpu").sizes
  held = jax.tree.leaves(parameters.definition(sizes)[1])
  assert sum(math.prod(w.shape) for w in held) == given["parameters"]
  fields = families.read(given["config"], "config.json").fields
  written = families.write(sizes, "bfloat16", None)
  assert written["model_type"] == given["config"]["model_type"]
  assert families.read(written, "config.json").fields == fields | {"head_dim": sizes.head_dim}


def test_kinds_of_layers_are_those_that_a_config_means():
  """Every sixth layer of Gemma 3 is global, the fourth of OLMo 3, and the fourth of SmolLM3 has no rotary positions."""
  of = lambda name: families.read(PUBLISHED[name]["config"], "config.json").fields
  patterns = {name: (of(name)["window"], of(name)["layers_pattern"]) for name in PUBLISHED}
  assert patterns == {
    "gpt-oss 20B": (128, "local:1,global:1"), "gpt-oss 120B": (128, "local:1,global:1"),
    "Gemma 3 1B": (512, "local:5,global:1"), "Gemma 3 4B": (1024, "local:5,global:1"),
    "Gemma 3 27B": (1024, "local:5,global:1"), "OLMo 2 7B": (0, ""), "OLMo 3 7B": (4096, "local:3,global:1"),
    "OLMo 3 32B": (4096, "local:3,global:1"), "SmolLM3 3B": (0, "global:3,nope:1"),
  }  # fmt: skip
  assert of("Gemma 3 27B")["attention_scale"] == 168**-0.5
  assert (of("Gemma 3 4B")["rope_base"], of("Gemma 3 4B")["rope_base_local"]) == (1e6, 1e4)
  assert of("OLMo 3 7B")["rope_base_local"] == of("OLMo 3 7B")["rope_base"] == 5e5  # unscaled in local layers
