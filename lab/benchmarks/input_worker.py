"""Measures one cell of the input pipeline in a process of its own: `python -m lab.benchmarks.input_worker < SPEC`.

It follows the protocol of worker.py. input_pipeline.py starts it; peer_input.py does the same work with the peers.
"""

import itertools
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

import data
import strategies
from configs import base
from data import tfds
from data.files import ArrayFile
from data.images import cifar10
from data.images.store import Images
from data.text.tokens import Windows
from errors import ConfigError
from lab.benchmarks import worker
from lab.benchmarks.peer_input import WARM_UP
from runtime.devices import start_jax
from strategies.execution.mesh import fitted
from training import settings


def opened(spec: dict[str, Any]) -> tuple[ConfigDict, data.Batches]:
  """The config of a specification, and its batches. Downloads nothing."""
  config = base.get_config("lm", "data_parallel")
  config.update(spec["config"])
  if config.data.path == "tfds:cifar10" and not cifar10.is_prepared(tfds.root(config.data)):
    raise ConfigError("CIFAR-10 is not on this machine, and benchmarks download nothing; set TFDS_DATA_DIR")
  mixture = data.mixture(data.load(config))
  return config, data.Batches(mixture, config.batch_size, config.seed)


def describe_records(spec: dict[str, Any]) -> dict[str, Any]:
  """Where the records are, for the peers, and how to see that they have read the same ones."""
  config, batches = opened(spec)
  source = batches.mixture.sources[0]
  batch, first = batches.read(0), source.read(np.arange(min(8, len(source))))
  fields = fields_of(source)
  return {
    "count": len(source),
    "batch_size": config.batch_size,
    "fields": fields,
    "shapes": {name: list(batch[name].shape) for name in fields},
    "sums": {name: int(first[name].sum(dtype=np.int64)) for name in fields},
  }


def fields_of(source: data.Source) -> dict[str, dict[str, Any]]:
  """For each field of a source: its file, and where a record begins and ends. See peer_input.Records."""
  if isinstance(source, Windows):
    return {"tokens": field(source.tokens, [source.length + 1], "int32", step=source.length)}
  if isinstance(source, Images):
    shape = list(source.shape)
    return {
      "image": field(source.images, shape, "uint8", step=int(np.prod(shape))),
      "label": field(source.labels, [], "int32", step=1),
    }
  raise TypeError(f"the records of {type(source).__name__} are not described here")


def field(file: ArrayFile, shape: list[int], dtype: str, step: int) -> dict[str, Any]:
  where = {"path": str(file.path), "dtype": file.dtype.str, "offset": file.offset}
  return where | {"shape": shape, "as": dtype, "step": step}


def time_host(spec: dict[str, Any]) -> dict[str, Any]:
  """Batches as NumPy arrays, one after the other in this thread."""
  _, batches = opened(spec)
  return timed((batches.read(step) for step in itertools.count()), spec["seconds"])


def time_placed(spec: dict[str, Any]) -> dict[str, Any]:
  """Batches on simulated devices, read ahead as train.py does. Each is awaited before the next is asked for."""
  config, batches = opened(spec)
  config.simulated_devices = spec["devices"]
  jax.config.update("jax_platforms", "cpu")
  devices = start_jax(config)
  config.mesh.update(fitted(strategies.layout_of(config.strategy), len(devices)).mesh)
  strategy = strategies.create(config, settings.program(config, "cpu"), devices)
  rows = strategy.rows(config.batch_size)

  def make(step: int) -> Any:
    return strategy.shard(batches.read(step, rows), config.batch_size)

  with data.prefetch(make, itertools.count(), config.data.read_ahead, config.data.threads) as reader:
    found = timed(map(jax.block_until_ready, reader), spec["seconds"])
  return found | {"devices": len(devices)}


def timed(batches: Iterator[Any], seconds: float) -> dict[str, Any]:
  """How many batches come in at least so many seconds, after the first ones."""
  for _ in range(WARM_UP):
    batch = next(batches)
  start, made, taken = time.perf_counter(), 0, 0.0
  while taken < seconds:
    next(batches)
    made, taken = made + 1, time.perf_counter() - start
  return {"batches": made, "seconds": taken, "shapes": {name: list(x.shape) for name, x in batch.items()}}


TASKS = {"records": describe_records, "host": time_host, "placed": time_placed}

if __name__ == "__main__":
  worker.main(TASKS)
