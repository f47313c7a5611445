"""Compares examples with the shapes that a model needs, before anything is compiled."""

from typing import TYPE_CHECKING

import numpy as np

from data.dataset import HostBatch
from errors import ConfigError

if TYPE_CHECKING:  # what only looks at files starts without JAX
  from models.inputs import Shapes


def check_examples(batch: HostBatch, shapes: "Shapes", name: str) -> None:
  """Raises ConfigError unless a batch has the fields `shapes`, with these shapes and dtypes and values in range.

  JAX would not refuse all of them: a number out of range is clipped or read as 0, and other shapes may be broadcast.
  """
  for field, (shape, dtype, below) in shapes.items():
    if field not in batch:
      raise ConfigError(f"data.name={name!r} gives no {field!r}, which the model needs; it gives {', '.join(batch)}")
    values = batch[field]
    if not isinstance(values, np.ndarray):
      raise ConfigError(f"data.name={name!r} gives {field!r} as {type(values).__name__}; give a NumPy array")
    found = (values.shape[1:], values.dtype)
    if found != (tuple(shape), np.dtype(dtype)):
      raise ConfigError(
        f"data.name={name!r} gives {field!r} as {values.dtype}{list(values.shape[1:])}, but the model needs "
        f"{np.dtype(dtype)}{list(shape)}; change the data, or the sizes in model.*"
      )
    if below is None:
      if not np.isfinite(values).all():
        raise ConfigError(
          f"data.name={name!r} gives {field!r} with values that are not finite, which no model can learn from; leave "
          "these examples out, or replace the values"
        )
      continue
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= below:
      raise ConfigError(
        f"data.name={name!r} gives {field!r} with values from {low} to {high}, but the model needs 0 to {below - 1}; "
        "change the data, or the sizes in model.*"
      )
