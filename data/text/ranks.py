r"""Encodes documents with tiktoken where that provably gives the tokens of `tokenizers`, several times as fast.

Both split a text into words with a regular expression, and then merge neighbours within each word, starting from its
bytes. `tokenizers` has a list of merges, pairs of tokens. It always merges the pair that is first in the list (the
leftmost, if it occurs twice). tiktoken has no list. It always merges the two neighbours whose joined bytes are the
token with the lowest id. A word that is a token by itself becomes that token at once; in `tokenizers` this happens with
`ignore_merges` only.

**Theorem.** Count what the merges of `tokenizers` leave of the bytes of a token, taken as a word. Let R be all tokens
of which they leave one, or with `ignore_merges`, all tokens that stand for bytes. tiktoken with R gives the same tokens
for every word if

1. each of the 256 bytes is a token, and no two tokens have the same id;
2. each merge makes a token whose id is at least that of the token of the merge before it;
3. with `ignore_merges`, the merges do not leave exactly two of any token.

**Proof.** Look at a part of a word that no merge has crossed so far. `tokenizers` always takes the best merge of all,
so a merge within the part is the best one there. Hence the part goes through the same states as if it were a word
alone. Now let x and y be neighbours whose bytes together are those of a token t.

- If t is in R, they have a merge. A merge makes one token of two. So if one is left of the bytes of t alone, they had
  exactly one state of two tokens, which is x, y, and it was merged. If three or more are left, they never had such a
  state. Two are not left, by 3.
- If they have a merge, t is in R. After this merge, one is left of t.

So both programs choose among the same pairs of neighbours, as long as their states are equal. They choose the same one:
two merges to different tokens have the order of these tokens' ids, by 2. Two merges to the same token t are the same
merge, that of the one state of t with two tokens, and of equal ones both take the leftmost. By induction, all states
are equal. A word that is a token in R becomes it in both: by merges, or by `ignore_merges`. ∎

`tokenizers` itself counts what its merges leave of each token. The regular expressions are a table of known ones. The
two libraries must agree on their classes of characters, and on the tokens of the first text of each preparation: both
are compared. A text that holds an added token, unless that is special, goes to `tokenizers`.
"""

import functools
import json
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from data.text.spans import cannot_encode
from limits import is_failure

COMPARED = 1 << 18  # bytes of text of each preparation that are encoded by both
TOGETHER = 1 << 17  # characters of texts that are worth several threads
WORTH = 1 << 11  # characters of a text, on average, for which threads do not only wait for one another
LAST_LETTERS = 0x32400  # all letters, digits and spaces are below
NO_NAME = "<|no token|>"  # tiktoken must have a special token, or it looks for one at every byte. This one is not used
ABOVE = re.compile("[\u0300-\U0010ffff]")  # all text below is in normal form C
TAIL = r"|\s+(?!\S)|\s+"
# Both libraries give the same words for these patterns, if their classes of characters are equal: alternatives are
# tried in order, and repeats are greedy. The words cover every text.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+" + TAIL
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+" + TAIL
QWEN = LLAMA3.replace("{1,3}", "")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = (
  rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{SUFFIX}|\p{{N}}{{1,3}}"
  r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+" + TAIL
)
# GPT-2's after each digit has become a word. Spaces before a digit are then at the end of a text.
DIGITS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
NEW_DIGITS = re.compile("[\U00011de0-\U00011de9\U00016ff4-\U00016ff6]")  # to split by digits, these are none as yet


class Ranks(NamedTuple):
  """What tiktoken needs.

  Attributes:
    pattern: the regular expression of words.
    ids: of each token, by its bytes.
  """

  pattern: str
  ids: dict[bytes, int]


class NotEqualError(Exception):
  """Why tiktoken may not give the tokens of a tokenizer."""


def alphabet() -> dict[str, int]:
  """The byte that each character of a byte-level vocabulary stands for."""
  shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
  hidden = [byte for byte in range(256) if byte not in shown]
  return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


def proven(form: dict[str, Any]) -> Ranks:
  """The ranks that give the tokens of a tokenizer, from its `tokenizer.json`. Raises NotEqualError if none do."""
  model = form["model"]
  if model.get("type") != "BPE":
    raise NotEqualError(f"its model is {model.get('type')}, not BPE")
  for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
    if model.get(option):
      raise NotEqualError(f"it has {option}")
  if (form["normalizer"] or {}).get("type", "NFC") != "NFC":
    raise NotEqualError(f"its normalizer is {form['normalizer']['type']}, not NFC")
  return Ranks(_pattern(form["pre_tokenizer"]), _ids(model))


def _pattern(given: dict[str, Any] | None) -> str:
  """The pattern of words that a pre-tokenizer splits text into."""
  parts = given["pretokenizers"] if given and given["type"] == "Sequence" else [given]
  *before, last = [part or {"type": "None"} for part in parts]
  kinds = "+".join(part["type"] for part in [*before, last])
  if last["type"] == "ByteLevel" and not last["add_prefix_space"]:
    if kinds == "ByteLevel" and last["use_regex"]:
      return GPT2
    if kinds == "Digits+ByteLevel" and last["use_regex"] and before[0]["individual_digits"]:
      return DIGITS
    if kinds == "Split+ByteLevel" and not last["use_regex"]:
      pattern, how = before[0]["pattern"].get("Regex"), (before[0]["behavior"], before[0]["invert"])
      if pattern in (GPT2, LLAMA3, QWEN, O200K) and how in (("Isolated", False), ("Removed", True)):
        return pattern
  raise NotEqualError(f"its way to split words ({kinds}) is not in the table")


def _ids(model: dict[str, Any]) -> dict[bytes, int]:
  """The ids R of the theorem, by bytes."""
  byte_of, vocabulary = alphabet(), model["vocab"]
  if missing := byte_of.keys() - vocabulary.keys():
    raise NotEqualError(f"its vocabulary lacks {len(missing)} of the 256 bytes")
  products = np.array([vocabulary[left + right] for left, right in model["merges"]], np.int64)
  if (np.diff(products) < 0).any():
    raise NotEqualError("its merges are not in the order of ids")
  words = [token for token in vocabulary if token and byte_of.keys() >= set(token)]
  if len({vocabulary[word] for word in words}) < len(words):
    raise NotEqualError("two of its tokens have the same id")
  left = _left_of(model, words)
  if not model["ignore_merges"]:
    words = [word for word, count in zip(words, left, strict=True) if count == 1]
  elif 2 in left:
    raise NotEqualError(f"no merge makes its token {words[left.index(2)]!r} of the two that its bytes become")
  return {bytes(byte_of[character] for character in word): vocabulary[word] for word in words}


def _left_of(model: dict[str, Any], words: list[str]) -> list[int]:
  """How many tokens `tokenizers` leaves of each word by merges alone."""
  from tokenizers import Tokenizer

  alone = {"version": "1.0", "added_tokens": [], "model": model | {"ignore_merges": False}}
  parts = ("normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation", "padding")
  merging = Tokenizer.from_str(json.dumps(alone | dict.fromkeys(parts)))
  return [len(found.ids) for found in merging.encode_batch_fast(words, add_special_tokens=False)]


@functools.cache
def check_classes(pattern: str) -> None:
  """Raises NotEqualError if the libraries differ on the characters of a class that the pattern has.

  Compares every 16th character, and those at both ends of each run of characters in the class.
  """
  from tokenizers import Regex, pre_tokenizers

  points = np.array([point for point in range(LAST_LETTERS) if not 0xD800 <= point < 0xE000], "<u4")
  text = points.tobytes().decode("utf-32-le")
  folded = {"(?i:[stmdrevl])"} if "(?i" in pattern else set[str]()
  for name in sorted({*re.findall(r"\\p\{\w+\}|\\s", pattern), *folded}):
    encoding = encoding_of(Ranks(name, {bytes([byte]): byte for byte in range(256)}))  # leaves out the others
    found = encoding.encode_to_numpy(text, disallowed_special=()).astype("u1").tobytes().decode()
    inside = np.isin(points, np.frombuffer(found.encode("utf-32-le"), "<u4"))
    change = np.flatnonzero(np.diff(inside))
    at = np.unique(np.concatenate([change, change + 1, np.arange(0, len(points), 16)]))
    probes, here = [text[i] for i in at], {text[i] for i in at[inside[at]]}
    parts = pre_tokenizers.Split(Regex(name), "removed").pre_tokenize_str("".join(probes))
    differ = here != set(probes) - {character for part, _ in parts for character in part}
    if pattern == DIGITS and name == r"\p{N}":
      parts = pre_tokenizers.Digits(individual_digits=True).pre_tokenize_str("a".join(["", *probes, ""]))
      digits = {part for part, _ in parts if len(part) == 1 and part != "a"}
      differ |= any(not NEW_DIGITS.match(character) for character in here ^ digits)
    if differ:
      raise NotEqualError(f"the installed tokenizers and tiktoken differ in {name}")


def encoding_of(ranks: Ranks) -> Any:
  """The Encoding of tiktoken, which does not reach for the network."""
  import tiktoken

  pattern = ranks.pattern
  if pattern.endswith(TAIL):  # the same words, sooner: all that looks at what follows is apart from the rest
    pattern = f"(?:{pattern.removesuffix(TAIL)}){TAIL}"
  unused = {NO_NAME: max(ranks.ids.values()) + 1}
  return tiktoken.Encoding("documents", pat_str=pattern, mergeable_ranks=ranks.ids, special_tokens=unused)


class Documents:
  """Encodes documents to the tokens of a tokenizer, whichever library does it."""

  def __init__(self, tokenizer: Any, dtype: np.dtype, where: str = "data.tokenizer"):
    """`tokenizer`, of `tokenizers`, says what the tokens are. It takes the names of special tokens as text.

    `where` names it in errors.
    """
    self._tokenizer, self._dtype, self._where = tokenizer, dtype, where
    self._why_not, self._to_compare = "", COMPARED

  def __call__(self, pieces: list[bytes]) -> list[np.ndarray]:
    texts = [piece.decode(errors="replace") for piece in pieces]
    if not self._fast or self._why_not:
      return self._by_tokenizers(texts)
    found = self._by_tiktoken(texts)
    if self._to_compare > 0:
      self._compare(texts, found)
    left = [number for number, ids in enumerate(found) if ids is None]
    for number, ids in zip(left, self._by_tokenizers([texts[number] for number in left]), strict=True):
      found[number] = ids
    return found  # type: ignore[return-value]

  def compare(self) -> None:
    """Lets both libraries encode what comes next, and compares the tokens."""
    self.library()  # once, before several threads ask
    self._to_compare = COMPARED

  @property
  def is_fast(self) -> bool:
    """Whether tiktoken encodes."""
    return self._fast is not None and not self._why_not

  def library(self) -> str:
    """Which library encodes, and why not tiktoken."""
    if not self._fast or self._why_not:
      return f"tokenizers, as {self._why_not}"
    return "tiktoken, but for texts with an added token" if self._added else "tiktoken"

  @functools.cached_property
  def _fast(self) -> Any:
    """The Encoding of tiktoken that gives the same tokens, or None."""
    try:
      ranks = proven(json.loads(self._tokenizer.to_str()))
      check_classes(ranks.pattern)
    except NotEqualError as error:
      self._why_not = str(error)
      return None
    self._digits = ranks.pattern == DIGITS
    return encoding_of(ranks)

  @functools.cached_property
  def _added(self) -> re.Pattern[str] | None:
    """Finds added tokens that `tokenizers` looks for in documents, as they are and as they are normalized."""
    added = self._tokenizer.get_added_tokens_decoder().values()
    names = {token.content for token in added if not token.special}
    names |= {self._normal(name) for name in names}
    return re.compile("|".join(map(re.escape, sorted(names)))) if names else None

  @functools.cached_property
  def _threads(self) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count() or 1, "encode")

  def _normal(self, text: str) -> str:
    normalizer = self._tokenizer.normalizer
    return normalizer.normalize_str(text) if normalizer and ABOVE.search(text) else text

  def _by_tokenizers(self, texts: list[str]) -> list[np.ndarray]:
    try:
      found = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False) if texts else []
    except BaseException as error:  # the library raises nothing more specific
      if not is_failure(error):
        raise
      raise cannot_encode(self._where, error) from error
    return [np.array(encoding.ids, self._dtype) for encoding in found]

  def _by_tiktoken(self, texts: list[str]) -> list[np.ndarray | None]:
    """The ids of each text, or None for one that needs `tokenizers`."""
    total = sum(map(len, texts))
    if total < TOGETHER or total < WORTH * len(texts):
      return [self._ids(text) for text in texts]
    size = max(1, len(texts) // (4 * (os.cpu_count() or 1)))
    groups = [texts[at : at + size] for at in range(0, len(texts), size)]
    return [ids for group in self._threads.map(lambda group: [*map(self._ids, group)], groups) for ids in group]

  def _ids(self, text: str) -> np.ndarray | None:
    normal = self._normal(text)
    if self._added and (self._added.search(text) or self._added.search(normal)):
      return None
    if self._digits and not text.isascii() and NEW_DIGITS.search(text):
      return None
    try:
      return self._fast.encode_to_numpy(normal, disallowed_special=()).astype(self._dtype)
    except ValueError:  # the regular expression takes too many steps, as for a million spaces
      return None

  def _compare(self, texts: list[str], found: list[np.ndarray | None]) -> None:
    """Compares the first texts, and leaves all to `tokenizers` if they differ."""
    before = np.cumsum([0, *map(len, texts)])
    first = texts[: int(np.searchsorted(before, self._to_compare))]
    self._to_compare -= int(before[len(first)])
    for text, ids, expected in zip(first, found, self._by_tokenizers(first), strict=False):
      if ids is not None and not np.array_equal(ids, expected):
        self._why_not = f"tiktoken gives other tokens for {text[:40]!r}"
        print(f"documents are tokenized by {self.library()}", file=sys.stderr, flush=True)
        found[:] = [None] * len(found)
        return
