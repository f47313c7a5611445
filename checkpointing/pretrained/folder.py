"""A model folder: what it holds, checked before anything large is read, and parts of its tensors.

Weights are in `model.safetensors`, or in several such files that `model.safetensors.index.json` lists.
"""

import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (makes bfloat16 known to numpy)
import numpy as np
from safetensors import SafetensorError, safe_open

import limits
from checkpointing.pretrained import families, mxfp4
from checkpointing.pretrained.tensors import Tensor, tensors
from errors import ConfigError, file_name, first_line, shown
from models.sizes import ModelSizes

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
DTYPES = ("F64", "F32", "F16", "BF16")
READ_BYTES = 1 << 24  # of a tensor, at a time
LFS = b"version https://git-lfs"  # how a pointer begins, which stands for a file that was not fetched
UNUSED = (".rotary_emb.inv_freq",)  # what old files hold besides weights: it follows from config.json
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ADAPTER, PICKLED = "adapter_config.json", "pytorch_model*.bin"


def is_folder(path: str) -> bool:
  """Whether this looks like a model folder, complete or not. The workdir of a run also has a config.json."""
  folder = Path(os.path.expanduser(path))
  if not path or not folder.is_dir():
    return False
  if any((folder / name).exists() for name in (SINGLE, INDEX, ADAPTER)):
    return True
  with contextlib.suppress(OSError, ValueError):
    return b"model_type" in limits.content(folder / CONFIG)
  return False


def other_form(path: str) -> str:
  """What to do with a path that is no model folder, but names a model in another form; "" if it does not."""
  folder = Path(os.path.expanduser(path))
  if (folder / "snapshots").is_dir():
    return "this is the root of a hub's cache, so name its folder snapshots/REVISION"
  if any(folder.glob("*.gguf")):
    return "this holds a model as GGUF, so name a folder with the same model in safetensors"
  if any(folder.glob("*.safetensors")):
    return f"this holds weights without a {CONFIG}, so name a folder in the form of the library transformers"
  if not folder.exists() and path.count("/") == 1 and not path.startswith(("/", ".", "~", "runs/")):
    return "if it is the name of a model on a hub, download that first, and name its folder"
  return ""


@dataclasses.dataclass(frozen=True)
class Stored:
  """Where a tensor is."""

  file: Path
  shape: tuple[int, ...]
  dtype: str


class Folder:
  """A model folder. Raises ConfigError for one whose model is unknown, or whose files are missing or damaged.

  Only config.json is read at first, so a folder without weights still says what the model is.

  Attributes:
    shape: what its config.json says.
  """

  def __init__(self, path: str):
    self.path, self.where = Path(os.path.expanduser(path)), f"init_from={path!r}"
    if (self.path / ADAPTER).exists():
      base = self._json(ADAPTER).get("base_model_name_or_path")
      raise ConfigError(
        f"{self.where} holds adapters ({ADAPTER}) of {shown(base)}; add them to its weights with merge_and_unload() of "
        "the library PEFT, save the result, and use its folder"
      )
    self.shape = families.read(self._json(CONFIG), f"{CONFIG} of {self.where}")

  @functools.cached_property
  def fields(self) -> dict[str, Any]:
    """The fields of `config.model`. A head that differs from the embedding is a head, whatever config.json says."""
    return self.shape.fields | ({"tied_embedding": False} if self._head_differs else {})

  @property
  def notes(self) -> tuple[str, ...]:
    """What a user should know of the folder's tensors."""
    unused = [name for name in self.stored if name.endswith(UNUSED)]
    found = [f"tensors such as {unused[0]!r} ({len(unused)}) are not read: they follow from {CONFIG}"] if unused else []
    if self._head_differs is not None:
      is_used = "another than the embedding: it is used" if self._head_differs else "the embedding: it is used for both"
      found.append(f"{CONFIG} ties the head to the embedding, and {HEAD!r} is {is_used}")
    return tuple(found)

  @functools.cached_property
  def _head_differs(self) -> bool | None:
    """Of a model whose config.json ties the head to the embedding: whether its files hold another; None without one."""
    if not self.shape.fields["tied_embedding"] or HEAD not in self._names:
      return None
    head, embedding = self._tensor(HEAD), self._tensor(EMBEDDING)
    if head.shape != embedding.shape:
      return True
    both = (self._rows(name, range(head.shape[0]), (slice(None),)) for name in (HEAD, EMBEDDING))
    return any(not np.array_equal(*some) for some in zip(*both, strict=True))

  @property
  def _names(self) -> Collection[str]:
    """The names of tensors, as far as config.json, an index or a single file say, when others are not there."""
    if (self.path / INDEX).exists():
      index = self._json(INDEX).get("weight_map")
      return index if isinstance(index, dict) else ()
    return self.stored if (self.path / SINGLE).exists() else ()

  def _tensor(self, name: str) -> Stored:
    """Where a tensor is. Raises ConfigError if it is nowhere, or is of numbers that cannot be read."""
    if name not in self.stored:
      raise ConfigError(f"{self.where} lacks the tensor {name!r}; {self._why_lacking(name)}")
    if self.stored[name].dtype not in DTYPES:
      raise ConfigError(
        f"{self.where} holds {name!r} as {self.stored[name].dtype}, which cannot be read; use a model in one of "
        f"{', '.join(DTYPES)}"
      )
    return self.stored[name]

  def _why_lacking(self, name: str) -> str:
    """What to do if this tensor is not there."""
    longer = next((found for found in self.stored if found.endswith("." + name)), None)
    if longer:
      return f"its tensors are saved under {longer.removesuffix(name)!r}: save the model that is there by itself"
    if name.removeprefix("model.") in self.stored:
      return "it is saved without its head: save it again from AutoModelForCausalLM"
    if name == HEAD:
      return f"save it again with its head, or if that is the embedding, set tie_word_embeddings to true in {CONFIG}"
    return "copy all files of the model"

  def _json(self, name: str) -> dict[str, Any]:
    try:
      found = limits.described(self.path / name)
    except (OSError, ValueError) as error:
      raise ConfigError(f"{self.where} has no {name} that can be read ({first_line(error)}); copy it again") from error
    if not isinstance(found, dict):
      raise ConfigError(f"{self.where} has a {name} that holds no fields; copy it again")
    return found

  @functools.cached_property
  def stored(self) -> dict[str, Stored]:
    """Where each tensor is, by name, from the headers of the files."""
    if not (self.path / INDEX).exists():
      return self._header(SINGLE)
    index = self._json(INDEX).get("weight_map")
    if not isinstance(index, dict):
      raise ConfigError(f"{self.where} has an {INDEX} without a weight_map; copy it again")
    files = [*{file_name(f"{INDEX} of {self.where}", name): None for name in index.values()}]
    if SINGLE not in files and (self.path / SINGLE).exists():
      raise ConfigError(
        f"{self.where} holds {SINGLE!r}, and an {INDEX} of other files; remove that of the save that you don't want"
      )
    held = {file: self._header(file) for file in files}
    stored = {name: found for file in files for name, found in held[file].items() if index.get(name) == file}
    for name, file in index.items():
      if name not in stored:
        raise ConfigError(f"{self.where} has an {INDEX} that names {name!r} in {file!r}, which holds none; copy both")
    for file in files:
      for name in held[file]:
        if index.get(name) != file:
          raise ConfigError(
            f"{self.where} holds {name!r} in {file!r}, where its {INDEX} does not name it; copy all of the same save"
          )
    return stored

  def _header(self, name: str) -> dict[str, Stored]:
    file = self.path / name
    self._check_header(file)
    try:
      with safe_open(file, "numpy") as opened:
        names = opened.keys()
        slices = {name: opened.get_slice(name) for name in names}
        return {name: Stored(file, tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
    except FileNotFoundError as error:
      if any(self.path.glob(PICKLED)):
        raise ConfigError(
          f"{self.where} has its weights in {PICKLED}, which is not read, as it may run code; save them again as "
          "safetensors, with save_pretrained of the library transformers"
        ) from error
      others = sorted(path.name for path in self.path.glob("*.safetensors"))
      if name == SINGLE and others:
        raise ConfigError(
          f"{self.where} holds {shown(others)}, but neither {SINGLE!r} nor {INDEX!r}, which says what is in "
          "which; copy that there, or give a single file the first name"
        ) from error
      raise ConfigError(f"{self.where} lacks the file {name!r}; copy it there") from error
    except (OSError, SafetensorError) as error:
      with file.open("rb") as opened:
        if opened.read(len(LFS)) == LFS:
          raise ConfigError(f"{self.where} has in {name!r} a pointer of Git LFS; run `git lfs pull` there") from error
      raise ConfigError(f"{self.where}: {name!r} is damaged ({first_line(error)}); copy it again") from error

  def _check_header(self, file: Path) -> None:
    """Raises ConfigError if the header of a file of safetensors, which begins with its size, is too large."""
    if file.exists():
      if not file.is_file():
        raise ConfigError(f"{self.where}: {file.name!r} is not a file; copy it again")
      with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
      if limits.HEADER < size < file.stat().st_size:  # otherwise the library says what is wrong
        raise ConfigError(
          f"{self.where}: {file.name!r} has a header of {limits.megabytes(size)}, more than the limit of "
          f"{limits.megabytes(limits.HEADER)}; save the model in several files"
        )

  def check(self, sizes: ModelSizes) -> None:
    """Raises ConfigError unless the folder holds the weights of this model, and no others."""
    wanted = {tensor.name: tensor for tensor in tensors(sizes)}
    unused = (*UNUSED, HEAD) if self._head_differs is False else UNUSED
    if EMBEDDING not in self.stored:
      self._tensor(EMBEDDING)  # says why
    packed = {name: mxfp4.shapes(tensor.shape) for name, tensor in wanted.items() if self._is_packed(tensor)}
    of_packed = {name + part: shape for name, shapes in packed.items() for part, shape in shapes.items()}
    for name in self.stored:
      if name not in wanted and name not in of_packed and not name.endswith(unused):
        raise ConfigError(
          f"{self.where} holds the tensor {name!r}, which a {self.shape.family} model does not have; use a model "
          "without it"
        )
    for name, wanted_shape in of_packed.items():
      found = self.stored.get(name)
      if found is None or (found.dtype, found.shape) != ("U8", wanted_shape):
        held = "does not hold it" if found is None else f"holds {found.dtype} {list(found.shape)}"
        raise ConfigError(
          f"{self.where} has weights in four bits, of which {name!r} should be U8 {list(wanted_shape)}, but it {held}; "
          "copy all files of the model"
        )
    for name, tensor in wanted.items():
      if name in packed:
        continue
      found = self._tensor(name)
      if 0 in found.shape:
        raise ConfigError(
          f"{self.where} holds {name!r} without its numbers, with shape {list(found.shape)}, as a process that "
          "has only a part saves it; save it again from the gathered weights"
        )
      if found.shape != tensor.shape:
        raise ConfigError(
          f"{self.where} holds {name!r} with shape {list(found.shape)}, but its {CONFIG} asks for "
          f"{list(tensor.shape)}; copy both from the same model"
        )

  def _is_packed(self, tensor: Tensor) -> bool:
    """Whether a tensor is stored in four bits (mxfp4.py)."""
    parts = [tensor.name + part for part in (mxfp4.BLOCKS, mxfp4.SCALES)]
    return tensor.name not in self.stored and len(tensor.shape) == 3 and any(part in self.stored for part in parts)

  @functools.cached_property
  def dtypes(self) -> list[str]:
    """The dtypes of the tensors. MXFP4 stands for weights in four bits."""
    return sorted({"MXFP4" if found.dtype == "U8" else found.dtype for found in self.stored.values()})

  def read(self, tensor: Tensor, index: tuple[slice, ...]) -> np.ndarray:
    """A part of the weight that a tensor holds."""
    rows, *columns = tensor.part(index)
    read = self._unpacked if self._is_packed(tensor) else self._rows
    found = [tensor.own(part) for part in read(tensor.name, range(rows.start, rows.stop), columns)]
    shape = [len(range(*at.indices(size))) for at, size in zip(index, tensor.sizes, strict=True)]
    return tensor.to_weight(np.concatenate(found) if len(found) > 1 else found[0], shape)

  def _unpacked(self, name: str, experts: range, others: Sequence[slice]) -> Iterator[np.ndarray]:
    """Parts of a tensor that is stored in four bits (mxfp4.py), of one expert each."""
    inputs, outputs = others
    groups = slice(inputs.start // mxfp4.SIZE, -(-inputs.stop // mxfp4.SIZE))
    within = slice(inputs.start - mxfp4.SIZE * groups.start, inputs.stop - mxfp4.SIZE * groups.start)
    for expert in experts:
      parts = []
      for part in (mxfp4.BLOCKS, mxfp4.SCALES):
        with safe_open(self.stored[name + part].file, "numpy") as opened:
          parts.append(opened.get_slice(name + part)[slice(expert, expert + 1), outputs, groups])
      if (parts[1] == mxfp4.NO_NUMBER).any():
        raise ConfigError(f"{self.where} holds {name + part!r} with a scale that is not a number; copy it again")
      yield mxfp4.numbers(*parts)[..., within].swapaxes(1, 2)

  def _rows(self, name: str, rows: range, columns: Sequence[slice]) -> Iterator[np.ndarray]:
    """Parts of a tensor, of some rows each.

    Columns are in all pages of a file, and pages count as this process's memory while the file is open. So it is opened
    for a few rows at a time.
    """
    file, shape = self.stored[name].file, self.stored[name].shape
    each = max(1, READ_BYTES // (4 * math.prod(shape[1:])))
    for start in range(rows.start, rows.stop, each):
      with safe_open(file, "numpy") as opened:
        yield opened.get_slice(name)[(slice(start, min(start + each, rows.stop)), *columns)]
