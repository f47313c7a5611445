"""Texts with a class: one example a document. The model reads a whole text and predicts its class."""

import dataclasses

import numpy as np

from data.dataset import HostBatch
from data.files import ArrayFile


@dataclasses.dataclass(frozen=True)
class Labelled:
  """The first `length` tokens of each document, without its END token, and the document's class.

  Attributes:
    tokens: all documents in a row. Each ends with an END token.
    ends: the position just after each document, int64 [documents].
    labels: the class of each document.
    length: of a sequence. Shorter documents are padded with 0.
  """

  tokens: ArrayFile
  ends: ArrayFile
  labels: ArrayFile
  length: int

  def __len__(self) -> int:
    return len(self.ends)

  def read(self, ids: np.ndarray) -> HostBatch:
    """Documents as `tokens` and `segments` (1, or 0 for padding), int32 [N, length], and `label`, int32 [N]."""
    stops = self.ends.read(ids, 1)[:, 0]
    starts = np.where(ids == 0, 0, self.ends.read(np.maximum(ids - 1, 0), 1)[:, 0])
    tokens, segments = np.zeros((2, len(ids), self.length), np.int32)
    for row, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
      size = min(max(stop - 1 - start, 1), self.length)  # of an empty document the END, as not all may be padding
      tokens[row, :size] = self.tokens.slice(start, start + size)
      segments[row, :size] = 1
    return {"tokens": tokens, "segments": segments, "label": self.labels.read(ids, 1)[:, 0].astype(np.int32)}
