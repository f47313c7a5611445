"""Rotary positions: angles, and the rotation of queries and keys by them."""

import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
  from models.config import ModelConfig


def rope_angles(coordinates: jax.Array, config: "ModelConfig") -> jax.Array:
  """The angles of rotary embedding (arXiv:2104.09864): coordinates [..., C] → [..., head_dim / 2].

  C is the number of coordinates of a position: 1 in a text, 2 (row and column) in an image. Each coordinate sets the
  angles of an equal share of the pairs.

  With `rope_scaling`, pairs that turn slowly turn `factor` times slower, as in Llama 3.1 (arXiv:2407.21783). So a model
  reads longer texts than it was trained on. Pairs that turn at least `high` times over `length` positions stay as they
  are, pairs that turn at most `low` times are slowed down in full, and those between in part.
  """
  count = coordinates.shape[-1]
  pairs = config.head_dim // 2 // count
  frequency = config.rope_base ** (-jnp.arange(pairs, dtype=jnp.float32) / pairs)
  if config.rope_scaling:
    factor, low, high, length = config.rope_scaling
    kept = jnp.clip((length * frequency / (2 * math.pi) - low) / (high - low), 0, 1)
    frequency *= kept + (1 - kept) / factor
  return (coordinates[..., None] * frequency).reshape(*coordinates.shape[:-1], count * pairs)


def rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
  """Rotates each pair of elements (i, i + H/2) of x [B, T, N, H] by angles [T, H/2] or [B, T, H/2]."""
  cos, sin = jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
