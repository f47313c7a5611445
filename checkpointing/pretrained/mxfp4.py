"""Weights of experts in four bits each: MXFP4 (OCP Microscaling Formats 1.0), as published gpt-oss models have them.

Of a weight [E, I, O] there are two tensors of bytes. `NAME_blocks` [E, O, I/32, 16] has two numbers in each byte, first
that of the lower bits, and `NAME_scales` [E, O, I/32] the power of two that multiplies 32 numbers, plus 127.
"""

import numpy as np

BLOCKS, SCALES = "_blocks", "_scales"
SIZE = 32  # numbers with one scale
NO_NUMBER = 255  # as a scale
# By their four bits: a sign, two bits of an exponent, and one of a fraction (E2M1).
NUMBERS = np.array([*(magnitudes := (0, 0.5, 1, 1.5, 2, 3, 4, 6)), *(-x for x in magnitudes)], np.float32)


def numbers(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
  """Blocks [..., G, 16] and scales [..., G] of bytes → the numbers [..., 32 · G], float32."""
  pairs = np.stack([NUMBERS[blocks & 15], NUMBERS[blocks >> 4]], axis=-1)  # [..., G, 16, 2]
  scaled = np.ldexp(pairs, scales.astype(np.int32)[..., None, None] - 127)
  return scaled.reshape(*scales.shape[:-1], -1)


def shapes(shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
  """The shapes of the two tensors of a weight [E, I, O], by what is added to its name."""
  experts, inputs, outputs = shape
  return {BLOCKS: (experts, outputs, inputs // SIZE, SIZE // 2), SCALES: (experts, outputs, inputs // SIZE)}
