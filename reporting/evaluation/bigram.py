"""The baseline of a text model: predicts each byte from the previous one."""

import dataclasses
import math
from collections.abc import Iterable

import numpy as np

from data.dataset import Part, Text
from data.text.prepare import pair_counts


@dataclasses.dataclass(frozen=True)
class Baseline:
  """The loss of the byte bigram model on the validation text: in nats per token, and in bits per byte."""

  loss: float
  bits_per_byte: float


def baseline(text: Text, part: Part, windows: Iterable[np.ndarray]) -> Baseline | None:
  """Measures the bigram model of a part's training text on windows of validation tokens. None without its counts."""
  if part.byte_pairs is None or part.bytes_per_token is None:
    return None
  bits = bits_per_byte(part.byte_pairs, (text.to_bytes(window.tolist()) for window in windows))
  return Baseline(bits * math.log(2) * part.bytes_per_token, bits)


def bits_per_byte(counts: np.ndarray, texts: Iterable[bytes]) -> float:
  """Cross-entropy on `texts` of the bigram model with these counts and add-one smoothing.

  The first byte of each text is not predicted.
  """
  smoothed = counts + 1.0
  log_probability = np.log2(smoothed / smoothed.sum(axis=1, keepdims=True))
  seen = sum((pair_counts(text) for text in texts), np.zeros((256, 256), np.int64))
  return float(-(seen * log_probability).sum() / seen.sum())
