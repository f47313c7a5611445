"""Windows: sequences cut from all tokens in a row, across documents. packing.py packs whole documents instead."""

import dataclasses

import numpy as np

from data.dataset import HostBatch
from data.files import Numbers


@dataclasses.dataclass(frozen=True)
class Windows:
  """Windows of `length` + 1 tokens. Neighbours share one token: a target of the first, an input of the next."""

  tokens: Numbers
  length: int

  def __len__(self) -> int:
    return max(0, len(self.tokens) - 1) // self.length

  def read(self, ids: np.ndarray) -> HostBatch:
    """Windows as `tokens`, int32 [N, length + 1]."""
    return {"tokens": self.tokens.read(ids * self.length, self.length + 1).astype(np.int32)}
