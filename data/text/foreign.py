"""Token files that other programs have written: nanoGPT's `.bin`, and Megatron-LM's `.bin` with its `.idx`.

They are read in place, after one pass over them (scan.py).

- nanoGPT (data/openwebtext/prepare.py): ids as uint16, without a header. `train.bin` and `val.bin`, or a single file.
- Megatron-LM (megatron/core/datasets/indexed_dataset.py): ids of some integer type, and an index (megatron.py).

All numbers are little endian.
"""

import hashlib
from pathlib import Path

from ml_collections import ConfigDict

from data.dataset import Part
from data.text.scan import TokenFile, TokenFiles, scan
from data.text.sequences import sequences
from errors import ConfigError, inside

__all__ = ["TokenFile", "TokenFiles", "find", "load"]


def find(path: str) -> TokenFiles | None:
  """The token files at a path: X.bin, X.idx, X for both, or a folder with train.bin and val.bin. None if it has none.

  Raises ConfigError if one of two files is missing, or for several token files with commas. `TokenFiles.validation` can
  be replaced by another's `train`.
  """
  if not path.strip():
    return None
  place = Path(path.strip()).expanduser()
  if place.is_dir():
    if (place / "train.bin").exists() and (place / "val.bin").exists():
      for name in ("train.bin", "train.idx", "val.bin", "val.idx"):
        inside(f"data.path={path!r}", place, place / name)
      return TokenFiles(_pair(path, place / "train", ".bin"), _pair(path, place / "val", ".bin"))
    return None
  if "," in path and not place.exists():
    if any(find(name) for name in path.split(",")):
      raise ConfigError(
        f"data.path={path!r} lists token files; give each a weight instead, such as "
        f"{dict.fromkeys(map(str.strip, path.split(',')), 1.0)}"
      )
    return None
  suffix = place.suffix if place.suffix in (".bin", ".idx") else ""
  if place.exists() and not suffix:
    return None
  stem = place.with_name(place.name.removesuffix(suffix))
  if not _with(stem, ".bin").exists() and not _with(stem, ".idx").exists():
    return None
  return TokenFiles(_pair(path, stem, suffix))


def _pair(path: str, stem: Path, suffix: str) -> TokenFile:
  """The file STEM.bin, with STEM.idx if there is one. Raises ConfigError if one is missing."""
  tokens, index = _with(stem, ".bin"), _with(stem, ".idx")
  if tokens.exists() and index.exists():
    return TokenFile(tokens, index)
  if not tokens.exists():
    raise ConfigError(f"data.path={path!r} lacks {str(tokens)!r}, the tokens of the index; put it beside the .idx")
  if suffix != ".bin" or stem.name.endswith(("_document", "_sentence")):  # as Megatron-LM names its files
    raise ConfigError(
      f"data.path={path!r} lacks {str(index)!r}, the index of Megatron-LM; put it beside the .bin, or name a file of "
      "nanoGPT in full, without _document at its end"
    )
  return TokenFile(tokens)


def _with(stem: Path, suffix: str) -> Path:
  return stem.with_name(stem.name + suffix)


def load(
  name: str, files: TokenFiles, config: ConfigDict, end: int | None = None, vocab_size: int = 0
) -> tuple[Part, str]:
  """The token files as a part of a dataset, and one line on them for the user.

  Args:
    name: the path that the user gave.
    files: what `find` found there.
    config: of the whole run.
    end: the id that ends a document, if the tokenizer is known.
    vocab_size: of the tokenizer, if it is known. It is used where model.vocab_size is 0.

  Raises ConfigError if the tokens do not fit the config.
  """
  if config.model.objective != "next_token":
    raise ConfigError(
      f"data.path={name!r} holds tokens without classes, but model.objective={config.model.objective!r} needs classes; "
      "use text with labels, or model.objective='next_token'"
    )
  if config.data.prompt_field:
    raise ConfigError(
      f"data.path={name!r} holds tokens without prompts, but data.prompt_field={config.data.prompt_field!r}; use JSON "
      "lines or a table, or leave data.prompt_field empty"
    )
  documents = config.data.packing == "documents"
  found = scan(files, config.data.cache_dir, end if documents else None)
  _check_vocabulary(name, found.largest_id, config.model.vocab_size, vocab_size)
  if documents and not found.ends:
    raise ConfigError(
      f"data.packing='documents' needs to know where documents end, but data.path={name!r} has no index; name its "
      "tokenizer in data.tokenizer, or use data.packing='windows'"
    )
  train, validation = (
    sequences(name, split, found.tokens[split], found.ends.get(split), (found.documents, split), config)
    for split in ("train", "validation")
  )
  identity = f"{found.fingerprint} {config.data.packing} {found.documents if documents else ''}"
  counts = {"tokens": (len(found.tokens["train"]), len(found.tokens["validation"]))}
  if found.ends:
    counts["documents"] = (len(found.ends["train"]), len(found.ends["validation"]))
  made_by, dtype = "Megatron-LM" if files.train.index else "nanoGPT", found.tokens["train"].dtype.name
  line = (
    f"tokens of {name}: {counts['tokens'][0]:,} tokens to train on and {counts['tokens'][1]:,} to validate on "
    f"({made_by}, {dtype})"
  )
  return Part(name, train, validation, hashlib.sha256(identity.encode()).hexdigest(), counts=counts), line


def _check_vocabulary(name: str, largest_id: int, of_model: int, of_tokenizer: int) -> None:
  if largest_id < (of_model or of_tokenizer):
    return
  if of_model:
    raise ConfigError(
      f"model.vocab_size={of_model} is too small: data.path={name!r} holds token id {largest_id}; use {largest_id + 1}"
      " or more, the size of the tokenizer that wrote it"
    )
  known = f"has only {of_tokenizer} ids" if of_tokenizer else "is not known"
  raise ConfigError(
    f"model.vocab_size=0 takes the size of the tokenizer, which {known}, but data.path={name!r} holds token id "
    f"{largest_id}; use {largest_id + 1} or more"
  )
