"""Writes a model folder: config.json, safetensors and what else the library transformers needs to load it; or adapters.

Weights are written one after another, so only one of them is in memory at a time. The folder gets its name when it is
complete.
"""

import contextlib
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import ml_dtypes  # noqa: F401  (makes bfloat16 known to numpy)
import numpy as np

from checkpointing.pretrained import families
from checkpointing.pretrained.folder import CONFIG, INDEX, SINGLE
from checkpointing.pretrained.tensors import Tensor, adapter_tensors, by_name, tensors, whole
from errors import ConfigError
from models.sizes import ModelSizes

ADAPTER_CONFIG, ADAPTERS = "adapter_config.json", "adapter_model.safetensors"
SHARD_BYTES = 5_000_000_000  # of a file, at most, unless a single tensor is larger
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # as safetensors names them


def export(
  out: Path,
  sizes: ModelSizes,
  read: Callable[[str], np.ndarray],
  files: Mapping[str, str],
  *,
  dtype: str = "float32",
  end: int | None = None,
  context: int = 0,
  shard_bytes: int = SHARD_BYTES,
) -> None:
  """Writes a model folder.

  Args:
    read: returns a weight by its name, such as "blocks/mlp/up", with all layers.
    files: what else belongs into the folder, by name.
    dtype: in which weights are written.
    end: the id of the token that ends a text.
    context: how many tokens a text has at most, if more than the model's seq_len.
    shard_bytes: the size of a file of weights, at most.

  Raises ConfigError if `out` exists and is not an empty folder, or if the model is none that can be written.
  """
  config = json.dumps(families.write(sizes, dtype, end, context), indent=2) + "\n"
  with _new_folder(out) as unfinished:
    for name, text in {**files, CONFIG: config}.items():
      (unfinished / name).write_text(text)
    item = np.dtype(dtype).itemsize
    shards = list(_shards([*by_name(tensors(sizes)).values()], item, shard_bytes))
    names = [SINGLE] if len(shards) == 1 else [_name(number, len(shards)) for number in range(len(shards))]
    layers = _Layers(read)
    for name, shard in zip(names, shards, strict=True):
      _write(unfinished / name, shard, dtype, layers)
    if len(shards) > 1:
      total = sum(_bytes(own, item) for shard in shards for own in shard)
      places = {own[0].name: name for name, shard in zip(names, shards, strict=True) for own in shard}
      index = {"metadata": {"total_size": total}, "weight_map": places}
      (unfinished / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def export_adapters(
  out: Path, sizes: ModelSizes, read: Callable[[str], np.ndarray], files: Mapping[str, str], base: str
) -> None:
  """Writes the adapters of a model (models/lora.py) as a folder that the library PEFT loads, in float32.

  Args:
    read, files: as for `export`.
    base: the path of the model that they belong to.

  Raises ConfigError for adapters of experts: how PEFT stores them depends on the versions of both libraries.
  """
  lora = sizes.lora
  assert lora is not None
  if sizes.experts and lora.of_expert:
    raise ConfigError(
      f"PEFT has no standard form for adapters of experts (model.experts={sizes.experts.count}, model.lora_targets="
      f"{','.join(lora.targets)!r}); export the whole model with --merge"
    )
  config = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": base,
    "r": lora.rank,
    "lora_alpha": lora.alpha,
    "target_modules": sorted({tensor.name.split(".")[-3] for tensor in adapter_tensors(sizes)}),
    "lora_dropout": 0.0,
    "bias": "none",
    "inference_mode": True,
  }
  with _new_folder(out) as unfinished:
    for name, text in {**files, ADAPTER_CONFIG: json.dumps(config, indent=2) + "\n"}.items():
      (unfinished / name).write_text(text)
    _write(unfinished / ADAPTERS, [*by_name(adapter_tensors(sizes)).values()], "float32", _Layers(read))


@contextlib.contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
  """A folder to write to, which gets its name when it is complete."""
  if out.exists() and (not out.is_dir() or any(out.iterdir())):
    raise ConfigError(f"out={str(out)!r} exists already; name a new folder")
  unfinished = out.with_name(f".{out.name}.unfinished")
  shutil.rmtree(unfinished, ignore_errors=True)
  unfinished.mkdir(parents=True)
  try:
    yield unfinished
  except BaseException:
    shutil.rmtree(unfinished, ignore_errors=True)
    raise
  for place in unfinished.iterdir():
    with place.open("rb") as file:
      os.fsync(file.fileno())
  if out.exists():
    out.rmdir()
  unfinished.rename(out)


class _Layers:
  """Reads weights for their layers' tensors, each weight once: tensors of one weight follow one another."""

  def __init__(self, read: Callable[[str], np.ndarray]):
    self.read, self.weights = read, dict[str, np.ndarray]()

  def __call__(self, own: Sequence[Tensor]) -> np.ndarray:
    names = [tensor.weight for tensor in own]
    if [*self.weights] != names:
      self.weights = {}  # frees those before
      self.weights = {name: self.read(name) for name in names}
    return whole(own, self.weights.__getitem__)


def _shards(every: Sequence[list[Tensor]], item: int, most: int) -> Iterator[list[list[Tensor]]]:
  """The tensors of each file, in their order; each with the weights that it holds."""
  shard: list[list[Tensor]] = []
  size = 0
  for own in every:
    if shard and size + _bytes(own, item) > most:
      yield shard
      shard, size = [], 0
    shard.append(own)
    size += _bytes(own, item)
  yield shard


def _bytes(own: Sequence[Tensor], item: int) -> int:
  return item * int(np.prod(own[0].shape))


def _name(number: int, count: int) -> str:
  return f"model-{number + 1:05}-of-{count:05}.safetensors"


def _write(path: Path, shard: Sequence[Sequence[Tensor]], dtype: str, layers: _Layers) -> None:
  """A file of tensors (https://huggingface.co/docs/safetensors): the size of a header, the header, and the numbers.

  The library that writes such files wants all tensors in memory.
  """
  header: dict[str, object] = {"__metadata__": {"format": "pt"}}
  at = 0
  for own in shard:
    end = at + _bytes(own, np.dtype(dtype).itemsize)
    header[own[0].name] = {"dtype": DTYPES[dtype], "shape": own[0].shape, "data_offsets": [at, end]}
    at = end
  text = json.dumps(header).encode()
  text += b" " * (-len(text) % 8)
  with path.open("wb") as file:
    file.write(struct.pack("<Q", len(text)) + text)
    for own in shard:
      file.write(np.ascontiguousarray(layers(own), dtype).reshape(-1).view(np.uint8).data)
