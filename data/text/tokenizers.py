"""From text to token ids: bytes, a BPE that is trained on the text, or a tokenizer.json of the Hugging Face form."""

import dataclasses
import functools
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import limits
from data.dataset import Text
from data.text import spans, templates, tokenizer_files
from data.text.chat import Chat
from data.text.cutting import Cutter, Encode, cutter_of
from data.text.missing import Missing, missing_in
from data.text.named_tokens import NamedTokens
from data.text.ranks import Documents
from data.text.spans import Encoded
from data.text.tokenizer_files import check_tokenizer
from errors import ConfigError, first_line, inside

TOKENIZERS = ("bytes", "bpe")  # or the path of a tokenizer.json
SAMPLE = 1 << 24  # bytes of training text that a BPE is trained on; it is sampled from a longer text
SAMPLE_WORDS = 1 << 20  # bytes of all different words in the sample; training takes about 130 times as much memory
WORDS = re.compile(r" ?[^\W\d_]+| ?\d+| ?[^\s\w]+|\s+|_+")  # about those of the BPE
# The same words of a text in ASCII, in two thirds of the time.
ASCII_WORDS = re.compile(r" ?[A-Za-z]+| ?[0-9]+| ?[^0-9A-Za-z_ \t-\r\x1c-\x1f]+|[ \t-\r\x1c-\x1f]+|_+")
UNIT = 1 << 16  # bytes that are taken into the sample, or not, together
END_NAMES = (  # tokens that end a document in well-known tokenizers
  "<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "</s>", "<eos>", "[SEP]", "<end>",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Tokenizer:
  """A tokenizer.

  Attributes:
    name: equal names mean equal tokenizers.
    size: all ids are below.
    end: the id that ends a document.
    encode: from documents, in UTF-8, to the ids of each, using all cores. Names of special tokens in them are text like
      any other.
    encode_prompts: the same for whole prompts. It gives the ids that `text.encode` gives, of special tokens too.
    encode_spans: from documents of which only parts count, to their ids, with END, and whether each counts (spans.py).
    text: the same for the text of prompts and samples.
    cutter: cuts documents so that their tokens do not change.
    documents: `encode`, of a tokenizer that two libraries may have; it says which one encodes (ranks.py).
    chat: the chat template, which writes dialogues.
    missing: counts what the tokenizer has no token for; None if it has tokens for all.
    added: ids that were added behind its vocabulary, such as [PAD]. A model may lack those that no text holds.
  """

  name: str
  size: int
  end: int
  encode: Encode
  encode_prompts: Encode
  encode_spans: Callable[..., list[Encoded]]
  text: Text
  cutter: Cutter
  chat: Chat
  documents: Documents | None = None
  missing: Missing | None = None
  added: frozenset[int] = frozenset()

  @property
  def needs(self) -> int:
    """How many ids a model must know: all but the last ones that were added, and END."""
    return next((i + 1 for i in range(self.size - 1, -1, -1) if i not in self.added or i == self.end), 0)

  @property
  def dtype(self) -> np.dtype:
    return dtype_of(self.size)


def dtype_of(size: int) -> np.dtype:
  """The smallest type for token ids below `size`."""
  return np.dtype("u1" if size <= 1 << 8 else "<u2" if size <= 1 << 16 else "<u4")


def _bytes(pieces: list[bytes]) -> list[np.ndarray]:
  return [np.frombuffer(piece, np.uint8) for piece in pieces]


BYTES = Tokenizer(
  name="bytes",
  size=256,
  end=0,
  encode=_bytes,
  encode_prompts=_bytes,
  encode_spans=spans.of_bytes(end=0),
  text=Text(
    encode=lambda text: list(text.encode()),
    decode=lambda ids: bytes(i for i in ids if i < 256).decode(errors="replace"),
    to_bytes=bytes,
    files=lambda: tokenizer_files.of_bytes(end=0),
    ends=frozenset({0}),
  ),
  cutter=Cutter(),
  chat=Chat(templates.Templates({}, {}, "bytes"), ()),
)


def find_file(tokenizer: str) -> Path | None:
  """The tokenizer.json that `data.tokenizer` names, or None for one of TOKENIZERS."""
  if tokenizer in TOKENIZERS:
    return None
  path = Path(os.path.expanduser(tokenizer))
  file = path / "tokenizer.json" if path.is_dir() else path
  if not file.exists():
    raise ConfigError(
      f"data.tokenizer={tokenizer!r} does not exist; use 'bytes', 'bpe', or the path of a tokenizer.json"
    )
  return file


def from_file(file: Path, kind: str = "") -> Tokenizer:
  """The tokenizer in a tokenizer.json. `kind` begins its name."""
  from tokenizers import Tokenizer as Loaded

  try:
    check_tokenizer(file)
    loaded = Loaded.from_file(str(file))
    if (largest := max(loaded.get_vocab().values(), default=0)) >= limits.VOCABULARY:
      raise ValueError(f"it has token id {largest}, and the limit is {limits.VOCABULARY - 1}")
    return _made(file, kind, loaded)
  except BaseException as error:  # the library raises nothing more specific
    if isinstance(error, ConfigError) or not limits.is_failure(error):
      raise
    raise ConfigError(
      f"data.tokenizer={str(file)!r} is not a tokenizer of the Hugging Face form ({first_line(error)}); use a "
      "tokenizer.json, 'bytes' or 'bpe'"
    ) from error


def _made(file: Path, kind: str, loaded: Any) -> Tokenizer:
  """The tokenizer that the library has loaded from a file."""
  from tokenizers import Tokenizer as Loaded
  from tokenizers.models import Unigram

  for name in (*tokenizer_files.BESIDE, tokenizer_files.CONFIGS[0]):  # exports copy these
    inside(f"data.tokenizer={str(file)!r}", file.parent, file.with_name(name))
  loaded.no_truncation()
  loaded.no_padding()
  known = next((i for name in END_NAMES if (i := loaded.token_to_id(name)) is not None), None)
  given = tokenizer_files.ends_of(file, loaded.token_to_id)
  end = given[0] if given else known
  if end is None:
    raise ConfigError(
      f"data.tokenizer={str(file)!r} has no token that ends a document; add one of {', '.join(END_NAMES)}"
    )
  size = max(loaded.get_vocab().values()) + 1
  if not 0 <= end < size:
    raise ConfigError(
      f"data.tokenizer={str(file)!r} has ids below {size}, but a file beside it says that {end} ends a text; copy both "
      "from the same model"
    )
  other = "" if end == known else f", ends with {end}"
  if getattr(loaded.model, "dropout", None):  # for training; with it, a text has other tokens each time
    loaded.model.dropout = None
    other += ", without dropout"
  dtype, ends = dtype_of(size), frozenset({end, *given})

  plain = Loaded.from_str(loaded.to_str())
  plain.encode_special_tokens = True  # as text
  begin, where = spans.begin_of(loaded), f"data.tokenizer={str(file)!r}"
  documents, missing = Documents(plain, dtype, where), missing_in(plain)
  encode = NamedTokens(loaded, documents)
  of_spans = spans.Encoder(loaded, encode, where, begin, end, ends, dtype, None if missing else spans.sizes_of(loaded))
  control = tuple(token.content for token in loaded.get_added_tokens_decoder().values() if token.content.strip())

  return Tokenizer(
    name=f"{kind or 'tokenizer.json'} {hashlib.sha256(file.read_bytes()).hexdigest()[:12]}{other}",
    size=size,
    end=end,
    encode=documents,
    encode_prompts=of_spans.prompts,
    encode_spans=of_spans.documents,
    text=Text(
      encode=lambda text: of_spans.prompts([text.encode()])[0].tolist(),
      decode=of_spans.decode,
      to_bytes=lambda ids: of_spans.decode(list(ids)).encode(),
      files=lambda: tokenizer_files.of_file(file, end, loaded.id_to_token(end)),
      ends=ends,
    ),
    cutter=cutter_of(documents, plain.get_vocab(with_added_tokens=False), not isinstance(plain.model, Unigram)),
    chat=Chat(templates.found_beside(file), control),
    documents=documents,
    missing=missing,
    added=frozenset(loaded.get_added_tokens_decoder()),
  )


def for_chat(tokenizer: Tokenizer) -> Tokenizer:
  """The tokenizer of a model that answers in dialogues: what ends an answer there ends a text, too."""
  text = tokenizer.text
  if not (name := tokenizer.chat.end):
    return tokenizer
  (end,) = tokenizer.encode_prompts([name.encode()])[0][-1:].tolist()
  if end in text.ends:
    return tokenizer
  files = lambda: tokenizer_files.with_end(text.files(), end)
  encode_spans = functools.partial(tokenizer.encode_spans, ends=frozenset({end}))
  with_end = dataclasses.replace(text, ends=text.ends | {end}, files=files)
  return dataclasses.replace(tokenizer, text=with_end, encode_spans=encode_spans)


def room(text: bytes) -> int:
  """About how much memory a piece of text takes. Many short ones take more than their text."""
  return len(text) + 64


def train_bpe(folder: Path, pieces: Iterable[bytes], vocab_size: int) -> None:
  """Trains a byte-level BPE on the pieces of a text, or on a sample of them, and writes it to `folder`."""
  from tokenizers import Tokenizer as Trained
  from tokenizers import decoders, models, pre_tokenizers, trainers

  bpe = Trained(models.BPE())
  bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  bpe.decoder = decoders.ByteLevel()
  alphabet = pre_tokenizers.ByteLevel.alphabet()
  trainer = trainers.BpeTrainer(
    vocab_size=vocab_size, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
  )
  bpe.train_from_iterator((piece.decode(errors="replace") for piece in sample(pieces)), trainer)
  bpe.save(str(folder / "tokenizer.json"))


def sample(pieces: Iterable[bytes], size: int = SAMPLE, words: int = SAMPLE_WORDS) -> list[bytes]:
  """Pieces of a text, evenly spread: all of them, or every 2nd, 4th, ... unit of neighbours if those are too many.

  Args:
    pieces: the text.
    size: bytes of the sample, at most.
    words: bytes of all different words of the sample, at most.
  """
  stride, kept, sizes = 1, list[list[bytes]](), list[int]()
  for number, unit in enumerate(units(pieces, UNIT)):
    if number % stride == 0:
      kept.append(unit)
      sizes.append(sum(map(room, unit)))
    while len(kept) > 1 and sum(sizes) > size:
      kept, sizes, stride = kept[::2], sizes[::2], 2 * stride
  stride = _stride(kept, words)
  return [piece for unit in kept[::stride] for piece in unit]


def _stride(text: list[list[bytes]], size: int) -> int:
  """The least power of two so that every such unit, from the first on, has words of at most `size` bytes in all.

  Counts no unit twice: the more units, the more words.
  """
  stride = 1 << max(0, len(text) - 1).bit_length()
  seen = {word for unit in text[:1] for word in _words(unit)}
  found = sum(len(word.encode()) for word in seen)
  while stride > 1:
    for unit in text[stride // 2 :: stride]:
      new = _words(unit) - seen
      seen |= new
      found += sum(len(word.encode()) for word in new)
      if found > size:
        return stride
    stride //= 2
  return stride


def _words(unit: list[bytes]) -> set[str]:
  texts = (piece.decode(errors="replace") for piece in unit)
  return {word for text in texts for word in (ASCII_WORDS if text.isascii() else WORDS).findall(text)}


def units(pieces: Iterable[Any], size: int, text_of: Callable[[Any], bytes] = bytes) -> Iterator[list[Any]]:
  """Groups neighbours to lists of about `size` bytes each. The last may have fewer."""
  unit: list[Any] = []
  total = 0
  for piece in pieces:
    unit.append(piece)
    total += room(text_of(piece))
    if total >= size:
      yield unit
      unit, total = [], 0
  if unit:
    yield unit
