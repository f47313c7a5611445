"""The training examples of a language model: sequences cut from the tokens of a split, as `data.packing` says."""

from typing import Any

from ml_collections import ConfigDict

from data.dataset import Source
from data.files import ArrayFile, Numbers
from data.text.packing import packed
from data.text.tokens import Windows
from errors import ConfigError


def sequences(
  name: str,
  split: str,
  tokens: Numbers,
  ends: ArrayFile | None,
  key: Any,
  config: ConfigDict,
  completions: ArrayFile | None = None,
) -> Source:
  """Windows of all tokens in a row, or whole documents packed together.

  Args:
    name: the path that the user gave.
    split: "train" or "validation".
    tokens: of the split.
    ends: the position just after each document, int64; needed to pack documents.
    key: determines `ends`: equal keys, equal documents.
    config: of the whole run.
    completions: whether each token belongs to a completion, bool; None without prompts.

  Raises ConfigError if there is not enough for one sequence.
  """
  length, where, fix = config.model.seq_len, f"data.path={name!r}", more(split)
  if config.data.packing == "documents":
    assert ends is not None
    source = packed(tokens, ends, length, config.data.cache_dir, key, completions)
    if not len(source):
      raise ConfigError(f"{where} has no document of 2 tokens or more for {split}; {fix}")
    return source
  if len(tokens) <= length:
    raise ConfigError(
      f"{where} is shorter than one sequence: {len(tokens)} tokens for {split}, but model.seq_len={length} needs "
      f"{length + 1}; {fix}, or use a smaller model.seq_len"
    )
  return Windows(tokens, length)


def more(split: str) -> str:
  """What to do if a split has too little text, for errors."""
  return "give more text" if split == "train" else "give more text, or validation text in data.validation_path"
