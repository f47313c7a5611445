"""What random numbers are for. Each purpose has keys of its own, so no two of them get the same numbers.

A seed makes one root key. Only `Purpose.key` uses it. All other code starts from a purpose's key and folds in what the
numbers depend on: the weight, the step, the example or the text, but never the device. The order of examples needs no
key, because it comes from another generator (data/order.py).
"""

import enum

import jax


class Purpose(enum.IntEnum):
  """The numbers that are folded into the root key. Never change one: a resumed run would not go on as it began."""

  WEIGHTS = 0
  ADAPTERS = 1
  DROPOUT = 2
  AUGMENTATION = 3
  ROUNDING = 4  # of the optimizer's state
  SAMPLING = 5  # the tokens of texts
  WEIGHT_ROUNDING = 6  # of weights in bfloat16

  def key(self, root: jax.Array) -> jax.Array:
    """This purpose's key, from a seed's root key."""
    return jax.random.fold_in(root, int(self))
