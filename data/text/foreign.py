"""Token files that other programs have written, one file or many. They are read in place, after one pass (scan.py).

- nanoGPT (data/openwebtext/prepare.py): `.bin` without a header, uint16; uint32 for vocabularies above 65,536.
- OLMo: the same, but named `.npy`. Real files of NumPy are read, too.
- llm.c and modded-nanogpt: `.bin` with a header that says the type (headers.py).
- Megatron-LM (megatron/core/datasets/indexed_dataset.py): ids of some integer type, and an index (megatron.py).

All numbers are little endian. Several files are read as one, in the order of their names.
"""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from ml_collections import ConfigDict

from data.dataset import Part
from data.recognition import Verdict, Verdicts, validating
from data.recognition.places import VALIDATION
from data.text import headers
from data.text.scan import Scan, TokenFile, TokenFiles, scan
from data.text.sequences import sequences
from errors import ConfigError

MADE_BY = {"ids": "no header", "llmc": "llm.c", "npy": "NumPy", "megatron": "Megatron-LM"}


def named(path: str) -> TokenFiles | None:
  """The token files that a user names by one path: X.idx, X.bin with its X.idx, or X for both. None for other paths.

  Raises ConfigError if one of the two is missing.
  """
  place = Path(os.path.expanduser(path.strip()))
  if not path.strip() or place.is_dir():
    return None
  suffix = place.suffix if place.suffix in (".bin", ".idx") else ""
  if place.exists() and not suffix:
    return None
  stem = place.with_name(place.name.removesuffix(suffix))
  if not _with(stem, ".bin").exists() and not _with(stem, ".idx").exists():
    return None
  return TokenFiles((file,)) if (file := _pair(path, stem, suffix)).index else None


def token_files(
  path: str, tokens: TokenFiles | None, verdicts: Sequence[Verdict], held_out: TokenFiles | None
) -> TokenFiles:
  """The `tokens` that are named, or else the files that the verdicts read, by their splits.

  If some are `held_out`, those are validated on, and no others.
  """
  if not tokens:
    for verdict in verdicts:
      if verdict.file.kind == "index":
        _pair(path, Path(verdict.file.path).with_suffix(""), ".idx")
    files = [(verdict.split, _file(path, verdict)) for verdict in verdicts if not verdict.why]
    train, validation = (tuple(f for split, f in files if (split == VALIDATION) == held) for held in (False, True))
    tokens = TokenFiles(train, validation)
  return TokenFiles(tokens.train, held_out.train) if held_out else tokens


def to_validate_on(verdicts: Verdicts, path: str) -> TokenFiles:
  """The token files at `data.validation_path`: its validation or test files, or else all."""
  return TokenFiles(tuple(_file(path, verdict) for verdict in validating(verdicts)))


def _file(path: str, verdict: Verdict) -> TokenFile:
  place, kind = Path(verdict.file.path), verdict.file.kind
  return _pair(path, place.with_suffix(""), ".bin", kind) if place.suffix == ".bin" else TokenFile(place, kind=kind)


def _pair(path: str, stem: Path, suffix: str, kind: str = "ids") -> TokenFile:
  """The file STEM.bin, with STEM.idx if there is one, or else of this kind. Raises ConfigError if one is missing."""
  tokens, index = _with(stem, ".bin"), _with(stem, ".idx")
  if tokens.exists() and index.exists():
    return TokenFile(tokens, index, "megatron")
  if not tokens.exists():
    raise ConfigError(f"data.path={path!r} lacks {str(tokens)!r}, the tokens of the index; put it beside the .idx")
  if suffix != ".bin" or stem.name.endswith(("_document", "_sentence")):  # as Megatron-LM names its files
    raise ConfigError(
      f"data.path={path!r} lacks {str(index)!r}, the index of Megatron-LM; put it beside the .bin, or name a file of "
      "nanoGPT in full, without _document at its end"
    )
  return TokenFile(tokens, kind=kind)


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
  check_config(name, config)
  end = end if config.data.packing == "documents" else None
  found = scan(files, config.data.cache_dir, end, config.model.vocab_size or vocab_size)
  many = f"{len(files.all)} files, " if len(files.all) > 1 else ""
  return part_of(name, found, config, many, MADE_BY[files.train[0].kind], vocab_size)


def check_config(name: str, config: ConfigDict) -> None:
  """Raises ConfigError if the config needs more than tokens."""
  if config.model.objective != "next_token":
    raise ConfigError(
      f"data.path={name!r} holds tokens without classes, but model.objective={config.model.objective!r} needs classes; "
      "use text with labels, or model.objective='next_token'"
    )
  for field in ("prompt_field", "messages_field"):
    if config.data[field]:
      raise ConfigError(
        f"data.path={name!r} holds tokens without prompts, but data.{field}={config.data[field]!r}; use JSON lines or "
        f"a table, or leave data.{field} empty"
      )


def part_of(name: str, found: Scan, config: ConfigDict, many: str, made_by: str, vocab_size: int) -> tuple[Part, str]:
  """Tokens as a part of a dataset, and one line on them for the user: how many files there are, and what made them.

  Raises ConfigError if the tokens do not fit the config.
  """
  documents = config.data.packing == "documents"
  _check_vocabulary(name, found, config.model.vocab_size, vocab_size)
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
  dtype = found.tokens["train"].dtype.name
  line = (
    f"tokens of {name}: {many}{counts['tokens'][0]:,} tokens to train on and {counts['tokens'][1]:,} to validate on "
    f"({made_by}, {dtype})"
  )
  return Part(name, train, validation, hashlib.sha256(identity.encode()).hexdigest(), counts=counts), line


def _check_vocabulary(name: str, found: Scan, of_model: int, of_tokenizer: int) -> None:
  largest_id, size, dtype = found.largest_id, of_model or of_tokenizer, found.tokens["train"].dtype
  if size > 1 << 16 and dtype.itemsize < 4:
    raise ConfigError(
      f"data.path={name!r} holds ids of type {dtype.name}, which cannot number the {size} tokens of the vocabulary, so "
      "larger ids may have been cut off; write it again with uint32, or use the vocabulary size of its tokenizer"
    )
  if largest_id < size:
    return
  if found.largest_later < size:
    raise headers.header(name)
  beginning = (
    f", or without the header if it begins with one: after it, ids reach {found.largest_later}"
    if found.largest_later < largest_id // 2
    else ""
  )
  if of_model:
    raise ConfigError(
      f"model.vocab_size={of_model} is too small: data.path={name!r} holds token id {largest_id}; use {largest_id + 1}"
      f" or more, the size of the tokenizer that wrote it{beginning}"
    )
  known = f"has only {of_tokenizer} ids" if of_tokenizer else "is not known"
  raise ConfigError(
    f"model.vocab_size=0 takes the size of the tokenizer, which {known}, but data.path={name!r} holds token id "
    f"{largest_id}; use {largest_id + 1} or more{beginning}"
  )
