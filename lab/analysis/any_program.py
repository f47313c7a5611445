"""What explain says of a program that is not the Transformer's: what its dimensions alone decide.

That is where weights and the optimizer's state are, the memory that they take, and what gathering weights and summing
their gradients sends. Activations have no names that a layout knows, so what they take and send is the compiler's word
alone.
"""

import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp

from lab.analysis.case import ring_share
from lab.analysis.compiled import CompiledStep, DoesNotFit
from lab.analysis.sent import Sent
from models.dimensions import Dims, is_dims, leaves_of
from models.parameters import named
from strategies.execution.padding import stored_shape
from strategies.execution.strategy import Strategy
from strategies.layout import Layout, axes_of

NOT_KNOWN = "What this model's activations take and send is not predicted, and a step's time neither."


def facts(strategy: Strategy, step: CompiledStep | None, error: DoesNotFit | None, capacity: float | None) -> dict:
  """The entries of `explanation.explain` that depend on the model."""
  optimizer, predicted = strategy.program.optimizer, memory(strategy)
  total = step.bytes if step else error and error.needed
  return {
    "weights": placed(strategy),
    "activations": [],
    "memory": {
      "optimizer": f"{optimizer.name}, moments in {optimizer.moments}",
      "predicted": predicted | {"saved": None, "working": None, "host": 0.0, "total": None},
      "arguments": step.arguments if step else None,
      "temporary": step.temporary if step else error and error.temporary,
      "total": total,
      "host": step.host if step else None,
      "device": capacity,
      "fits": step.bytes <= capacity if step and capacity is not None else None,
      "fixes": [],
    },
    "theory": [row._asdict() for row in sent(strategy)],
    "excess": [],
    "timeline": None,
    "bubble": None,
    "time": None,
    "panels": None,
    "not_known": NOT_KNOWN,
  }


def placed(strategy: Strategy) -> list[dict[str, Any]]:
  """The rows of the table of weights."""
  layout, shown = strategy.layout, strategy.layout.compact
  return [
    {
      "name": name,
      "shape": shape,
      "dims": dims,
      "spec": tuple(shown.spec(dims)),
      "state": tuple(shown.stored_as("state").spec(dims)),
      "bytes": held(layout, shape, dims) * dtype.itemsize,
    }
    for name, shape, dims, dtype in weights(strategy)
  ]


def weights(strategy: Strategy) -> list[tuple[str, tuple[int, ...], Dims, Any]]:
  """Name, global shape, dimensions and dtype of each parameter, also of statistics."""
  arrays, dims = named(strategy.shapes.params), leaves_of(strategy.program.dims())
  return [(name, tuple(x.shape), names, x.dtype) for (name, x), names in zip(arrays, dims, strict=True)]


def held(layout: Layout, shape: tuple[int, ...], dims: Dims) -> int:
  """How many numbers of an array a device has, with padding."""
  pieces = math.prod(layout.mesh[axis] for place in layout.spec(dims) for axis in axes_of(place))
  return math.prod(stored_shape(layout, shape, dims)) // pieces


def memory(strategy: Strategy) -> dict[str, float]:
  """Bytes on a device: of parameters, of the optimizer's state and of gradients."""
  layout, program, shapes = strategy.layout, strategy.program, strategy.shapes
  count = lambda layout, x, dims: held(layout, x.shape, dims) * jnp.dtype(x.dtype).itemsize
  total = lambda layout, dims, tree: sum(
    jax.tree.leaves(jax.tree.map(lambda dims, x: count(layout, x, dims), dims, tree, is_leaf=is_dims))
  )
  dims = program.dims()
  return {
    "parameters": total(layout, dims, shapes.params),
    "optimizer": total(layout.stored_as("state"), program.rule.dims, shapes.opt_state),
    "gradients": total(layout.stored_as("state"), program.trained(dims), program.trained(shapes.params)),
  }


def sent(strategy: Strategy) -> list[Sent]:
  """What a device sends to gather weights along `embed`, to sum their gradients, and to gather updated weights.

  A weight is gathered once for each part of a batch, and kept until its backward pass.
  """
  layout, transfers = strategy.layout, strategy.transfers
  trained = {name for name, _ in named(strategy.program.trained(strategy.shapes.params))}
  devices = lambda axes: math.prod(layout.mesh[axis] for axis in axes)
  of_state, found = layout.stored_as("state"), Counter[tuple[str, tuple[str, ...], str]]()
  for name, shape, dims, dtype in weights(strategy):
    split = layout.axes_in(dims, "embed") if "embed" in dims else ()
    along = lambda axes, split=split: tuple(axis for axis in split if axis in axes)
    whole = held(layout.place(embed=None, gradients=None, state=None), shape, dims) * dtype.itemsize
    for axes, times in ((along(transfers.gathered_each_part), transfers.parts), (along(transfers.gathered_once), 1)):
      found["all-gather", axes, "weights, for each part" if times > 1 else "weights"] += (
        times * ring_share(devices(axes)) * whole
      )
    if name not in trained:
      continue
    state = of_state.axes_in(dims, "embed") if "embed" in dims else ()
    for scattered, reduced, times in (
      (transfers.scattered_each_part, transfers.reduced_each_part, transfers.parts),
      (transfers.scattered_once, transfers.reduced_once, 1),
    ):
      pieces = tuple(axis for axis in state if axis in scattered)
      # What cannot be scattered, because it has no such dimension, is summed whole.
      rest = tuple(axis for axis in layout.mesh if axis in {*scattered, *reduced} - {*pieces})
      found["reduce-scatter", pieces, "gradients"] += times * ring_share(devices(pieces)) * whole
      found["all-reduce", rest, "gradients"] += times * 2 * ring_share(devices(rest)) * whole / devices(pieces)
    updated = tuple(axis for axis in state if axis in transfers.gathered_updated)
    size = held(layout, shape, dims) * dtype.itemsize
    found["all-gather", updated, "new weights"] += ring_share(devices(updated)) * size
  return [Sent(kind, axes, size, what) for (kind, axes, what), size in found.items() if size]
