"""Predicts what the optimizer stores, computes and sends, for any entry of its registry (training/optimizers)."""

import collections
import functools
import math
from typing import NamedTuple

import jax
from flax import nnx

from lab.analysis.case import Case, piece_size, ring_share
from lab.analysis.weights import Weight, weights
from models.dimensions import Dims, is_dims
from models.parameters import definition, logical_dims, trained
from models.sizes import ModelSizes
from strategies.execution.collectives import Share, share
from strategies.execution.padding import stored_shape
from training.optimizer import Optimizer
from training.optimizers import Rule
from training.optimizers.rule import sides


class Array(NamedTuple):
  """An array of an optimizer's state: its shape with all layers, bytes of an element, and its logical dimensions."""

  shape: tuple[int, ...]
  item: int
  dims: Dims


@functools.cache
def rule(sizes: ModelSizes, optimizer: Optimizer) -> Rule:
  return optimizer.rule(trained(sizes, logical_dims(sizes)), sizes.dtype)


@functools.cache
def state(sizes: ModelSizes, optimizer: Optimizer) -> tuple[Array, ...]:
  """The arrays of an optimizer's state, without numbers such as the count of steps."""
  _, params = definition(sizes)
  found = rule(sizes, optimizer)
  arrays = jax.tree.leaves(jax.eval_shape(found.transform.init, trained(sizes, nnx.to_pure_dict(params))))
  names = jax.tree.leaves(found.dims, is_leaf=is_dims)
  return tuple(Array(x.shape, x.dtype.itemsize, dims) for x, dims in zip(arrays, names, strict=True) if dims)


def state_bytes(case: Case) -> float:
  """Bytes of the state on one device."""
  return sum(piece_size(case.of_state, x.shape, x.dims) * x.item for x in state(case.sizes, case.optimizer))


def flops(case: Case) -> float:
  """FLOPs of one device for the matrices that the optimizer needs whole. Other updates have no products."""
  return sum(_flops(case, weight) for weight in whole(case))


def _flops(case: Case, weight: Weight) -> float:
  """Those for one weight."""
  one = (math.prod(weight.shape[at] for at in side) for side in sides(weight.dims) or ())
  matrices = _share(case, weight).layers * _experts(case, weight)
  return matrices * rule(case.sizes, case.optimizer).flops(*one)


def repeated_flops(case: Case) -> float:
  """The part of `flops` that is redundant, because several devices do the same (as `predict.repeated_flops`)."""
  pieces = lambda dims: math.prod(case.of_state.shards_in(dims, dim) for dim in dims if dim)
  shares = lambda weight: case.devices(_share(case, weight).copies) * pieces(weight.dims)
  return sum(_flops(case, weight) * (1 - shares(weight) / case.layout.device_count) for weight in whole(case))


def whole(case: Case) -> list[Weight]:
  """The weights that the optimizer needs whole."""
  by_layer = rule(case.sizes, case.optimizer).by_layer
  return [weight for weight in weights(case.sizes) if weight.trained and by_layer(weight.dims)]


def shared(case: Case) -> dict[tuple[str, tuple[str, ...]], float]:
  """Bytes that a device sends to share layers of weights, by kind and mesh axes.

  `by_layer` in strategies/execution/collectives.py sends them.
  """
  sent: collections.Counter[tuple[str, tuple[str, ...]]] = collections.Counter()
  for weight in whole(case):
    found = _share(case, weight)
    own = math.prod(stored_shape(case.of_state, weight.shape, weight.dims)[1:]) / case.devices(case.own_axes(weight))
    size = found.layers * case.devices(found.copies) * own * case.item
    for axes in (case.ordered(axes) for _, axes in found.pieces):
      sent["all-to-all", axes] += 2 * ring_share(case.devices(axes)) * size
    sent["all-gather", found.copies] += ring_share(case.devices(found.copies)) * size
  return sent


def summed(case: Case) -> dict[tuple[str, ...], float]:
  """Bytes that a device sends to sum over the pieces of weights, in float32, by mesh axes."""
  sent: collections.Counter[tuple[str, ...]] = collections.Counter()
  for weight in weights(case.sizes):
    for kept, gone in rule(case.sizes, case.optimizer).sums(weight.dims):
      size = 4 * piece_size(case.of_state, *([of[at] for at in kept] for of in (weight.shape, weight.dims)))
      dims = [dim for at in gone if (dim := weight.dims[at])]
      axes = case.ordered([axis for dim in dims for axis in case.of_state.axes_in(weight.dims, dim)])
      sent[axes] += 2 * ring_share(case.devices(axes)) * size
  return sent


def _share(case: Case, weight: Weight) -> Share:
  return share(case.of_state, weight.dims, weight.shape[0])


def _experts(case: Case, weight: Weight) -> int:
  """How many experts of a weight a device has; 1 if the weight has no such dimension."""
  sizes = dict(zip(weight.dims, weight.shape, strict=True))
  return sizes.get("experts", 1) // case.devices(case.own_axes(weight))
