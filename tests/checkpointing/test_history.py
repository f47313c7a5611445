"""The counts of each source stay honest when sources or weights change between two runs."""

import dataclasses
from typing import Any

import numpy as np
from helpers import config

import data
from checkpointing import history
from data.dataset import HostBatch
from data.order import turns_taken


@dataclasses.dataclass(frozen=True)
class Numbers:
  """A source of so many examples."""

  size: int

  def __len__(self) -> int:
    return self.size

  def read(self, ids: np.ndarray) -> HostBatch:
    return {"number": ids}


def section(turns: dict[str, int], **fields: Any) -> dict[str, Any]:
  """The section of a run whose sources have these fingerprints and turns."""
  names = list(turns)
  new = {
    "names": names, "fingerprints": names, "turns": list(turns.values()), "first": 0, "given": [0] * len(names),
    "streams": [0] * len(names), "left": {}, "batch_size": 10,
  }  # fmt: skip
  return new | fields


def test_the_same_data_keeps_its_history():
  saved = section({"a": 7, "b": 3}, first=40, given=[30, 10], streams=[1, 0], left={"c 0": [5, 2]})
  now = section({"a": 7, "b": 3})
  assert history.same(saved, now)
  assert history.continued(saved, now, step=9) == saved


def test_a_changed_mixture_starts_from_the_counts_at_the_step():
  """Hand-counted: 50 examples in the ratio 7 to 3, then 30 in the ratio 1 to 1 to 1, and then `b` is back."""
  first = section({"a": 7, "b": 3})
  second = history.continued(first, section({"a": 1, "c": 1, "d": 1}), step=5)
  assert (second["first"], second["given"], second["left"]) == (50, [35, 0, 0], {"b 0": [15, 0]})
  third = history.continued(second, section({"b": 1, "a": 1}), step=8)
  assert (third["first"], third["given"]) == (80, [15, 45])
  assert third["left"] == {"c 0": [10, 1], "d 0": [10, 2]}


def test_each_source_keeps_its_order_and_a_new_one_gets_another():
  """Also if it was away."""
  first = section({"b": 1, "c": 1}, streams=[0, 1])
  second = history.continued(first, section({"a": 1, "c": 1}), step=5)
  assert (second["streams"], second["left"]) == ([2, 1], {"b 0": [25, 0]})
  third = history.continued(second, section({"a": 1, "b": 1, "c": 1, "d": 1}), step=8)
  assert third["streams"] == [2, 0, 1, 3]


def test_a_new_source_of_the_same_size_does_not_change_the_order_of_another():
  """`a`, which is sorted before `b`, joins after 24 examples. `b` still gives each of its examples once."""

  def section_of(names: str) -> tuple[data.Dataset, history.Section]:
    parts = (data.Part(name, Numbers(100), Numbers(100), fingerprint=name) for name in names)
    dataset = data.Dataset(tuple(parts), "")
    return dataset, history.section(config("single", batch_size=8), dataset)

  (alone, before), (both, now) = section_of("b"), section_of("ab")
  after = history.continued(before, now, step=3)
  mixed = data.mixture(both, after["first"], tuple(after["given"]), tuple(after["streams"]))
  ids = data.mixture(alone).ids(np.arange(24), seed=0)
  later = mixed.ids(24 + np.arange(2 * 76), seed=0)
  assert sorted([*ids, *(later[later >= 100] - 100)]) == list(range(100))


def test_sources_with_the_same_content_are_counted_apart():
  saved = section({"x": 2, "y": 1}, fingerprints=["same", "same"])
  now = section({"x": 1, "y": 1}, fingerprints=["same", "same"])
  continued = history.continued(saved, now, step=3)
  assert continued["given"] == turns_taken((2, 1), 30).tolist() == [20, 10]


def test_a_source_with_new_content_begins_anew_and_the_run_says_so():
  saved, now = section({"a": 1, "b": 1}), section({"a": 1, "b": 1}, fingerprints=["a", "grown"])
  assert history.continued(saved, now, step=2)["given"] == [10, 0]
  assert history.change(saved, now) == "data was a 0.5, b 0.5 and is now a 0.5, b 0.5; b begins with its first example"


def test_another_order_or_share_is_a_change():
  saved = section({"a": 7, "b": 3})
  assert not history.same(saved, section({"a": 3, "b": 7}))
  assert not history.same(saved, section({"a": 7, "c": 3}))
  assert history.change(saved, section({"a": 1})) == "data was a 0.7, b 0.3 and is now a 1"
