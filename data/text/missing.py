"""What a tokenizer has no token for. A BPE leaves such characters out, or writes its unknown token; others write that.

A complete tokenizer has a token for every byte, or for every text that there may be. Then nothing is counted.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Missing:
  """Counts what is missing.

  Attributes:
    unknown: the id of the unknown token; None if there is none.
    is_lost: whether the tokenizer leaves a character out.
  """

  unknown: int | None
  is_lost: Callable[[str], bool] | None

  def lost(self, texts: Iterable[bytes]) -> int:
    """How many characters of these texts have no token, and are left out."""
    if self.is_lost is None:
      return 0
    joined = "".join(text.decode(errors="replace") for text in texts)
    return sum(joined.count(character) for character in set(joined) if self.is_lost(character))

  def unknowns(self, ids: Iterable[np.ndarray]) -> int:
    """How many of these tokens are the unknown one."""
    return 0 if self.unknown is None else sum(int(np.count_nonzero(own == self.unknown)) for own in ids)


def missing_in(tokenizer: Any) -> Missing | None:
  """What a tokenizer of the library `tokenizers` may have no token for; None if it has one for everything."""
  from tokenizers.models import BPE, Unigram
  from tokenizers.pre_tokenizers import ByteLevel

  model, vocabulary = tokenizer.model, tokenizer.get_vocab(with_added_tokens=False)
  falls_back = all(f"<0x{n:02X}>" in vocabulary for n in range(256))
  if isinstance(model, Unigram):
    given = json.loads(tokenizer.to_str())["model"]  # the library does not say it otherwise
    return None if falls_back and given.get("byte_fallback") else Missing(given.get("unk_id"), None)
  unknown = getattr(model, "unk_token", None)
  if not isinstance(model, BPE):
    return Missing(tokenizer.token_to_id(unknown) if unknown else None, None)
  if falls_back and model.byte_fallback:
    return None
  prefix, suffix = model.continuing_subword_prefix or "", model.end_of_word_suffix or ""
  known: dict[str, bool] = {}

  def is_lost(character: str) -> bool:
    if character not in known:
      text = tokenizer.normalizer.normalize_str(character) if tokenizer.normalizer else character
      pieces = tokenizer.pre_tokenizer.pre_tokenize_str(text) if tokenizer.pre_tokenizer else [(text, None)]
      own = [letter for piece, _ in pieces for letter in piece]
      forms = lambda letter: (letter, prefix + letter, letter + suffix, prefix + letter + suffix)
      known[character] = not all(any(form in vocabulary for form in forms(letter)) for letter in own)
    return known[character]

  # A character that is in no vocabulary is lost, unless its bytes have tokens.
  if all(letter in vocabulary for letter in ByteLevel.alphabet()) and not is_lost("\U0010fffd"):
    return None
  return Missing(None, is_lost) if unknown is None else Missing(tokenizer.token_to_id(unknown), None)
