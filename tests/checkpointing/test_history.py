"""The counts of each source stay honest when sources or weights change between two runs."""

from typing import Any

from checkpointing import history
from data.order import turns_taken


def section(turns: dict[str, int], **fields: Any) -> dict[str, Any]:
  """The section of a run whose sources have these fingerprints and turns."""
  names = list(turns)
  new = {
    "names": names, "fingerprints": names, "turns": list(turns.values()), "first": 0, "given": [0] * len(names),
    "left": {}, "batch_size": 10,
  }  # fmt: skip
  return new | fields


def test_the_same_data_keeps_its_history():
  saved = section({"a": 7, "b": 3}, first=40, given=[30, 10], left={"c 0": 5})
  now = section({"a": 7, "b": 3})
  assert history.same(saved, now)
  assert history.continued(saved, now, step=9) == saved


def test_a_changed_mixture_starts_from_the_counts_at_the_step():
  """Hand-counted: 50 examples in the ratio 7 to 3, then 30 in the ratio 1 to 1 to 1, and then `b` is back."""
  first = section({"a": 7, "b": 3})
  second = history.continued(first, section({"a": 1, "c": 1, "d": 1}), step=5)
  assert (second["first"], second["given"], second["left"]) == (50, [35, 0, 0], {"b 0": 15})
  third = history.continued(second, section({"b": 1, "a": 1}), step=8)
  assert (third["first"], third["given"]) == (80, [15, 45])
  assert third["left"] == {"c 0": 10, "d 0": 10}


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
