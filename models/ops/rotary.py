"""Rotary embedding (arXiv:2104.09864): the angles of positions, and the rotation of queries and keys by them."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

# The numbers of `model.rope_scaling`, by `model.rope_scaling_kind`.
SCALINGS = {
  "llama3": ("factor", "low", "high", "length"),
  "linear": ("factor",),
  "yarn": ("factor", "slow", "fast", "length", "scale"),
  "yarn_unrounded": ("factor", "slow", "fast", "length", "scale"),
}


def frequencies(pairs: int, base: float, scaling: Sequence[float], kind: str = "llama3") -> np.ndarray:
  """The angle by which each pair of elements turns from one position to the next, in radians, float64 [pairs].

  With `scaling`, pairs turn `factor` times slower. So a model reads longer texts than it was trained on. With "linear"
  all do (arXiv:2306.15595). Else those that turn fast stay as they are, and those between in part:

      llama3    pairs that turn at least `high` times over `length` positions stay, and pairs that turn at most `low`
                times are slowed down in full; between, by their turns (arXiv:2407.21783)
      yarn      so with `fast` and `slow` turns, but between by the pair's number; queries and keys are also
                multiplied by `scale` (arXiv:2309.00071). The range of pairs between is rounded up to whole numbers;
                "yarn_unrounded" leaves it as it is
  """
  frequency = float(base) ** (-np.arange(pairs) / pairs)
  if not scaling:
    return frequency
  if kind == "linear":
    return frequency / scaling[0]
  factor, low, high, length = scaling[:4]
  if kind == "llama3":
    unscaled = np.clip((length * frequency / (2 * math.pi) - low) / (high - low), 0, 1)
  else:
    number = lambda turns: pairs * math.log(length / (turns * 2 * math.pi)) / math.log(base)  # of the pair with these
    first, last = number(high), number(low)
    if kind == "yarn":
      first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    unscaled = 1 - np.clip((np.arange(pairs) - first) / max(last - first, 1e-3), 0, 1)
  return frequency * (unscaled + (1 - unscaled) / factor)


def scale_of(scaling: Sequence[float], kind: str) -> float:
  """What queries and keys are multiplied by, beside being rotated."""
  return scaling[-1] if scaling and kind.startswith("yarn") else 1.0


def angles(coordinates: jax.Array, frequency: np.ndarray) -> jax.Array:
  """Integer coordinates [..., C] and frequencies [P] → angles [..., C·P] in float32, from -π to π.

  C is the number of coordinates of a position: 1 in a text, 2 (row and column) in an image. Each coordinate sets the
  angles of an equal share of the pairs.

  Position times frequency in float32 would be off by 0.06 at a million positions. So an angle is counted in 2^-32
  turns: the product of integers drops whole turns, and what the frequency has beyond an integer adds little. An angle
  is right to 1e-6 up to 2^24 positions.
  """
  turns = frequency / (2 * math.pi) % 1 * 2**32
  whole = np.round(turns)
  part = coordinates[..., None].astype(np.uint32) * (whole % 2**32).astype(np.uint32)
  beyond = coordinates[..., None].astype(jnp.float32) * (turns - whole).astype(np.float32)
  in_turn = jax.lax.bitcast_convert_type(part, np.int32).astype(jnp.float32) + beyond
  return (in_turn * np.float32(math.pi / 2**31)).reshape(*coordinates.shape[:-1], -1)


def rotate(x: jax.Array, angles: jax.Array, scale: float = 1.0) -> jax.Array:
  """Rotates each pair of elements (i, i + H/2) of x [B, T, N, H] by angles [T, H/2] or [B, T, H/2].

  The result is multiplied by `scale`.
  """
  cos, sin = jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]
  if scale != 1:
    cos, sin = cos * scale, sin * scale
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
