"""What an evaluation reports, from sums that are given: means over parts, bits per byte, losses by position.

The strategy here is a stand-in that adds up numbers on the host, so nothing is compiled.
"""

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from data.dataset import Dataset, HostBatch, Part, Text
from reporting.evaluation.evaluator import Evaluator, by_position, rows_of_tokens
from training.program import Traits


@dataclasses.dataclass(frozen=True)
class Numbers:
  """Examples whose losses are given: example i has predictions of which the losses sum to `losses[i]`."""

  losses: tuple[float, ...]

  def __len__(self) -> int:
    return len(self.losses)

  def read(self, ids: np.ndarray) -> HostBatch:
    return {"loss": np.array(self.losses)[ids], "tokens": ids[:, None] + np.arange(3)}


TOKENS = 10  # that count in each example


class Sums:
  """In place of a strategy: an example has 10 predictions, of which as many are correct as its number says."""

  def __init__(self, traits: Traits, more: Any = lambda batch: {}):
    self.program, self.more, self.seen = SimpleNamespace(traits=traits), more, []

  def rows(self, size: int) -> slice:
    return slice(None)

  def shard(self, batch: HostBatch, size: int) -> HostBatch:
    assert len(batch["mask"]) == size
    return batch

  def averaged(self, state: str) -> str:
    return f"average of {state}"

  def eval_step(self, state: str, batch: HostBatch) -> dict[str, Any]:
    assert state == "average of weights"
    mask = batch["mask"]
    self.seen.append(mask.sum())
    counts = {"count": TOKENS * mask.sum(), "correct": (batch["id"][:, 0] * mask).sum()}
    return {"loss": (batch["loss"] * mask).sum(), **counts, **self.more(batch)}


FIRST, SECOND = (5.0, 7.0, 9.0, 11.0, 13.0), (20.0, 40.0)  # means of 9 and 30 an example, 0.9 and 3 a token
SHARES = (0.75, 0.25)


def evaluator(strategy: Sums, *parts: Part, examples: int = 0, text: Text | None = None) -> Evaluator:
  dataset = Dataset(parts, "made up", weights=SHARES[: len(parts)] if len(parts) > 1 else (), text=text)
  reading = SimpleNamespace(read_ahead=2, threads=1)
  return Evaluator(strategy, dataset, SimpleNamespace(data=reading, eval_batch_size=2, eval_examples=examples))


def part(name: str, losses: tuple[float, ...], **fields: Any) -> Part:
  return Part(name, Numbers((0.0,)), Numbers(losses), name, **fields)


TEXT = Traits("transformer", measures={"accuracy": "correct"}, causal=True)


def test_bits_per_byte_are_divided_by_the_bytes_of_a_token():
  """A loss of 0.9 nats a token of 4 bytes: 0.9 / ln 2 bits a token, and a quarter of that a byte."""
  found = evaluator(Sums(TEXT), part("a", FIRST, bytes_per_token=4.0))("weights")
  assert found == pytest.approx({"loss": 0.9, "accuracy": 0.2, "bits_per_byte": 0.9 / math.log(2) / 4})


def test_parts_count_by_their_share_in_training_and_not_by_their_size():
  """The loss is 0.75 · 0.9 + 0.25 · 3 = 1.425, in tokens of 0.75 · 4 + 0.25 · 2 = 3.5 bytes on average."""
  ours = Sums(TEXT)
  found = evaluator(ours, part("a", FIRST, bytes_per_token=4.0), part("b", SECOND, bytes_per_token=2.0))("weights")
  assert found == pytest.approx({
    "loss": 1.425, "loss/a": 0.9, "loss/b": 3.0,
    "accuracy": 0.75 * 0.2 + 0.25 * 0.05, "accuracy/a": 0.2, "accuracy/b": 0.05,
    "bits_per_byte": 1.425 / math.log(2) / 3.5,
    "bits_per_byte/a": 0.9 / math.log(2) / 4, "bits_per_byte/b": 3.0 / math.log(2) / 2,
  })  # fmt: skip
  assert ours.seen == [2, 2, 1, 2]  # the last batch of the first part is padded


def test_without_the_bytes_of_every_part_there_are_no_bits():
  found = evaluator(Sums(TEXT), part("a", FIRST, bytes_per_token=4.0), part("b", SECOND))("weights")
  assert not [name for name in found if "bits" in name]


def test_other_models_count_examples():
  """Each example predicts two numbers, so 70 predictions are 35 examples."""
  traits = Traits("other", numbers=2)
  found = evaluator(Sums(traits), part("a", FIRST, bytes_per_token=4.0), part("b", SECOND))("weights")
  assert found == pytest.approx({"loss": 1.425, "loss/a": 0.9, "loss/b": 3.0, "examples": 35})


def test_only_so_many_examples_of_each_part_are_evaluated():
  ours = Sums(TEXT)
  evaluator(ours, part("a", FIRST), part("b", SECOND), examples=3)("weights")
  assert ours.seen == [2, 1, 2]


def test_an_evaluation_that_is_stopped_says_nothing():
  ours, asked = Sums(TEXT), []
  assert evaluator(ours, part("a", FIRST))("weights", lambda: len(asked) == 1 or asked.append(1)) == {}
  assert ours.seen == [2, 2]  # it was asked after each batch


def test_losses_by_position_are_those_of_the_parts_that_have_such_positions():
  sums = [
    {"loss_by_position": np.array([8.0, 12.0, 0.0, 0.0]), "count_by_position": np.array([4, 3, 0, 0])},
    {"loss_by_position": np.array([5.0, 7.0, 9.0, 0.0]), "count_by_position": np.array([1, 7, 3, 0])},
  ]
  found = by_position(sums, np.array(SHARES))
  assert found == {"loss_at/1": 0.75 * 2 + 0.25 * 5, "loss_at/2": 0.75 * 4 + 0.25 * 1, "loss_at/4": 3.0}
  assert by_position([{"loss": 1.0}], np.array([1.0])) == {}


def test_losses_by_position_are_among_the_values():
  more = lambda batch: {"loss_by_position": np.array([1.0, 6.0]), "count_by_position": np.array([1, 2])}
  found = evaluator(Sums(TEXT, more), part("a", FIRST))("weights")  # three batches
  assert (found["loss_at/1"], found["loss_at/2"]) == (1.0, 3.0)


def test_rows_are_cut_where_a_document_ends():
  batch = {
    "tokens": np.arange(18).reshape(3, 6),
    "mask": np.array([True, False, True]),
    "segments": np.array([[1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1], [1, 2, 3, 3, 0, 0]]),
  }
  assert [x.tolist() for x in rows_of_tokens(batch)] == [[0, 1], [2, 3, 4], [12], [13], [14, 15]]
  del batch["segments"]
  assert [x.tolist() for x in rows_of_tokens(batch)] == [[0, 1, 2, 3, 4, 5], [12, 13, 14, 15, 16, 17]]


def test_the_baseline_of_bytes_is_per_token_and_per_byte():
  """Of a training text with the pairs 0 → 1 three times: P(1 | 0) = (3 + 1) / (3 + 256), and 1/256 after another byte.

  The validation text of part "a" has windows of tokens 0 1 2, 1 2 3, …; a token is one byte here.
  """
  pairs = np.zeros((256, 256), np.int64)
  pairs[0, 1] = 3
  text = Text(encode=list, decode=str, to_bytes=bytes, files=dict)
  parts = [
    part("a", (1.0, 1.0), bytes_per_token=4.0, byte_pairs=pairs),
    part("b", (1.0,), bytes_per_token=2.0, byte_pairs=pairs),
  ]
  found = evaluator(Sums(TEXT), *parts, text=text).baseline()
  a = (-math.log2(4 / 259) + 3 * 8) / 4  # 0 1 2 and 1 2 3: four pairs, one of which was seen
  b = (-math.log2(4 / 259) + 8) / 2  # 0 1 2
  loss = math.log(2) * (0.75 * 4 * a + 0.25 * 2 * b)
  assert found.loss == pytest.approx(loss)
  assert found.bits_per_byte == pytest.approx(loss / math.log(2) / 3.5)
  for unknown in ({"bytes_per_token": None}, {"byte_pairs": None}):
    assert evaluator(Sums(TEXT), dataclasses.replace(parts[0], **unknown), text=text).baseline() is None
  assert evaluator(Sums(TEXT), parts[0]).baseline() is None
  assert evaluator(Sums(Traits("other")), parts[0], text=text).baseline() is None
