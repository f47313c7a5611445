"""Evaluator: measures loss and accuracy on the validation examples."""

import collections
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from data import Dataset, EvaluationBatches, Part, mixture, prefetch
from reporting.evaluation.bigram import Baseline, baseline
from strategies import Strategy
from training.program import Batch, Sums, TrainState


class Evaluator:
  """Evaluates states of one strategy on `eval_examples` validation examples of each part (all if 0)."""

  def __init__(self, strategy: Strategy, dataset: Dataset, config: ConfigDict):
    self.strategy, self.dataset = strategy, dataset
    self.read_ahead, self.threads = config.data.read_ahead, config.data.threads
    self._batches = [
      EvaluationBatches(part.validation, config.eval_batch_size, config.eval_examples) for part in dataset.parts
    ]
    turns = np.array(mixture(dataset).turns)
    self._shares = turns / turns.sum()

  def __call__(self, state: TrainState, stop: Callable[[], bool] = lambda: False) -> dict[str, float]:
    """Returns `loss` and what the objective measures, such as `accuracy`.

    Also `examples`, if the model predicts something for each example, or `bits_per_byte` of a text model.

    With `eval_by_position` also `loss_at/P` for P = 1, 2, 4, ...: the mean over the positions in their texts up to P,
    from 1, that no smaller P has.

    `stop` is asked after each batch. If it says yes, the evaluation is given up, and nothing is returned.

    With several parts, these are means weighted by the parts' shares in training. The values of a part have its name
    after a slash, as in `loss/NAME`.
    """
    sums = self.sums(state, stop)
    if not sums:
      return {}
    losses = np.array([s["loss"] / s["count"] for s in sums])
    found = {"loss": losses}
    model = self.strategy.program.traits
    found |= {name: np.array([s[summed] / s["count"] for s in sums]) for name, summed in model.measures.items()}
    values = {name: float(self._shares @ each) for name, each in found.items()}
    if not model.causal:
      values["examples"] = sum(s["count"] for s in sums) / model.numbers
    elif (per_token := self._bytes_per_token()) is not None:
      found["bits_per_byte"] = losses / math.log(2) / per_token
      values["bits_per_byte"] = values["loss"] / math.log(2) / float(self._shares @ per_token)
    if len(sums) > 1:
      for name, each in found.items():
        values |= {f"{name}/{part.name}": float(x) for part, x in zip(self.dataset.parts, each, strict=True)}
    return values | by_position(sums, self._shares)

  def sums(self, state: TrainState, stop: Callable[[], bool] = lambda: False) -> list[dict[str, Any]]:
    """Sums over all batches of each part; none if it was stopped.

    Results are read two batches late, so that the device does not wait.
    """
    state = self.strategy.averaged(state)
    totals: list[dict[str, Any]] = [collections.defaultdict(float) for _ in self._batches]
    waiting: collections.deque[tuple[int, Sums]] = collections.deque()

    def read_oldest() -> None:
      part, sums = waiting.popleft()
      for name, value in jax.device_get(sums).items():
        totals[part][name] += np.float64(value)  # by position, and of routers, also arrays

    def make(item: tuple[int, int]) -> tuple[int, Batch]:
      part, number = item
      batches = self._batches[part]
      return part, self.strategy.shard(batches.read(number, self.strategy.rows(batches.size)), batches.size)

    items = [(part, number) for part, batches in enumerate(self._batches) for number in range(len(batches))]
    with prefetch(make, items, self.read_ahead, self.threads) as reader:
      for part, batch in reader:
        waiting.append((part, self.strategy.eval_step(state, batch)))
        if stop():
          return []
        if len(waiting) > 2:
          read_oldest()
      while waiting:
        read_oldest()
    return totals

  def _bytes_per_token(self) -> np.ndarray | None:
    """Of each part [parts]; None if it is not known of all."""
    known = [part.bytes_per_token for part in self.dataset.parts]
    return None if None in known else np.array(known, np.float64)

  def baseline(self) -> Baseline | None:
    """The loss of byte bigram models on the same examples, one for each part; None if the bytes are not known."""
    text, per_token = self.dataset.text, self._bytes_per_token()
    if text is None or per_token is None or not self.strategy.program.traits.causal:
      return None

    def windows(part: Part, batches: EvaluationBatches) -> Baseline | None:
      return baseline(text, part, (row for batch in batches.all() for row in rows_of_tokens(batch)))

    found = [windows(part, batches) for part, batches in zip(self.dataset.parts, self._batches, strict=True)]
    if None in found:
      return None
    loss = float(self._shares @ np.array([b.loss for b in found if b]))
    return Baseline(loss, loss / math.log(2) / float(self._shares @ per_token))


def by_position(sums: Sequence[dict[str, Any]], shares: np.ndarray) -> dict[str, float]:
  """The values `loss_at/P` of `Evaluator.__call__`, from the sums of each part; none if there are no such sums."""
  if "loss_by_position" not in sums[0]:
    return {}
  counts = np.array([s["count_by_position"] for s in sums])  # [parts, buckets]
  means = np.array([s["loss_by_position"] for s in sums]) / np.maximum(counts, 1)
  weights = shares[:, None] * (counts > 0)  # a part without such positions has no say
  known = weights.sum(axis=0) > 0
  losses = (weights * means).sum(axis=0)[known] / weights.sum(axis=0)[known]
  return {f"loss_at/{1 << i}": float(loss) for i, loss in zip(np.flatnonzero(known), losses, strict=True)}


def rows_of_tokens(batch: dict[str, np.ndarray]) -> list[np.ndarray]:
  """The tokens of each example of a batch; where there are segments, of each segment. Leaves out padding."""
  tokens, mask = batch["tokens"], batch["mask"]
  if "segments" not in batch:
    return list(tokens[mask])
  found = []
  for row, segments in zip(tokens[mask], batch["segments"][mask], strict=True):
    borders = np.flatnonzero(np.diff(segments)) + 1
    found += [row[ids > 0] for row, ids in zip(np.split(row, borders), np.split(segments, borders), strict=True)]
  return [piece for piece in found if len(piece)]
