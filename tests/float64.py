"""Runs programs in float64: what is float32 in them is float64, and what is int32 is int64.

Sums over devices then round nothing that a rounding to float8 could see. So a strategy equals a single device to the
last digits, or it computes something else.
"""

import contextlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

from models import objectives, parameters, sizes, transformer

FIELDS = {"model__dtype": "float64", "model__param_dtype": "float64"}


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
  """Programs that are made here, with `FIELDS`, compute in float64."""
  with pytest.MonkeyPatch.context() as patch, jax.enable_x64(True):
    patch.setattr(jnp, "float32", jnp.float64)
    patch.setattr(jnp, "int32", jnp.int64)
    for name in ("dtype", "param_dtype"):
      patch.setitem(sizes.KNOWN, name, (*sizes.DTYPES, "float64"))
    patch.setattr(sizes, "DTYPES", (*sizes.DTYPES, "float64"))
    used = transformer.used_dtype
    for module in (parameters, transformer):  # routers compute in float32, whatever the rest does
      patch.setattr(module, "used_dtype", lambda w, sizes: used(w, sizes).replace("float32", "float64"))
    patch.setattr(objectives.Objective, "sums", {"correct": "int64"})
    yield
