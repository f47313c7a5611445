"""From text to token ids: bytes, a BPE that is trained on the text, or a tokenizer.json of the Hugging Face form."""

import dataclasses
import functools
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from data.dataset import Text
from data.text import tokenizer_files
from data.text.cutting import Cutter, Encode, cutter_of
from errors import ConfigError, first_line, inside

TOKENIZERS = ("bytes", "bpe")  # or the path of a tokenizer.json
SAMPLE = 1 << 24  # bytes of training text that a BPE is trained on; it is sampled from a longer text
SAMPLE_WORDS = 1 << 20  # bytes of all different words in the sample; training takes about 130 times as much memory
WORDS = re.compile(r" ?[^\W\d_]+| ?\d+| ?[^\s\w]+|\s+|_+")  # about those of the BPE
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
    text: the same for the text of prompts and samples.
    cutter: cuts documents so that their tokens do not change.
  """

  name: str
  size: int
  end: int
  encode: Encode
  encode_prompts: Encode
  text: Text
  cutter: Cutter

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
  text=Text(
    encode=lambda text: list(text.encode()),
    decode=lambda ids: bytes(i for i in ids if i < 256).decode(errors="replace"),
    to_bytes=bytes,
    files=lambda: tokenizer_files.of_bytes(end=0),
    ends=frozenset({0}),
  ),
  cutter=Cutter(),
)


def find_file(tokenizer: str) -> Path | None:
  """The tokenizer.json that `data.tokenizer` names, or None for one of TOKENIZERS."""
  if tokenizer in TOKENIZERS:
    return None
  path = Path(tokenizer).expanduser()
  file = path / "tokenizer.json" if path.is_dir() else path
  if not file.exists():
    raise ConfigError(
      f"data.tokenizer={tokenizer!r} does not exist; use 'bytes', 'bpe', or the path of a tokenizer.json"
    )
  return file


def from_file(file: Path, kind: str = "") -> Tokenizer:
  """The tokenizer in a tokenizer.json. `kind` begins its name."""
  from tokenizers import Tokenizer as Loaded
  from tokenizers.models import Unigram

  try:
    loaded = Loaded.from_file(str(file))
  except Exception as error:  # the library raises nothing more specific
    raise ConfigError(
      f"data.tokenizer={str(file)!r} is not a tokenizer of the Hugging Face form ({first_line(error)}); use a "
      "tokenizer.json, 'bytes' or 'bpe'"
    ) from error
  for name in tokenizer_files.BESIDE:  # exports copy these
    inside(f"data.tokenizer={str(file)!r}", file.parent, file.with_name(name))
  loaded.no_truncation()
  loaded.no_padding()
  known = next((i for name in END_NAMES if (i := loaded.token_to_id(name)) is not None), None)
  given = tokenizer_files.ends_of(file)
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
  dtype = dtype_of(size)

  def encode(pieces: list[bytes], by: Loaded, special: bool = False) -> list[np.ndarray]:
    texts = [piece.decode(errors="replace") for piece in pieces]
    return [np.array(found.ids, dtype) for found in by.encode_batch_fast(texts, add_special_tokens=special)]

  plain = Loaded.from_str(loaded.to_str())
  plain.encode_special_tokens = True  # as text
  encode_documents = functools.partial(encode, by=plain)

  return Tokenizer(
    name=f"{kind or 'tokenizer.json'} {hashlib.sha256(file.read_bytes()).hexdigest()[:12]}{other}",
    size=size,
    end=end,
    encode=encode_documents,
    encode_prompts=functools.partial(encode, by=loaded, special=True),
    text=Text(
      encode=lambda text: loaded.encode(text).ids,
      decode=lambda ids: loaded.decode(ids),
      to_bytes=lambda ids: loaded.decode(list(ids)).encode(),
      files=lambda: tokenizer_files.of_file(file, end, loaded.id_to_token(end)),
      ends=frozenset({end, *tokenizer_files.ends_of(file)}),
    ),
    cutter=cutter_of(encode_documents, plain.get_vocab(with_added_tokens=False), not isinstance(plain.model, Unigram)),
  )


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
  stride, kept, seen = 1, list[list[bytes]](), set[bytes]()
  kept_size = seen_size = 0

  def keep(unit: list[bytes]) -> None:
    nonlocal kept_size, seen_size
    kept.append(unit)
    kept_size += sum(map(room, unit))
    new = {word.encode() for piece in unit for word in WORDS.findall(piece.decode(errors="replace"))} - seen
    seen.update(new)
    seen_size += sum(map(len, new))

  for number, unit in enumerate(units(pieces, UNIT)):
    if number % stride == 0:
      keep(unit)
    while len(kept) > 1 and (kept_size > size or seen_size > words):
      fewer, stride = kept[::2], 2 * stride
      kept, seen, kept_size, seen_size = [], set(), 0, 0
      for again in fewer:
        keep(again)
  return [piece for unit in kept for piece in unit]


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
