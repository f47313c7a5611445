"""The library transformers loads what is exported, and computes what this model does. Needs `pip install '.[peer]'`."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import model_folders
import numpy as np
import pytest
from helpers import config, initial_state, program, relative_difference, strategy

import strategies
import train
from checkpointing import pretrained
from checkpointing.pretrained.export import export
from data.text import tokenizers
from models.parameters import bind
from reporting.source import laid_out, open_model
from tools import evaluate
from tools import export as tool
from training import settings

pytestmark = pytest.mark.skipif(
  not (importlib.util.find_spec("transformers") and importlib.util.find_spec("torch")),
  reason="transformers and torch are not installed; pip install '.[peer]'",
)
TOLERANCE = 1e-4


def logits_of(folder: Path, tokens: np.ndarray) -> np.ndarray:
  import torch
  from transformers import AutoModelForCausalLM

  model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
  return model(torch_of(tokens)).logits.detach().numpy()


def torch_of(tokens: np.ndarray) -> Any:
  import torch

  return torch.tensor(tokens)


@pytest.mark.parametrize("name", model_folders.NAMES)
def test_a_model_that_came_in_and_goes_out_computes_the_same(name: str, tmp_path: Path):
  runner, params = model_folders.loaded(name)
  read = lambda weight: np.asarray(model_folders.weight(params, weight))
  export(tmp_path / "out", runner.program.sizes, read, {}, shard_bytes=30_000)
  expected = np.load(model_folders.FOLDER / name / "expected.npz")
  found = logits_of(tmp_path / "out", expected["tokens"][:, :-1])
  assert relative_difference(found, expected["logits"]) < 1e-6
  if "mxfp4" in name and not importlib.util.find_spec("accelerate"):  # without which the library reads none of these
    return
  longer = np.arange(60)[None] * 7 % 64  # than the windows of some
  whole = [logits_of(folder, longer) for folder in (model_folders.FOLDER / name, tmp_path / "out")]
  assert relative_difference(*whole) < 1e-6


@pytest.mark.parametrize("tokenizer, vocab_size", [("bytes", 256), ("bpe", 300)])
def test_a_trained_model_and_its_tokenizer_load_with_nothing_else(tokenizer: str, vocab_size: int, tmp_path: Path):
  from transformers import AutoTokenizer

  sizes = {"steps": 2, "batch_size": 16, "eval_examples": 16, "eval_batch_size": 16, "sample_length": 0}
  shape = {"model__seq_len": 32, "model__head_dim": 6, "model__vocab_size": vocab_size}  # 6 × heads is not the width
  (tmp_path / "a.txt").write_text("Some words, and others; Ā, é and 😀 take several bytes.\n" * 300)
  data = {"data__name": "text", "data__path": str(tmp_path / "a.txt"), "data__tokenizer": tokenizer}
  asked = config("fsdp", **sizes | shape | data)
  train.train(asked, tmp_path / "run")
  tool.main([str(tmp_path / "run"), f"--out={tmp_path / 'out'}"])

  sample = "Words, é\n 😀!  And others"
  loaded, ours = AutoTokenizer.from_pretrained(tmp_path / "out"), train.data.load(asked).text
  assert loaded(sample)["input_ids"] == ours.encode(sample)
  assert loaded.decode(ours.encode(sample)) == sample
  ids = np.array([ours.encode(sample)[:32]])
  program = settings.program(pretrained.adopt(config(init_from=str(tmp_path / "out"), **shape)), "cpu")
  runner = strategies.create(config("single"), program, train.jax.devices()[:1])
  params = pretrained.load(pretrained.Folder(str(tmp_path / "out")), program.sizes, runner.abstract_state().params)
  expected = np.asarray(bind(program.sizes, params)(jnp.asarray(ids)))
  assert relative_difference(logits_of(tmp_path / "out", ids), expected) < TOLERANCE
  end = json.loads((tmp_path / "out/generation_config.json").read_text())["eos_token_id"]
  assert (end == 0) if tokenizer == "bytes" else (loaded.eos_token_id == end)


def test_choices_score_what_transformers_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  """With a byte-level BPE. The reference follows lm-evaluation-harness."""
  import torch
  from transformers import AutoTokenizer

  tokenizers.train_bpe(tmp_path, [b"Some words, and others; the cat sat on the mat. " * 9], 300)
  files = tokenizers.from_file(tmp_path / "tokenizer.json").text.files()
  made = program(model__vocab_size=300, model__seq_len=32)
  params = initial_state(strategy("single", made)).params
  export(tmp_path / "out", made.sizes, lambda name: np.asarray(model_folders.weight(params, name)), files)
  questions = [
    ("the cat sat", ["on the mat", "é, and"]),
    ("Some\n", ["words", " others", "😀"]),
    ("the m", ["at", "a"]),
  ]
  lines = [json.dumps({"question": q, "choices": choices, "answer": 0}) for q, choices in questions]
  (tmp_path / "a.jsonl").write_text("\n".join(lines))
  monkeypatch.setattr(evaluate, "start_jax", lambda config: train.jax.devices())
  asked = [f"--choices={tmp_path / 'a.jsonl'}", "--seq-len=32", "--strategy=fsdp", f"--json={tmp_path / 'found.json'}"]
  evaluate.main([str(tmp_path / "out"), *asked])

  encode = AutoTokenizer.from_pretrained(tmp_path / "out").encode
  found = json.loads((tmp_path / "found.json").read_text())["choices"]["scores"]
  for (question, choices), scores in zip(questions, found, strict=True):
    for choice, score in zip(choices, scores, strict=True):
      ids = encode(question + ("" if question[-1:].isspace() or choice[0] == " " else " ") + choice)
      before = len(encode(question.rstrip()))
      logits = torch.tensor(logits_of(tmp_path / "out", np.array([ids[:-1]])))[0].double()
      likelihoods = torch.log_softmax(logits, -1)[torch.arange(len(ids) - 1), ids[1:]]
      assert score == pytest.approx(float(likelihoods[before - 1 :].sum()), rel=1e-5)


@pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="peft is not installed; pip install '.[peer]'")
def test_peft_loads_adapters_and_computes_the_same(tmp_path: Path):
  """Of a model whose weights are biased and normed, from the path that the run started from."""
  from peft import AutoPeftModelForCausalLM

  fields = {"steps": 3, "batch_size": 16, "eval_examples": 16, "eval_batch_size": 16, "sample_length": 0}
  data = {"data__name": "synthetic", "model__seq_len": 16, "init_from": str(model_folders.FOLDER / "qwen3")}
  train.train(config("two_d", **fields | data, model__lora_rank=4), tmp_path / "run")
  tool.main([str(tmp_path / "run"), f"--out={tmp_path / 'adapters'}"])
  tool.main([str(tmp_path / "run"), f"--out={tmp_path / 'merged'}", "--merge"])
  ids = np.arange(32).reshape(2, 16)
  found = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapters")(torch_of(ids)).logits.detach().numpy()
  model = open_model(str(tmp_path / "run"))
  runner = laid_out(model, "single", {}, 16, train.jax.devices()[:1])
  expected = np.asarray(bind(runner.program.sizes, model.load(runner))(jnp.asarray(ids)))
  assert relative_difference(found, expected) < TOLERANCE
  assert relative_difference(logits_of(tmp_path / "merged", ids), expected) < TOLERANCE
  assert relative_difference(logits_of(model_folders.FOLDER / "qwen3", ids), expected) > 0.01
