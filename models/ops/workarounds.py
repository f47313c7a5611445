"""What keeps compilers from undoing, reordering or refusing what a program says. Each names the compiler and why."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

T = TypeVar("T")


def cast_before_sending(w: jax.Array) -> jax.Array:
  """A weight that was cast and is about to be gathered: it travels in this dtype.

  Without the barrier, XLA's GPU compiler gathers the head in float32 and casts it afterwards: twice the bytes.
  """
  return jax.lax.optimization_barrier(w)


def sum_in_dtype(collective: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
  """Applies a sum over devices. On CPUs in float32 at least: XLA's CPU backend fails on bfloat16 (jax 0.10.2)."""
  if x.dtype != jnp.bfloat16:
    return collective(x)
  in_float32 = lambda x: collective(x.astype(jnp.float32)).astype(x.dtype)
  return jax.lax.platform_dependent(x, cpu=in_float32, default=collective)


def in_order(first: Any, then: T) -> T:
  """`then`, unchanged, but not before `first` is computed.

  XLA's CPU backend runs what is independent in any order: also a gather or sum over devices, and a phase that neither
  reads nor writes the same values. If devices choose different orders, they wait for each other forever. So `then`
  must depend on `first` in the compiled program, from which a barrier would be gone. Other backends keep one order.
  """

  def tied(first: Any, then: T) -> T:
    largest = functools.reduce(jnp.maximum, [jnp.max(jnp.abs(x)).astype(jnp.float32) for x in jax.tree.leaves(first)])
    zero = largest < -1  # always false, but the compiler does not know
    return jax.tree.map(lambda x: x + zero.astype(x.dtype), then)

  return jax.lax.platform_dependent(first, then, cpu=tied, default=lambda first, then: then)
