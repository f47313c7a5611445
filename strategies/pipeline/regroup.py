"""Moves the weights of an interleaved schedule to the stages that use them."""

import math

import jax
import jax.numpy as jnp


def regroup(w: jax.Array, stages: int, chunks: int) -> jax.Array:
  """This stage's stored, consecutive layers [L/S, ...] → the chunks that it runs [chunks, L/(S · chunks), ...].

  The layers form S · chunks groups. Group q is stored on stage q // chunks and used by stage q % S as chunk q // S. One
  ppermute for each chunk moves the groups; in each, a stage sends one group and receives one.
  """
  w = w.reshape(chunks, -1, *w.shape[1:])
  if chunks == 1 or stages == 1:
    return w
  stage, period = jax.lax.axis_index("stage"), math.lcm(stages, chunks)
  moved = jnp.zeros_like(w)
  for turn in range(chunks):
    groups = [q for q in range(stages * chunks) if (q + q // period) % chunks == turn]
    send = jnp.array([q % chunks for q in sorted(groups, key=lambda q: q // chunks)])
    keep = jnp.array([q // stages for q in sorted(groups, key=lambda q: q % stages)])
    group = jax.lax.ppermute(w[send[stage]], "stage", [(q // chunks, q % stages) for q in groups])
    moved = jax.lax.dynamic_update_index_in_dim(moved, group, keep[stage], axis=0)
  return moved
