"""Brings the weights of a model folder to where a layout wants them.

Each process reads only what its devices hold, a few layers at a time. So its memory holds its part of the model, and
little more.
"""

import collections
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.sizes import ModelSizes
from pretrained.folder import Folder
from pretrained.tensors import Tensor, tensors

PART_BYTES = 1 << 28  # of a weight, read at a time, unless a single layer is larger
Params = dict[str, Any]
Index = tuple[slice, ...]


def load(folder: Folder, sizes: ModelSizes, abstract: Params) -> Params:
  """The weights of a folder, with the dtypes and shardings of `abstract`, which has the model's parameters."""
  folder.check(sizes)
  layers: dict[str, list[Tensor]] = collections.defaultdict(list)
  for tensor in tensors(sizes):
    layers[tensor.weight].append(tensor)

  def weight(path: tuple, wanted: jax.ShapeDtypeStruct) -> jax.Array:
    own = layers[jax.tree_util.keystr(path, simple=True, separator="/")]
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
  shape = own[0].sizes if own[0].layer is None else (len(own), *own[0].sizes)
  wanted = jax.ShapeDtypeStruct(shape, np.float32)
  return _read(folder, own, wanted, tuple(slice(0, size) for size in shape))


def _on_device(read: Any, layers: list[Tensor], wanted: jax.ShapeDtypeStruct, index: Index, device: Any) -> jax.Array:
  """The piece of a weight that a device holds."""
  shape = _shape(index, wanted.shape)
  first, *rest = index
  each = max(1, PART_BYTES // (np.dtype(wanted.dtype).itemsize * max(1, int(np.prod(shape[1:])))))
  if layers[0].layer is None or shape[0] <= each:
    return jax.device_put(read(index), device)
  piece = jnp.zeros(shape, wanted.dtype, device=device)
  begin, end, _ = first.indices(wanted.shape[0])
  for start in range(begin, end, each):
    part = read((slice(start, min(start + each, end)), *rest))
    piece = jax.block_until_ready(_put(piece, part, start - begin))
  return piece


@functools.partial(jax.jit, donate_argnums=0)
def _put(piece: jax.Array, part: np.ndarray, start: int) -> jax.Array:
  return jax.lax.dynamic_update_slice_in_dim(piece, part, start, axis=0)


def _read(folder: Folder, layers: list[Tensor], wanted: jax.ShapeDtypeStruct, index: Index) -> np.ndarray:
  """A part of a weight, whose layers are stacked unless it is outside the blocks."""
  if layers[0].layer is None:
    return np.ascontiguousarray(folder.read(layers[0], index), wanted.dtype)
  part = np.empty(_shape(index, wanted.shape), wanted.dtype)
  for tensor, place in zip(layers[index[0]], part, strict=True):
    place[...] = folder.read(tensor, index[1:])
  return part


def _shape(index: Index, whole: tuple[int, ...]) -> list[int]:
  return [len(range(*at.indices(size))) for at, size in zip(index, whole, strict=True)]
