"""Brings the weights of a model folder to where a layout wants them.

Each process reads only what its devices hold, a few layers or experts at a time. So its memory holds its part of the
model, and little more.
"""

import collections
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from checkpointing.pretrained.folder import Folder
from checkpointing.pretrained.tensors import Tensor, tensors
from models.sizes import ModelSizes

PART_BYTES = 1 << 28  # of a weight, read at a time, unless a single tensor is larger
Params = dict[str, Any]
Index = tuple[slice, ...]


def load(folder: Folder, sizes: ModelSizes, abstract: Params) -> Params:
  """The weights of a folder, with the dtypes and shardings of `abstract`, which has the model's parameters."""
  folder.check(sizes)
  every: dict[str, list[Tensor]] = collections.defaultdict(list)
  for tensor in tensors(sizes):
    every[tensor.weight].append(tensor)

  def weight(path: tuple, wanted: jax.ShapeDtypeStruct) -> jax.Array:
    own = every[jax.tree_util.keystr(path, simple=True, separator="/")]
    pieces: dict[str, jax.Array] = {}  # several devices may hold the same
    arrays = []
    assert wanted.sharding is not None
    for device, index in wanted.sharding.addressable_devices_indices_map(wanted.shape).items():
      assert index is not None
      if str(index) in pieces:
        arrays.append(jax.device_put(pieces[str(index)], device))
      else:
        arrays.append(_on_device(functools.partial(_read, folder, own, wanted), own, wanted, index, device))
        pieces[str(index)] = arrays[-1]
    return jax.make_array_from_single_device_arrays(wanted.shape, wanted.sharding, arrays)

  return jax.tree.map_with_path(weight, abstract)


def read_weight(folder: Folder, sizes: ModelSizes, name: str) -> np.ndarray:
  """A whole weight of a folder, such as "blocks/mlp/up" with all layers, in float32."""
  own = [tensor for tensor in tensors(sizes) if tensor.weight == name]
  wanted = jax.ShapeDtypeStruct(_whole(own), np.float32)
  return _read(folder, own, wanted, tuple(slice(0, size) for size in wanted.shape))


def _on_device(read: Any, own: list[Tensor], wanted: jax.ShapeDtypeStruct, index: Index, device: Any) -> jax.Array:
  """The piece of a weight that a device holds."""
  shape, stacked = _shape(index, wanted.shape), len(own[0].at)
  each = max(1, PART_BYTES // (np.dtype(wanted.dtype).itemsize * max(1, math.prod(shape[stacked:]))))
  if math.prod(shape[:stacked]) <= each:
    return jax.device_put(read(index), device)
  piece = jnp.zeros(shape, wanted.dtype, device=device)
  begins = [at.indices(size)[0] for at, size in zip(index, wanted.shape, strict=True)][:stacked]
  for some in _parts(shape[:stacked], each):
    own_part = (slice(begin + at.start, begin + at.stop) for begin, at in zip(begins, some, strict=True))
    part = read((*own_part, *index[stacked:]))
    piece = jax.block_until_ready(_put(piece, part, [at.start for at in some]))
  return piece


def _parts(shape: Sequence[int], each: int) -> Iterator[Index]:
  """Slices that make up an array of this shape, of at most `each` entries: several layers, or some experts of one."""
  if not shape:
    yield ()
    return
  first, *rest = shape
  step = max(1, each // max(1, math.prod(rest)))
  for start in range(0, first, step):
    for others in _parts(rest, each):
      yield (slice(start, min(start + step, first)), *others)


@functools.partial(jax.jit, donate_argnums=0)
def _put(piece: jax.Array, part: np.ndarray, starts: Sequence[jax.Array]) -> jax.Array:
  return jax.lax.dynamic_update_slice(piece, part, [*starts, *[0] * (piece.ndim - len(starts))])


def _read(folder: Folder, own: list[Tensor], wanted: jax.ShapeDtypeStruct, index: Index) -> np.ndarray:
  """A part of a weight, whose layers and experts are stacked. Behind the weight, a layout may store padding: zeros."""
  part, whole = np.zeros(_shape(index, wanted.shape), wanted.dtype), _whole(own)
  held = tuple(slice(*at.indices(size)[:2]) for at, size in zip(index, whole, strict=True))
  inside = tuple(slice(0, max(0, at.stop - at.start)) for at in held)
  stacked = len(own[0].at)
  if not part[inside].size:
    return part
  if not stacked:
    part[inside] = folder.read(own[0], held)
    return part
  for to in np.ndindex(*part[inside].shape[:stacked]):
    at = [place.start + number for place, number in zip(held, to, strict=False)]
    part[to][inside[stacked:]] = folder.read(own[np.ravel_multi_index(at, whole[:stacked])], held[stacked:])
  return part


def _whole(own: list[Tensor]) -> tuple[int, ...]:
  """The shape of the weight that these tensors make up."""
  return *(last + 1 for last in own[-1].at), *own[0].sizes


def _shape(index: Index, whole: tuple[int, ...]) -> list[int]:
  return [len(range(*at.indices(size))) for at, size in zip(index, whole, strict=True)]
