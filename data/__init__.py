"""Training and validation data. The batch at step t is a pure function of (seed, t), for any number of processes.

A data set is one or several sources of numbered examples. batches.py decides which examples are in a batch, order.py in
which order, text/, images/ and synthetic.py where they come from. Each of the three has a `load`; add a new one to
`DATASETS`.

    for batch in data.batches(config):                   # in a loop of your own: dicts of NumPy arrays
    for batch in data.batches(config, place=strategy):   # or arrays on a mesh
"""

import dataclasses
import importlib
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from ml_collections import ConfigDict

from configs import project
from data.batches import Batches, EvaluationBatches, Mixture
from data.check import check_examples
from data.dataset import Dataset, HostBatch, Part, Source
from data.prefetch import prefetch
from errors import ConfigError, one_of, positive
from runtime.storage import owners

if TYPE_CHECKING:  # what only looks at files starts without JAX
  from models.inputs import Shapes

__all__ = [
  "Batches", "Dataset", "EvaluationBatches", "Mixture", "Part", "Source", "batches", "check", "check_fields", "load",
  "mixture", "prefetch", "with_sizes",
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Loader:
  """A module with `load(config)`, for models with these inputs and any of these objectives; None allows all."""

  module: str
  inputs: str | None = None
  objectives: tuple[str, ...] = ()


EXACT = ("image_size", "channels", "features", "outputs")  # sizes of a model that must be those of the data
DATASETS = {
  "text": Loader("data.text", inputs="tokens", objectives=("next_token", "class")),
  "images": Loader("data.images", inputs="images", objectives=("class",)),
  "synthetic": Loader("data.synthetic"),
}


def load(config: ConfigDict) -> Dataset:
  """Loads the data of `config.data`; prepares it first if needed. `with_sizes` and `check` come next."""
  check_fields(config)
  owners.read_also(config.cache_owner)
  return importlib.import_module(DATASETS[config.data.name].module).load(config)


def check_fields(config: ConfigDict) -> None:
  """Raises ConfigError for fields of `config.data` that no data can fit."""
  project.load(config)
  name, model = one_of("data.name", config.data.name, DATASETS), config.model
  loader = DATASETS[name]
  inputs, objectives = loader.inputs or model.inputs, loader.objectives or (model.objective,)
  if model.inputs != inputs or model.objective not in objectives:
    raise ConfigError(
      f"data.name={name!r} needs model.inputs={inputs!r} and model.objective={objectives[-1]!r}, but the model has "
      f"model.inputs={model.inputs!r} and model.objective={model.objective!r}; change these two or data.name"
    )
  for field in ("read_ahead", "threads", "limit_mb", "limit_ratio"):
    positive(f"data.{field}", config.data[field])
  one_of("data.on_bad_row", config.data.on_bad_row, ("stop", "skip"))
  one_of("data.on_change", config.data.on_change, ("error", "continue"))


def with_sizes(config: ConfigDict, found: dict[str, Any]) -> ConfigDict:
  """The config with the sizes that only the data can say (`Dataset.model`), where `config.model` does not set them.

  More classes than the data has are allowed, and so is another normalization of the pixels. Raises ConfigError on a
  conflict.
  """
  for name, value in found.items():
    if name not in config.model:
      raise ConfigError(f"data.name={config.data.name!r} sets model.{name}, which is no field of configs/base.py")
    given = config.model[name]
    conflicts = given < value if name == "classes" else name in EXACT and given != value
    if given and conflicts:
      raise ConfigError(
        f"model.{name}={given} does not fit the data, which has {value}; use {value}, or 0 to take it from the data"
      )
  from models.sizes import replaced

  return replaced(config, "model", {name: value for name, value in found.items() if not config.model[name]})


def check(config: ConfigDict, dataset: Dataset, shapes: "Shapes") -> None:
  """Raises ConfigError unless the first examples fit a model that reads these `shapes`."""
  for part in dataset.parts:
    for what, source in (("train on", part.train), ("validate on", part.validation)):
      if not len(source):
        raise ConfigError(f"data.name={config.data.name!r} has no example of {part.name!r} to {what}; give it some")
    examples = part.train.read(np.arange(min(len(part.train), config.batch_size)))
    check_examples(examples, shapes, config.data.name)


def mixture(dataset: Dataset, first: int = 0, given: tuple[int, ...] = (), streams: tuple[int, ...] = ()) -> Mixture:
  """The training examples of all parts, in their shares. See `Mixture` for `first`, `given` and `streams`."""
  return Mixture(tuple(part.train for part in dataset.parts), dataset.weights, first, given, streams)


class Place(Protocol):
  """Where a batch goes. Every Strategy is one, and `strategies.OnMesh` for a mesh of your own."""

  def rows(self, batch_size: int) -> np.ndarray:
    """The rows of a global batch that this process supplies."""
    ...

  def shard(self, host_batch: HostBatch, batch_size: int) -> Any:
    """Makes a global batch from these rows."""
    ...


def batches(config: ConfigDict, place: Place | None = None, step: int = 0) -> Iterator[Any]:
  """The training batches of a config from a step on, without end.

  The step is the whole position: the batch at a step is always the same, so a loop that knows its step can go on there.
  Without `place`, batches are whole dicts of NumPy arrays. Reads `data.read_ahead` batches ahead, in `data.threads`
  threads.
  """
  from models.sizes import model_sizes

  size, dataset = config.batch_size, load(config)
  check(config, dataset, model_sizes(with_sizes(config, dataset.model)).example_shapes())
  source = Batches(mixture(dataset), size, config.seed)

  def make(step: int) -> Any:
    return place.shard(source.read(step, place.rows(size)), size) if place else source.read(step)

  def read() -> Iterator[Any]:
    with prefetch(make, itertools.count(step), config.data.read_ahead, config.data.threads) as reader:
      yield from reader

  return read()  # not a generator itself, so that bad input raises here
