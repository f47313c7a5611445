"""What a checkpoint knows of its data: the sources, their shares and orders, and how many examples each has given.

With one set of sources, the step alone gives the position in each of them. If a resumed run has other sources or
weights (`data.on_change="continue"`), the counts at that step are written down, and the new shares hold from there on.
A source that is in both goes on where it was, in its order. One that left is remembered in case it returns. If the
content of a source has changed, it is another source.
"""

import itertools
from typing import Any

from ml_collections import ConfigDict

from data import Dataset, mixture
from data.order import turns_taken

Section = dict[str, Any]  # the part `data` of a checkpoint's record


def section(config: ConfigDict, dataset: Dataset) -> Section:
  """The section of a new run."""
  mixed = mixture(dataset)
  return {
    "names": [part.name for part in dataset.parts],
    "fingerprints": [part.fingerprint for part in dataset.parts],
    "turns": list(mixed.turns),  # of each source in a period
    "streams": list(mixed.streams),  # which give sources of one size orders of their own
    "first": 0,  # the position, in examples, from which on these shares hold
    "given": [0] * len(dataset.parts),  # how many examples each source had given before
    "left": {},  # [given, stream] of the sources that are no longer there, by fingerprint
    "tokenizer": dataset.tokenizer,
    "seed": config.seed,
    "batch_size": config.batch_size,
  }


def same(saved: Section, now: Section) -> bool:
  """Whether two runs have the same sources in the same shares."""
  return all(saved[name] == now[name] for name in ("fingerprints", "turns"))


def continued(saved: Section, now: Section, step: int) -> Section:
  """The section of a run that resumes at `step` from a checkpoint with section `saved`."""
  if same(saved, now):
    return now | {name: saved[name] for name in ("first", "given", "streams", "left")}
  position = step * saved["batch_size"]
  taken = turns_taken(tuple(saved["turns"]), position - saved["first"])
  counts = [before + int(n) for before, n in zip(saved["given"], taken, strict=True)]
  known = saved["left"] | {
    key: [count, stream] for key, count, stream in zip(_keys(saved), counts, saved["streams"], strict=True)
  }
  used = {stream for _, stream in known.values()}
  fresh = (stream for stream in itertools.count() if stream not in used)
  found = [known.pop(key, None) or [0, next(fresh)] for key in _keys(now)]
  given, streams = (list(values) for values in zip(*found, strict=True))
  return now | {"first": position, "given": given, "streams": streams, "left": known}


def change(saved: Section, now: Section) -> str:
  """One line on how the sources or their shares have changed."""
  known = {*_keys(saved), *saved["left"]}
  new = [name for name, key in zip(now["names"], _keys(now), strict=True) if key not in known]
  begins = f"; {', '.join(new)} begins with its first example" if new else ""
  return f"data was {_shares(saved)} and is now {_shares(now)}{begins}"


def _shares(part: Section) -> str:
  period = sum(part["turns"])
  return ", ".join(
    f"{name or 'the default'} {turns / period:.3g}" for name, turns in zip(part["names"], part["turns"], strict=True)
  )


def _keys(part: Section) -> list[str]:
  """A key for each source: its fingerprint, numbered if the same examples are there several times."""
  prints = part["fingerprints"]
  return [f"{p} {prints[:i].count(p)}" for i, p in enumerate(prints)]
