"""Documents of which only some of the text counts: a prompt with its completion, or a dialogue (chat.py).

A document is a list of spans. There are two kinds:

- A prompt and its completion, as they are written. The prompt has the tokens that `tools.generate` gives it: what the
  tokenizer puts in front of a text is put there once. The completion is encoded behind the prompt, so decoding all
  tokens gives both. No token covers the border. The END token is added, unless the completion ends with such a token.
- A dialogue that a chat template has written. It is encoded as a whole, and nothing is put before or behind it, as in
  the library transformers. A token counts if a part of it does. What follows the last of these tokens is left out,
  because nothing there is learned.

Names of special tokens stand for these tokens in all spans.
"""

import dataclasses
import itertools
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from errors import ConfigError, first_line
from limits import is_failure

TAIL = 64  # characters of a text that what follows is encoded behind
LAST = 16  # tokens before such a text that are decoded with it
# Contexts for a text whose first characters would join the last token before it. The first one that fits is taken.
NEUTRAL = ("\n", "a", "0", ".", " ")


class Span(NamedTuple):
  """A part of a document, in UTF-8, and whether its tokens count."""

  text: bytes
  counted: bool


class Document(NamedTuple):
  """A document in spans.

  Attributes:
    spans: its parts, in order; a prompt and its completion, or those of a dialogue.
    rendered: whether a chat template has written it, as a dialogue.
    closed: whether its text says by itself where it ends, so no END token is added.
  """

  spans: tuple[Span, ...]
  rendered: bool = False
  closed: bool = False

  @property
  def text(self) -> bytes:
    return b"".join(span.text for span in self.spans)

  @property
  def counted_bytes(self) -> int:
    """Bytes that count. An END token counts as one."""
    return sum(len(span.text) for span in self.spans if span.counted) + (not self.closed)


class Encoded(NamedTuple):
  """The token ids of a document, its END token included, and whether each of them counts, bool."""

  ids: np.ndarray
  counted: np.ndarray


def pair(prompt: bytes, completion: bytes) -> Document:
  """A prompt, and its completion, which counts."""
  return Document((Span(prompt, False), Span(completion, True)))


def written(text: str) -> Document:
  """What a chat template has written for a model to go on from."""
  return Document((Span(text.encode(errors="replace"), True),), rendered=True, closed=True)


def of_bytes(end: int) -> Callable[[Sequence[Document]], list[Encoded]]:
  """Encodes documents as bytes. `end` must not be among them."""

  def encode(documents: Sequence[Document]) -> list[Encoded]:
    found = []
    for document in documents:
      text = document.text + bytes([end])
      counted = np.concatenate([*(np.full(len(span.text), span.counted) for span in document.spans), [True]])
      if text.find(end) < len(text) - 1:
        raise ConfigError(
          f"data.path has a text with the byte {end}, which ends documents, after "
          f"{text[: text.find(end)][-16:].decode(errors='replace')!r}; remove it there, or use another data.tokenizer"
        )
      found.append(Encoded(np.frombuffer(text, np.uint8), counted))
    return found

  return encode


@dataclasses.dataclass(frozen=True)
class Encoder:
  """Encodes texts in which names of special tokens stand for these tokens, with a tokenizer of the Hugging Face form.

  Attributes:
    tokenizer: that of the library `tokenizers`.
    encode: its ids of texts, in which names of added tokens stand for these (named_tokens.py).
    where: names it in errors.
    begin: the ids that it puts in front of a text.
    end, ends: the END token, and all that end a text.
    dtype: of ids.
    sizes: the bytes that each id stands for, int64; None if tokens are not bytes of the text.
  """

  tokenizer: Any
  encode: Callable[[list[str]], list[list[int]]]
  where: str
  begin: tuple[int, ...]
  end: int
  ends: frozenset[int]
  dtype: np.dtype
  sizes: np.ndarray | None = None

  def prompts(self, texts: Sequence[bytes]) -> list[np.ndarray]:
    """The ids of prompts, which begin as texts begin. What the tokenizer puts behind a text is not part of them."""
    return [self._begun(ids) for ids in self._ids(decoded(texts))]

  def documents(self, documents: Sequence[Document], ends: frozenset[int] = frozenset()) -> list[Encoded]:
    """The ids of documents, and which of them count. `ends` are more tokens that end a text."""
    ends |= self.ends
    written = iter(self._written([document for document in documents if not document.rendered]))
    rendered = iter(self._rendered([document for document in documents if document.rendered]))
    return [self._closed(next(rendered if document.rendered else written), document, ends) for document in documents]

  def _begun(self, ids: list[int]) -> np.ndarray:
    has_begin = tuple(ids[: len(self.begin)]) == self.begin
    return np.array(ids if has_begin else [*self.begin, *ids], self.dtype)

  def _closed(self, encoded: Encoded, document: Document, ends: frozenset[int]) -> Encoded:
    """The document up to its last token that counts, with the END token if it needs one."""
    ids, counted = encoded
    if document.rendered:
      size = int(np.flatnonzero(counted)[-1]) + 1 if counted.any() else 0
      ids, counted = ids[:size], counted[:size]
    if document.closed or (len(ids) and counted[-1] and int(ids[-1]) in ends):
      return Encoded(ids, counted)
    return Encoded(np.append(ids, np.array(self.end, self.dtype)), np.append(counted, True))

  def _ids(self, texts: list[str]) -> list[list[int]]:
    return self._guarded(lambda: self.encode(texts))

  def decode(self, ids: list[int]) -> str:
    """The text of ids."""
    return self._guarded(lambda: [self.tokenizer.decode(ids)])[0]

  def _guarded(self, encode: Callable[[], list[Any]]) -> list[Any]:
    try:
      return encode()
    except BaseException as error:  # the library raises nothing more specific
      if not is_failure(error):
        raise
      raise cannot_encode(self.where, error) from error

  def _written(self, documents: list[Document]) -> list[Encoded]:
    """The ids of prompts, and those of completions behind them."""
    begun = self.prompts([document.spans[0].text for document in documents])
    before, texts = (decoded(document.spans[at].text for document in documents) for at in (0, 1))
    behind = self._behind([prompt[-TAIL:] for prompt in before], texts)
    joined = [n for n, own in enumerate(behind) if own is None]
    apart = iter(self._apart([texts[n] for n in joined], [begun[n][-LAST:].tolist() for n in joined]))
    found = []
    for ids, own in zip(begun, behind, strict=True):
      completion = np.array(next(apart) if own is None else own, self.dtype)
      found.append(Encoded(np.concatenate([ids, completion]), np.arange(len(ids) + len(completion)) >= len(ids)))
    return found

  def _behind(self, contexts: list[str], texts: list[str]) -> list[list[int] | None]:
    """The ids of texts, each behind its context; None where a token covers the border between the two."""
    both = self._ids([context + text for context, text in zip(contexts, texts, strict=True)])
    if self.sizes is None or self.tokenizer.normalizer is not None:
      alone = self._ids(contexts)
      return [ids[len(own) :] if ids[: len(own)] == own else None for ids, own in zip(both, alone, strict=True)]
    return [self._from(context, text, ids) for context, text, ids in zip(contexts, texts, both, strict=True)]

  def _from(self, context: str, text: str, ids: list[int]) -> list[int] | None:
    """Of the ids of context and text, whose tokens are their bytes, those of the text; None without a border there."""
    assert self.sizes is not None
    border = len(context.encode())
    stops = np.concatenate([[0], np.cumsum(self.sizes[ids])]) if ids else np.zeros(1, np.int64)
    at = int(np.searchsorted(stops, border))
    has_border = at < len(stops) and stops[at] == border and stops[-1] == border + len(text.encode())
    return ids[at:] if has_border else None

  def _apart(self, texts: list[str], before: list[list[int]]) -> list[list[int]]:
    """The ids of texts whose first characters would join the last of the tokens `before` them."""
    decode = lambda ids: self.tokenizer.decode(ids, skip_special_tokens=False)
    found: dict[int, list[int]] = {}
    waiting = list(range(len(texts)))
    for context in NEUTRAL if texts else ():
      (alone,), missed = self._ids([context]), []
      for i, both in zip(waiting, self._ids([context + texts[i] for i in waiting]), strict=True):
        own = both[len(alone) :]
        if both[: len(alone)] != alone:
          missed.append(i)
        elif decode(before[i] + own) != decode(before[i]) + texts[i]:  # as if it followed a space
          found.setdefault(i, own)
          missed.append(i)
        else:
          found[i] = own
      waiting = missed
    return [found[i] if i in found else self._ids([text])[0] for i, text in enumerate(texts)]

  def _rendered(self, documents: list[Document]) -> list[Encoded]:
    """The ids of whole dialogues. A token counts if a part of it is in a span that does."""
    texts = decoded(document.text for document in documents)
    if self.sizes is not None:
      found = [
        self._of_sizes(document, np.array(ids)) for document, ids in zip(documents, self._ids(texts), strict=True)
      ]
      if all(found):
        return [encoded for encoded in found if encoded]
    every = self._guarded(lambda: self.tokenizer.encode_batch(texts, add_special_tokens=False))
    return [self._of_places(document, tokens) for document, tokens in zip(documents, every, strict=True)]

  def _of_sizes(self, document: Document, ids: np.ndarray) -> Encoded | None:
    """The ids of a dialogue whose tokens are its bytes; None if they are not."""
    assert self.sizes is not None
    stops, counted = np.cumsum(self.sizes[ids]), np.zeros(len(ids), bool)
    ends = np.cumsum([len(span.text) for span in document.spans])
    if not len(ids) or stops[-1] != ends[-1] or not self._keeps(document):
      return None
    first = [0, *np.searchsorted(stops, ends, "right").tolist()]  # the first token that goes on behind each border
    after = np.searchsorted(stops, ends, "left").tolist()
    for span, start, last in zip(document.spans, first, after, strict=False):
      if span.counted:
        counted[start : last + 1] = True
    return Encoded(ids.astype(self.dtype), counted)

  def _keeps(self, document: Document) -> bool:
    """Whether the tokenizer's normalizer does not change a text."""
    if (normalizer := self.tokenizer.normalizer) is None:
      return True
    return type(normalizer).__name__ == "NFC" and unicodedata.is_normalized("NFC", *decoded([document.text]))

  def _of_places(self, document: Document, tokens: Any) -> Encoded:
    """The ids of a dialogue whose tokens know the characters that they stand for."""
    ids, own = np.array(tokens.ids, self.dtype), decoded(span.text for span in document.spans)
    counted, at, size = np.zeros(len(ids), bool), 0, sum(map(len, own))
    for span, part in zip(document.spans, own, strict=True):
      if span.counted and part:
        counted[_first_token(tokens, at, size) : _after(tokens, at + len(part), size)] = True
      at += len(part)
    return Encoded(ids, counted)


def _first_token(tokens: Any, at: int, size: int) -> int:
  """The first token that holds the character `at`, or one after it. Some characters are in no token."""
  while at < size:
    if (found := tokens.char_to_token(at)) is not None:
      return int(found)
    at += 1
  return len(tokens)


def _after(tokens: Any, at: int, size: int) -> int:
  """The first token with nothing before the character `at`."""
  found = _first_token(tokens, at, size)
  return found + 1 if found < len(tokens) and tokens.token_to_chars(found)[0] < at else found


def decoded(texts: Iterable[bytes]) -> list[str]:
  return [text.decode(errors="replace") for text in texts]


def begin_of(tokenizer: Any) -> tuple[int, ...]:
  """The ids that a tokenizer puts in front of a text, such as <s>; () if there are none."""
  for text in itertools.chain("a", itertools.islice(tokenizer.get_vocab(with_added_tokens=False), 1000)):
    found = tokenizer.encode(text)
    if 0 in found.special_tokens_mask:
      return tuple(found.ids[: found.special_tokens_mask.index(0)])
  return ()


def sizes_of(tokenizer: Any) -> np.ndarray | None:
  """The bytes that each id of a byte-level tokenizer stands for; None if it adds spaces or leaves some out."""
  form, added_tokens = str(tokenizer.pre_tokenizer), tokenizer.get_added_tokens_decoder()
  if "ByteLevel(" not in form or "add_prefix_space=True" in form:
    return None
  if any(added.lstrip or added.rstrip for added in added_tokens.values()):
    return None
  vocabulary = tokenizer.get_vocab()
  sizes = np.zeros(max(vocabulary.values(), default=0) + 1, np.int64)
  for token, number in vocabulary.items():  # a character is a byte
    sizes[number] = len(token)
  for number, added in added_tokens.items():
    sizes[number] = len(added.content.encode())
  return sizes


def cannot_encode(where: str, error: BaseException) -> ConfigError:
  return ConfigError(f"{where} cannot encode this text ({first_line(error)}); add that token to it, or use another one")
