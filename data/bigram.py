"""The yardstick: how well bytes can be predicted from just the one before."""

from collections.abc import Iterable

import numpy as np


def pair_counts(text: bytes) -> np.ndarray:
  """How often each byte follows each other one in a text, int64 [256, 256]."""
  values = np.frombuffer(text, np.uint8).astype(np.int64)
  return np.bincount(values[:-1] * 256 + values[1:], minlength=256 * 256).reshape(256, 256)


def bits_per_byte(counts: np.ndarray, texts: Iterable[bytes]) -> float:
  """Cross-entropy on `texts` of the bigram model with these counts and add-one smoothing.

  The first byte of each text is only a context.
  """
  smoothed = counts + 1.0
  log_probability = np.log2(smoothed / smoothed.sum(axis=1, keepdims=True))
  seen = sum((pair_counts(text) for text in texts), np.zeros((256, 256), np.int64))
  return float(-(seen * log_probability).sum() / seen.sum())
