"""Evaluator: measures loss and accuracy on the validation examples."""

import collections
import math
from collections.abc import Iterator

import jax

from data import Batches, Dataset
from data.batches import HostBatch
from evaluation.bigram import Baseline, baseline
from strategies import Strategy
from training.program import Sums, TrainState


class Evaluator:
  """Evaluates states of one strategy on `examples` validation examples (all if 0), in batches of `batch_size`."""

  def __init__(self, strategy: Strategy, dataset: Dataset, batch_size: int, examples: int):
    self.strategy, self.dataset, self.batch_size = strategy, dataset, batch_size
    self.examples = examples or len(dataset.validation)
    self._batches = Batches(dataset.validation, batch_size)

  def __call__(self, state: TrainState) -> dict[str, float]:
    """Returns `loss`; for a classifier also `accuracy` and `examples`, for a text model `bits_per_byte`."""
    sums = self._sums(state)
    values = {"loss": sums["loss"] / sums["count"]}
    if self.strategy.program.model.predicts.counts_correct:
      values |= {"accuracy": sums["correct"] / sums["count"], "examples": sums["count"]}
    elif self.dataset.text:
      values["bits_per_byte"] = values["loss"] / math.log(2) / self.dataset.text.bytes_per_token
    return values

  def _sums(self, state: TrainState) -> dict[str, float]:
    """Sums over all batches. Results are read two batches late, so that the device does not wait."""
    total: dict[str, float] = collections.defaultdict(float)
    waiting: collections.deque[Sums] = collections.deque()

    def read_oldest() -> None:
      for name, value in jax.device_get(waiting.popleft()).items():
        total[name] += float(value)

    for batch in self._batches.evaluation(self.strategy.rows(self.batch_size), self.examples):
      waiting.append(self.strategy.eval_step(state, self.strategy.shard(batch, self.batch_size)))
      if len(waiting) > 2:
        read_oldest()
    while waiting:
      read_oldest()
    return total

  def baseline(self) -> Baseline | None:
    """The loss of the byte bigram model on the same examples; None if the data is not text."""
    if not self.dataset.text:
      return None
    batches: Iterator[HostBatch] = self._batches.evaluation(examples=self.examples)
    return baseline(self.dataset.text, (row for batch in batches for row in batch["tokens"][batch["mask"]]))
