"""Writes texts for generation.py, as tools/generate.py does: `python -m lab.benchmarks.generation_worker`.

It answers requests like peer_generation.py, and makes the model folders that both read.
"""

import functools
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import strategies
from checkpointing import pretrained
from checkpointing.pretrained.export import export
from configs import base
from lab.benchmarks.peer_generation import serve, timed
from models.generate import Sampling
from models.parameters import bind
from runtime.devices import start_jax
from strategies import Strategy
from training import settings
from training.program import Params

GREEDY = Sampling(temperature=0.0)


def strategy_of(fields: dict[str, Any]) -> Strategy:
  """The strategy `single` for a model. `fields` are those of a config."""
  config = base.get_config("lm", "single")
  config.update_from_flattened_dict({"simulated_devices": 1, "optimizer.name": "sgd"} | fields)
  config = pretrained.adopt(config)
  devices = start_jax(config)
  return strategies.create(config, settings.program(config, devices[0].platform), devices)


def make(request: dict[str, Any]) -> dict[str, Any]:
  """Writes a model folder with random weights."""
  strategy = strategy_of({f"model.{name}": value for name, value in request["model"].items()})
  params = jax.device_get(strategy.init(0).params)
  read = lambda name: functools.reduce(lambda tree, key: tree[key], name.split("/"), params)
  export(Path(request["folder"]), strategy.program.sizes, read, {})
  return {"parameters": sum(x.size for x in jax.tree.leaves(params))}


@functools.cache
def loaded(folder: str, length: int) -> tuple[Strategy, Params]:
  """A strategy for a model folder and texts of this length, and the weights."""
  strategy = strategy_of({"init_from": folder, "model.seq_len": length})
  return strategy, pretrained.load(pretrained.Folder(folder), strategy.program.sizes, strategy.abstract_state().params)


def write(request: dict[str, Any]) -> dict[str, Any]:
  """Continues prompts by `length` tokens each. Returns the tokens, and how long the first and all others took."""
  prompts, length = request["prompts"], request["length"]
  lengths = np.array([len(prompt) for prompt in prompts], np.int32)
  size = int(max(lengths)) + length
  strategy, params = loaded(request["folder"], size)
  padded = np.zeros((len(prompts), max(lengths)), np.int32)
  for row, prompt in zip(padded, prompts, strict=True):
    row[: len(prompt)] = prompt
  times, tokens = [], []
  start = time.perf_counter()
  texts = strategy.writing.begin(params, padded, lengths, size=size, seed=0, sampling=GREEDY)
  for step in range(length):
    newest = texts.newest
    if step + 1 < length:
      texts = strategy.writing.extend(params, texts, GREEDY)
    tokens.append(np.asarray(newest))
    times.append(time.perf_counter())
  return timed(start, times) | {"tokens": np.stack(tokens, axis=1).tolist()}


def logits(request: dict[str, Any]) -> dict[str, Any]:
  """The logits of the token after the first prompt."""
  prompt = jnp.array(request["prompts"][:1])
  strategy, params = loaded(request["folder"], prompt.size + request["length"])
  found = jax.jit(lambda params, prompt: bind(strategy.program.sizes, params)(prompt)[0, -1])(params, prompt)
  return {"logits": found.tolist()}


if __name__ == "__main__":
  serve({"make": make, "write": write, "logits": logits})
