"""Encodes texts in which names of added tokens, such as <|im_start|>, stand for these tokens: prompts and dialogues.

The names are found here, as the library `tokenizers` finds them, and the text between them is encoded as documents are,
so mostly by tiktoken (ranks.py). Where the library looks for names in another way, it encodes the whole text.
"""

import re
from collections.abc import Sequence
from typing import Any

from data.text.ranks import Documents

FEW = 1 << 16  # characters of texts for which preparing tiktoken would take longer than it saves


class NamedTokens:
  """Encodes texts with names of added tokens, for a tokenizer of the library `tokenizers`."""

  def __init__(self, tokenizer: Any, documents: Documents):
    """`documents` encodes text without names, for the same tokenizer."""
    self._tokenizer, self._documents = tokenizer, documents
    added = tokenizer.get_added_tokens_decoder()
    self._ids = {token.content: number for number, token in added.items() if token.content}
    # A name with spaces around it, or within a word, or in normalized text, is not found by its letters alone.
    is_plain = all(not (token.lstrip or token.rstrip or token.single_word) for token in added.values())
    sets = [[t.content for t in added.values() if t.content and t.normalized == normalized] for normalized in (0, 1)]
    self._is_known = is_plain and not (sets[1] and tokenizer.normalizer is not None)
    # The longest name at the leftmost place; those of normalized text come second.
    self._names = [re.compile(f"({'|'.join(map(re.escape, sorted(s, key=len, reverse=True)))})") for s in sets if s]

  def __call__(self, texts: Sequence[str]) -> list[list[int]]:
    if not self._is_known or sum(map(len, texts)) < FEW or not self._documents.is_fast:
      return [found.ids for found in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]
    parts = [self._split(text) for text in texts]
    between = [part.encode() for own in parts for part in own if part not in self._ids]
    encoded = iter(self._documents(between))
    found = []
    for own in parts:
      ids: list[int] = []
      for part in own:
        if part in self._ids:
          ids.append(self._ids[part])
        else:
          ids += next(encoded).tolist()
      found.append(ids)
    return found

  def _split(self, text: str) -> list[str]:
    """The text in parts, each a name or without names."""
    parts = [text]
    for names in self._names:
      parts = [piece for part in parts for piece in ([part] if part in self._ids else names.split(part)) if piece]
    return parts
