"""Arithmetic and traffic of splash attention, the kernel that computes attention on TPUs (models/cores.py).

The kernel works on blocks of positions, queries × keys. It skips blocks in which no query sees a key, and computes all
pairs of the others. The forward pass is one kernel. The backward pass is two, one for the gradient of queries and one
for those of keys and values. Both compute the scores and the gradients of the weights again.
"""

from typing import NamedTuple

from models import windows
from models.ops.pieces import splash_block

PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}  # matrix products of a kernel for each pair of blocks


class Work(NamedTuple):
  """FLOPs, and bytes that are read from and written to memory."""

  flops: float
  bytes: float


def work(kernel: str, rows: float, length: int, head: int, item: int, causal: bool, window: int = 0) -> Work:
  """What one run of a kernel does.

  Args:
    kernel: "fwd", "dq" or "dkv".
    rows: examples × query heads.
    length: positions; a kernel pads them.
    head: elements of a head.
    item: bytes of an element.
    window: how many positions a query sees; 0: all.
  """
  block = splash_block(length, window)
  count, computed = -(-length // block), pairs(length, causal, window)
  flops = PRODUCTS[kernel] * 2 * computed * head
  once = {"fwd": 2, "dq": 3, "dkv": 4}[kernel] * count * block * head * item  # what is read or written block by block
  again = 2 * computed / block * head * item  # keys and values for each block of queries, or queries and cotangents
  numbers = 128 if kernel == "fwd" else 2  # for each query a logarithm; the first kernel writes one in every lane
  sums = 4 * count * block * numbers
  return Work(rows * flops, rows * (once + again + sums))


def pairs(length: int, causal: bool, window: int = 0) -> int:
  """How many pairs of a query and a key a kernel computes: all those of each block that it does not skip."""
  block = splash_block(length, window)
  count = -(-length // block)
  seen = 1 + -(-(window - 1) // block) if window else count  # blocks of keys with one that some query of a block sees
  return windows.pairs(count, seen, causal) * block**2
