"""Text: Python's standard library by default, or the user's files, as bytes or as the tokens of a tokenizer.

sources.py finds the files, readers.py reads their documents, cutting.py cuts long ones into pieces, tokenizers.py makes
tokens of them, with the library that ranks.py chooses, and prepare.py stores these, once for each source and tokenizer.
rows/ reads files that have rows. spans.py encodes documents of which only some tokens count, and chat.py makes such
documents of dialogues. foreign.py takes tokens that other programs have stored; rows of token ids are copied by
token_rows.py, and then read like these. An example is then a window of all tokens in a row (tokens.py), a sequence of
whole documents (packing.py), or a text with its class (labels.py).
"""

import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from data import described
from data.cache import prepared
from data.dataset import Dataset, Part, Source, sources_of
from data.files import array_file
from data.text import foreign, going_on, prepare, token_rows, tokenizers
from data.text.files import TRAIN, Files, stamps
from data.text.labels import Labelled
from data.text.prepare import SPLITS, bar_of, pair_counts
from data.text.readers import read
from data.text.scan import TokenFiles
from data.text.sequences import more, sequences
from data.text.sources import Sources, fields_of, find_source, find_sources, find_text
from data.text.token_rows import TokenRows
from data.text.tokenizers import BYTES, Tokenizer
from errors import ConfigError, one_of
from models.packings import PACKINGS, counts_parts

__all__ = [
  "PreparedText", "find_source", "find_sources", "find_text", "load", "notes", "pair_counts", "prepare_text",
  "tokenizer_of",
]  # fmt: skip

FORMAT = 7  # version of the prepared files; increase it when they change
SPANS = 1  # the same for documents of which only parts count
OF_COMPLETIONS = "tokens of completions"


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
  if tokenizer and config.data.messages_field and tokenizer.chat.templates.sources:
    tokenizer = tokenizers.for_chat(tokenizer)
  parts, lines, texts = [], list[str](), []
  for name, source in sources.items():
    files, lost = source.files, []
    if isinstance(files, TokenFiles):
      end, size = (tokenizer.end, tokenizer.size) if tokenizer else (None, 0)
      part, line = foreign.load(name, files, config, end, size)
    elif isinstance(files, TokenRows):
      part, line = token_rows.load(name, files, config, tokenizer.size if tokenizer else 0)
    else:
      assert tokenizer
      texts.append(prepare_text(config, name, files, tokenizer))
      part, line = _part(texts[-1], tokenizer, config), _describe(texts[-1], config)
      lost = [f"note: {sentence}" for sentence in notes(texts[-1].meta)]
    parts.append(part)
    lines += [line + source.note, *lost]
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


def tokenizer_of(config: ConfigDict, sources: Sources) -> Tokenizer | None:
  """The tokenizer of all sources. A BPE is trained first. None if there are only tokens, and nobody says whose."""
  choice, vocab_size = config.data.tokenizer, config.model.vocab_size
  texts = {name: source.files for name, source in sources.items() if isinstance(source.files, tuple)}
  if file := tokenizers.find_file(choice):
    tokenizer = tokenizers.from_file(file)
    if 0 < vocab_size < tokenizer.needs:
      raise ConfigError(
        f"model.vocab_size={vocab_size} is too small: data.tokenizer={choice!r} has {tokenizer.needs} ids; use "
        f"{tokenizer.needs}, or 0 to take it from the tokenizer"
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
  vocab_size, fields = config.model.vocab_size, fields_of(config, labels=False)
  if vocab_size < 257:
    raise ConfigError(
      f"model.vocab_size={vocab_size} is too small for a BPE; use at least 257: 256 bytes and the end-of-document token"
    )

  def training_text() -> Iterator[bytes]:
    for name, files in texts.items():
      with bar_of(f"{_title(name)}, for the BPE", files) as bar:
        for piece in read(files, fields):
          bar.update(piece.done - bar.n)
          if piece.split == TRAIN and piece.wrong is None:
            yield from (span.text for span in piece.document.spans) if piece.document else (piece.text,)

  def write(folder: Path) -> None:
    tokenizers.train_bpe(folder, training_text(), vocab_size)

  key = (FORMAT, [stamps(files) for files in texts.values()], *fields.key, vocab_size)
  return tokenizers.from_file(prepared(config.data.cache_dir, "bpe", key, write) / "tokenizer.json", "bpe")


def prepare_text(config: ConfigDict, name: str, files: Files, tokenizer: Tokenizer) -> PreparedText:
  """The prepared text of a source, from the cache if it is there."""
  fields = fields_of(config, labels=config.model.objective == "class")
  of_spans = (SPANS, fields.messages, tokenizer.chat.templates.digest) if fields.in_spans else ()
  key = (FORMAT, stamps(files), *fields.key, tokenizer.name, *of_spans)
  write = lambda to: prepare.write(to, files, tokenizer, fields, _title(name), config.data.limit_ratio)
  same = going_on.same(name, files, FORMAT, fields, tokenizer.name, *of_spans)
  folder = prepared(config.data.cache_dir, "text", key, write, same)
  return PreparedText(name, folder, described.meta(folder, described.LABELLED if fields.label else described.TEXT))


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
    bytes_per_token=meta["counted_bytes"]["validation"] / max(1, meta["counted_tokens"]["validation"]),
    byte_pairs=None if counts_parts(config) else described.pairs(text.folder),
    counts=_counts(text, config),
  )


def _counts(text: PreparedText, config: ConfigDict) -> dict[str, tuple[int, int]]:
  """How much there is to train on and to validate on, by unit."""
  keys = {"documents": "documents", "tokens": "tokens"}
  if counts_parts(config):
    keys[OF_COMPLETIONS] = "counted_tokens"
  return {unit: (text.meta[key]["train"], text.meta[key]["validation"]) for unit, key in keys.items()}


def _source(text: PreparedText, split: str, config: ConfigDict) -> Source:
  tokens = array_file(text.folder / f"{split}.tokens", text.meta["dtype"])
  ends = array_file(text.folder / f"{split}.ends", "<i8")
  if config.model.objective != "class":
    completions = array_file(text.folder / f"{split}.completions", "?") if counts_parts(config) else None
    return sequences(text.name, split, tokens, ends, (text.meta["fingerprint"], split), config, completions)
  if not len(ends):
    raise ConfigError(f"data.path={text.name!r} has no document for {split}; {more(split)}")
  return Labelled(tokens, ends, array_file(text.folder / f"{split}.labels", "<i4"), config.model.seq_len)


def _title(name: str) -> str:
  return name or "the Python standard library"


def _describe(text: PreparedText, config: ConfigDict) -> str:
  """One line for the user."""
  meta, unit = text.meta, "documents" if config.model.objective == "class" else "tokens"
  unit = OF_COMPLETIONS if counts_parts(config) else unit
  train, validation = _counts(text, config)[unit]
  files = "1 file" if meta["files"] == 1 else f"{meta['files']} files"
  how = f"; tokenized by {meta['tokenized_by']}" if "tokenized_by" in meta else ""
  return (
    f"text of {_title(text.name)}: {files}, {meta['bytes'] / 1e6:.1f} MB, {train:,} {unit} to train on and "
    f"{validation:,} to validate on ({Path(config.data.tokenizer).stem}{how})"
  )


def notes(meta: dict[str, Any]) -> list[str]:
  """What the tokens do not say of a text, a sentence each; [] if they say all."""
  lines = [
    f"{path!r} in data.path holds {count:,} bytes that are not UTF-8, which became replacement characters; convert it, "
    f"for example with iconv -f WINDOWS-1252 -t UTF-8"
    for path, count in meta.get("not_utf8", {}).items()
  ]
  lines += going_on.skipped(meta)
  if lost := meta.get("lost"):
    characters = max(1, meta.get("characters", 0))
    lines.append(
      f"{lost:,} of {characters:,} characters ({lost / characters:.2%}) have no token in data.tokenizer, and "
      "are left out; use a tokenizer that has them"
    )
  if unknown := meta.get("unknown"):
    tokens = max(1, sum(meta["tokens"].values()))
    lines.append(
      f"{unknown:,} of {tokens:,} tokens ({unknown / tokens:.2%}) are the unknown token of data.tokenizer; use a "
      "tokenizer that has these characters"
    )
  return lines


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
