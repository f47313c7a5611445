"""All documents of a text as examples to evaluate on: each is read by itself, and each of its tokens predicted once.

Before a document stands a token that is not part of it: what the tokenizer puts in front of texts, or else the END
token. So the first token of the document is predicted, too. END itself is not predicted. A document that is longer than
a sequence is cut, and each further piece begins with the last token of the piece before. lm-evaluation-harness does the
same (get_rolling_token_windows in lm_eval/utils.py), except that its last piece begins earlier, so that it is full.

With `data.prompt_field` or `data.messages_field`, documents are those of training, and what counts there is predicted.
"""

import dataclasses
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from data.dataset import Dataset, Part, Source
from data.files import ArrayFile, array_file
from data.text import PreparedText, notes, prepare_text
from data.text.files import VALIDATION
from data.text.packing import packed
from data.text.sequences import sequences
from data.text.sources import find_text
from data.text.tokenizers import Tokenizer
from errors import ConfigError
from models.packings import counts_parts


@dataclasses.dataclass(frozen=True)
class Documents:
  """The documents of a text, packed into sequences of `model.seq_len` predictions.

  Attributes:
    dataset: the sequences, as those to validate on.
    count: how many documents there are.
    tokens: how many predictions there are.
    bytes: of the text, without what begins or ends documents; with prompts or dialogues, of what is predicted.
    notes: what the tokens do not say of the text, a sentence each.
  """

  dataset: Dataset
  count: int
  tokens: int
  bytes: int
  notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class _After(ArrayFile):
  """The numbers in a file after one more, `first`, and without the last."""

  first: int = 0

  def read(self, starts: np.ndarray, length: int) -> np.ndarray:
    found = super().read(np.maximum(starts - 1, 0), length)
    from_start = np.roll(found, 1, axis=1)
    from_start[:, :1] = self.first
    return np.where(starts[:, None] == 0, from_start, found)


def documents(path: str, config: ConfigDict, tokenizer: Tokenizer) -> Documents:
  """All documents of the text at a path, also what training would hold out. Prepares the text if needed.

  Raises ConfigError if there is no text, or a file is damaged.
  """
  found = find_text(path, config.data.cache_dir, config.data.form)
  files = tuple(dataclasses.replace(file, split=VALIDATION) for file in found)
  if counts_parts(config):
    return _completions(path, config, prepare_text(config, path, files, tokenizer))
  begin = (in_front(tokenizer) or [tokenizer.end])[-1]
  if begin != tokenizer.end:  # is stored in the place of END, so that it is before the next document
    name = f"{tokenizer.name}, begins with {begin}"
    tokenizer = dataclasses.replace(tokenizer, name=name, end=begin)
  text = prepare_text(config, path, files, tokenizer)
  stored = array_file(text.folder / "validation.tokens", text.meta["dtype"])
  count = text.meta["documents"]["validation"]
  if not count:
    raise ConfigError(f"data.path={path!r} holds no text; use a file or folder with text")
  source = packed(
    _After(stored.path, stored.dtype, stored.count, first=begin),
    array_file(text.folder / "validation.ends", "<i8"),
    config.model.seq_len,
    config.data.cache_dir,
    (text.meta["fingerprint"], "evaluation"),
  )
  tokens, size = text.meta["tokens"]["validation"] - count, text.meta["bytes"] - count  # each END counts as a byte
  return _documents(path, text, source, tokens, size, config)


def _completions(path: str, config: ConfigDict, text: PreparedText) -> Documents:
  """All prompts with their completions, or dialogues, packed as for training: what counts there is predicted."""
  load = lambda name, dtype: array_file(text.folder / f"validation.{name}", dtype)
  tokens, ends, completions = load("tokens", text.meta["dtype"]), load("ends", "<i8"), load("completions", "?")
  source = sequences(path, "validation", tokens, ends, (text.meta["fingerprint"], "evaluation"), config, completions)
  count, size = (text.meta[name]["validation"] for name in ("counted_tokens", "counted_bytes"))
  return _documents(path, text, source, count, size, config)


def _documents(path: str, text: PreparedText, source: Source, tokens: int, size: int, config: ConfigDict) -> Documents:
  if 0 < config.model.vocab_size <= (largest := text.meta["largest_id"]):
    raise ConfigError(
      f"data.path={path!r} holds token id {largest}, and the model knows {config.model.vocab_size}; leave out what its "
      "tokenizer writes so"
    )
  part = Part(path, train=source, validation=source, fingerprint=text.meta["fingerprint"])
  count = text.meta["documents"]["validation"]
  return Documents(Dataset((part,), Path(path).name), count, tokens, size, tuple(notes(text.meta)))


def in_front(tokenizer: Tokenizer) -> list[int]:
  """The tokens that a tokenizer puts in front of every text, such as <s>; [] if there are none."""
  return tokenizer.text.encode("")
