"""Text: Python's standard library by default, or the user's files, as bytes or as the tokens of a tokenizer.

files.py finds the files, readers.py reads their documents, cutting.py cuts long ones into pieces, tokenizers.py makes
tokens of them, and prepare.py stores these, once for each source and tokenizer. foreign.py takes tokens that other
programs have stored. An example is then a window of all tokens in a row (tokens.py), a sequence of whole documents
(packing.py), or a text with its class (labels.py).
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from data.cache import prepared
from data.dataset import Dataset, Part, Source, sources_of
from data.files import array_file
from data.remote import brought
from data.text import foreign, prepare, tokenizers
from data.text.files import TRAIN, Files, find, stamps
from data.text.foreign import TokenFiles
from data.text.labels import Labelled
from data.text.prepare import SPLITS, bar_of, pair_counts
from data.text.readers import read
from data.text.rows import Fields
from data.text.sequences import more, sequences
from data.text.tokenizers import BYTES, Tokenizer
from errors import ConfigError, one_of
from models.sizes import PACKINGS

__all__ = ["PreparedText", "find", "find_sources", "load", "pair_counts", "prepare_text", "tokenizer_of"]

FORMAT = 7  # version of the prepared files; increase it when they change
OF_COMPLETIONS = "tokens of completions"
Sources = dict[str, Files | TokenFiles]  # by the path that the user gave


@dataclasses.dataclass(frozen=True)
class PreparedText:
  """A text after its preparation: the folder of its files, and what their `meta.json` holds (prepare.py)."""

  name: str
  folder: Path
  meta: dict[str, Any]


def load(config: ConfigDict) -> Dataset:
  """Loads the text at `config.data.path`, and prepares it first if that has not been done.

  Raises ConfigError if a source is missing or damaged, does not fit the model, or is shorter than one sequence.
  """
  one_of("data.packing", config.data.packing, PACKINGS)
  sources = find_sources(config)
  tokenizer = tokenizer_of(config, sources)
  parts, lines, texts = [], [], []
  for name, files in sources.items():
    if isinstance(files, TokenFiles):
      end, size = (tokenizer.end, tokenizer.size) if tokenizer else (None, 0)
      part, line = foreign.load(name, files, config, end, size)
    else:
      assert tokenizer
      texts.append(prepare_text(config, name, files, tokenizer))
      part, line = _part(texts[-1], tokenizer, config), _describe(texts[-1], config)
    parts.append(part)
    lines.append(line)
  labels = _labels(texts, config.model.classes) if config.model.objective == "class" else {}
  vocabulary = {"vocab_size": tokenizer.size} if tokenizer and not config.model.vocab_size else {}
  return Dataset(
    parts=tuple(parts),
    description="\n".join(lines),
    weights=tuple(weight for _, weight in sources_of(config.data.path)),
    model=vocabulary | ({"classes": labels["classes"]} if labels else {}),
    tokenizer=tokenizer.name if tokenizer else "",
    text=tokenizer.text if tokenizer else None,
    class_names=tuple(labels.get("labels", ())),
  )


def find_sources(config: ConfigDict) -> Sources:
  """The files of each source of `config.data.path`. Raises ConfigError for one that does not exist or holds no text."""
  path, validation_path, cache = config.data.path, config.data.validation_path, config.data.cache_dir
  if validation_path and isinstance(path, dict):
    raise ConfigError(
      f"data.validation_path={validation_path!r} needs a single source, but data.path is a mixture; leave it empty to "
      "hold out a part of each source"
    )
  held_out = brought(validation_path, "data.validation_path", cache)
  sources: Sources = {}
  for name, _ in sources_of(path):
    here = brought(name, "data.path", cache)
    if not (tokens := foreign.find(here)):
      sources[name] = find(here, held_out)
      continue
    if validation_path:
      if not (other := foreign.find(held_out)):
        raise ConfigError(
          f"data.validation_path={validation_path!r} holds text, but data.path={name!r} holds tokens; use tokens for "
          "both"
        )
      tokens = dataclasses.replace(tokens, validation=other.train)
    sources[name] = tokens
  whose: dict[str, str] = {}
  for name, files in sources.items():
    for file in () if isinstance(files, TokenFiles) else files:
      if whose.setdefault(file.path, name) != name:
        raise ConfigError(
          f"data.path has {file.path!r} in two sources, {whose[file.path]!r} and {name!r}, so one could train on what "
          "the other holds out; take it out of one"
        )
  return sources


def tokenizer_of(config: ConfigDict, sources: Sources) -> Tokenizer | None:
  """The tokenizer of all sources. A BPE is trained first. None if there are only tokens, and nobody says whose."""
  choice, vocab_size = config.data.tokenizer, config.model.vocab_size
  texts = {name: files for name, files in sources.items() if not isinstance(files, TokenFiles)}
  if file := tokenizers.find_file(choice):
    tokenizer = tokenizers.from_file(file)
    if 0 < vocab_size < tokenizer.size:
      raise ConfigError(
        f"model.vocab_size={vocab_size} is too small: data.tokenizer={choice!r} has {tokenizer.size} ids; use "
        f"{tokenizer.size}, or 0 to take it from the tokenizer"
      )
    return tokenizer
  if len(texts) < len(sources) and (texts or choice == "bpe"):
    name = next(name for name in sources if name not in texts)
    raise ConfigError(
      f"data.tokenizer={choice!r} did not write the tokens in data.path={name!r}; use the tokenizer.json that did"
    )
  if not texts:
    return None
  return BYTES if choice == "bytes" else _trained_bpe(config, texts)


def _trained_bpe(config: ConfigDict, texts: dict[str, Files]) -> Tokenizer:
  vocab_size, fields = config.model.vocab_size, _fields(config, labels=False)
  if vocab_size < 257:
    raise ConfigError(
      f"model.vocab_size={vocab_size} is too small for a BPE; use at least 257: 256 bytes and the end-of-document token"
    )

  def training_text() -> Iterator[bytes]:
    for name, files in texts.items():
      with bar_of(f"{_title(name)}, for the BPE", files) as bar:
        for piece in read(files, fields):
          bar.update(piece.done - bar.n)
          if piece.split == TRAIN:
            yield piece.text

  def write(folder: Path) -> None:
    tokenizers.train_bpe(folder, training_text(), vocab_size)

  key = (FORMAT, [stamps(files) for files in texts.values()], fields, vocab_size)
  return tokenizers.from_file(prepared(config.data.cache_dir, "bpe", key, write) / "tokenizer.json", "bpe")


def _fields(config: ConfigDict, labels: bool) -> Fields:
  """The fields of a row that a text is read from."""
  given, with_prompts = config.data, bool(config.data.prompt_field)
  return Fields(
    text=given.completion_field if with_prompts else given.text_field,
    label=given.label_field if labels else None,
    prompt=given.prompt_field if with_prompts else None,
  )


def prepare_text(config: ConfigDict, name: str, files: Files, tokenizer: Tokenizer) -> PreparedText:
  """The prepared text of a source, from the cache if it is there."""
  fields = _fields(config, labels=config.model.objective == "class")
  key = (FORMAT, stamps(files), fields, tokenizer.name)
  folder = prepared(
    config.data.cache_dir, "text", key, lambda to: prepare.write(to, files, tokenizer, fields, _title(name))
  )
  return PreparedText(name, folder, json.loads((folder / "meta.json").read_text()))


def _part(text: PreparedText, tokenizer: Tokenizer, config: ConfigDict) -> Part:
  meta, vocab_size = text.meta, config.model.vocab_size
  if vocab_size and meta["largest_id"] >= vocab_size:
    raise ConfigError(
      f"model.vocab_size={vocab_size} is too small: the text holds token id {meta['largest_id']}; "
      f"use {256 if tokenizer is BYTES else meta['largest_id'] + 1}"
    )
  train, validation = (_source(text, split, config) for split in SPLITS)
  identity = f"{meta['fingerprint']} {config.data.packing} {config.model.objective}"
  return Part(
    name=text.name,
    train=train,
    validation=validation,
    fingerprint=hashlib.sha256(identity.encode()).hexdigest(),
    bytes_per_token=meta["counted_bytes"]["validation"] / meta["counted_tokens"]["validation"],
    byte_pairs=None if config.data.prompt_field else np.load(text.folder / "pairs.npy", mmap_mode="r"),
    counts=_counts(text, config),
  )


def _counts(text: PreparedText, config: ConfigDict) -> dict[str, tuple[int, int]]:
  """How much there is to train on and to validate on, by unit."""
  keys = {"documents": "documents", "tokens": "tokens"}
  if config.data.prompt_field:
    keys[OF_COMPLETIONS] = "counted_tokens"
  return {unit: (text.meta[key]["train"], text.meta[key]["validation"]) for unit, key in keys.items()}


def _source(text: PreparedText, split: str, config: ConfigDict) -> Source:
  tokens = array_file(text.folder / f"{split}.tokens", text.meta["dtype"])
  ends = array_file(text.folder / f"{split}.ends", "<i8")
  if config.model.objective != "class":
    completions = array_file(text.folder / f"{split}.completions", "?") if config.data.prompt_field else None
    return sequences(text.name, split, tokens, ends, (text.meta["fingerprint"], split), config, completions)
  if not len(ends):
    raise ConfigError(f"data.path={text.name!r} has no document for {split}; {more(split)}")
  return Labelled(tokens, ends, array_file(text.folder / f"{split}.labels", "<i4"), config.model.seq_len)


def _title(name: str) -> str:
  return name or "the Python standard library"


def _describe(text: PreparedText, config: ConfigDict) -> str:
  """One line for the user."""
  meta, unit = text.meta, "documents" if config.model.objective == "class" else "tokens"
  unit = OF_COMPLETIONS if config.data.prompt_field else unit
  train, validation = _counts(text, config)[unit]
  files = "1 file" if meta["files"] == 1 else f"{meta['files']} files"
  return (
    f"text of {_title(text.name)}: {files}, {meta['bytes'] / 1e6:.1f} MB, {train:,} {unit} to train on and "
    f"{validation:,} to validate on ({Path(config.data.tokenizer).stem})"
  )


def _labels(texts: list[PreparedText], given: int) -> dict[str, Any]:
  """The number of `classes`, and their names, `labels`, which all texts must share. `given` is model.classes."""
  first = texts[0]
  for text in texts:
    where, classes, distinct = f"data.path={text.name!r}", text.meta["classes"], text.meta["distinct"]
    if distinct < 2:
      raise ConfigError(f"{where} has a single class; add texts of another one, or name another data.label_field")
    if classes > distinct and not given:
      raise ConfigError(
        f"{where} has {distinct} classes with numbers up to {classes - 1}; number them from 0 without gaps, or set "
        f"model.classes={classes}"
      )
    if (text.meta["labels"], given or classes) != (first.meta["labels"], given or first.meta["classes"]):
      raise ConfigError(
        f"data.path mixes {first.name!r} with the classes {_shown(first)} and {text.name!r} with the classes "
        f"{_shown(text)}; use sources with the same classes"
      )
  return {"classes": max(text.meta["classes"] for text in texts), "labels": first.meta["labels"]}


def _shown(text: PreparedText) -> str:
  return ", ".join(text.meta["labels"][:9]) or f"0 to {text.meta['classes'] - 1}"
