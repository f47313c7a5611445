"""Text: Python's standard library by default, or the user's files. Tokens are bytes, or the pieces of a trained BPE.

Each file is for training or for validation, depending on its name. (With few files, the end of each is for validation.)
The tokens of each split, with an end-of-document token between files, are stored as one memory-mapped array. Example i
is a window of seq_len + 1 tokens. Neighbouring windows share one token: a target of the first, an input of the next.
"""

import dataclasses
import functools
import hashlib
import json
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from data.batches import HostBatch
from data.cache import prepared
from data.dataset import Dataset, Text
from errors import ConfigError, one_of
from models.config import ModelConfig

TOKENIZERS = ("bytes", "bpe")
END = 0  # the end-of-document token: the zero byte, or the first special token of a BPE
HELD_OUT = 20  # 1 in 20 files is for validation; with few files 1 in 20 bytes of each
FORMAT = 3  # version of the cache; increase it when the format of the cached files changes


@dataclasses.dataclass(frozen=True)
class Windows:
  """Windows of `length` + 1 tokens over token ids [N]."""

  tokens: np.ndarray
  length: int

  def __len__(self) -> int:
    return (len(self.tokens) - 1) // self.length

  def read(self, ids: np.ndarray) -> HostBatch:
    places = ids[:, None] * self.length + np.arange(self.length + 1)
    return {"tokens": self.tokens[places].astype(np.int32)}


def load(config: ConfigDict, model: ModelConfig) -> Dataset:
  """Loads the text at `config.path`, tokenized with `config.tokenizer`."""
  one_of("data.tokenizer", config.tokenizer, TOKENIZERS)
  root, files = find_files(config.path)
  stamps = [(str(f.relative_to(root)), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
  key = (FORMAT, stamps, config.tokenizer, model.vocab_size if config.tokenizer == "bpe" else 256)
  folder = prepared(
    config.cache_dir, "text", key, lambda to: _write(to, root, files, config.tokenizer, model.vocab_size)
  )

  meta = json.loads((folder / "meta.json").read_text())
  if meta["largest_id"] >= model.vocab_size:
    raise ConfigError(
      f"model.vocab_size={model.vocab_size} is too small: the text holds token id {meta['largest_id']}; "
      f"use {256 if config.tokenizer == 'bytes' else meta['largest_id'] + 1}"
    )
  splits = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("train", "validation")}
  for name, tokens in splits.items():
    if len(tokens) <= model.seq_len:
      raise ConfigError(
        f"data.path={config.path!r} is shorter than one sequence: {len(tokens)} tokens for {name}, but "
        f"model.seq_len={model.seq_len} needs {model.seq_len + 1}; give more text or use a smaller model.seq_len"
      )
  encode, decode = codec(config.tokenizer, folder)
  return Dataset(
    train=Windows(splits["train"], model.seq_len),
    validation=Windows(splits["validation"], model.seq_len),
    description=(
      f"text of {config.path or 'the Python standard library'}: {meta['files']} files, "
      f"{meta['bytes'] / 1e6:.1f} MB, {len(splits['train']):,} tokens to train on and "
      f"{len(splits['validation']):,} to validate on ({config.tokenizer})"
    ),
    fingerprint=meta["fingerprint"],
    tokenizer=tokenizer_name(config.tokenizer, folder),
    text=Text(
      encode=encode,
      decode=decode,
      to_bytes=bytes if config.tokenizer == "bytes" else lambda ids: decode(list(ids)).encode(),
      bytes_per_token=meta["validation_bytes"] / len(splits["validation"]),
      byte_pairs=np.load(folder / "pairs.npy", mmap_mode="r"),
    ),
  )


def find_files(path: str) -> tuple[Path, list[Path]]:
  """Finds the text files at `path`. Returns the folder that contains all of them, and the files, sorted.

  `path` is a file, a folder, several of these separated by commas, or empty for the standard library. In a folder,
  hidden files and files that are not text (with a zero byte in the first 8 KiB) are skipped.
  """
  if not path:
    root = Path(sysconfig.get_path("stdlib"))
    # Many systems package the tests separately. Without them the corpus is the same everywhere.
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    return root, sorted(f for f in root.rglob("*.py") if not skipped & set(f.relative_to(root).parts))
  files: list[Path] = []
  for name in filter(str.strip, path.split(",")):
    place = Path(name.strip()).expanduser()
    if not place.exists():
      raise ConfigError(
        f"data.path={name.strip()!r} does not exist; use a text file, a folder, or several separated by commas"
      )
    within = sorted(place.rglob("*")) if place.is_dir() else [place]
    files += [f for f in within if f.is_file() and (f == place or _is_text(f, place))]
  files = sorted(set(files))
  if not any(f.stat().st_size for f in files):
    raise ConfigError(f"data.path={path!r} holds no text; use a file or folder with text")
  common = Path(*_common_parts([f.absolute().parent.parts for f in files]))
  return common, [f.absolute() for f in files]


def codec(tokenizer: str, folder: Path) -> tuple[Callable[[str], list[int]], Callable[[list[int]], str]]:
  """The functions from text to token ids, and back."""
  if tokenizer == "bytes":
    return lambda text: list(text.encode()), lambda ids: bytes(i for i in ids if i < 256).decode(errors="replace")
  from tokenizers import Tokenizer

  bpe = Tokenizer.from_file(str(folder / "tokenizer.json"))
  return lambda text: bpe.encode(text).ids, lambda ids: bpe.decode(ids)


def tokenizer_name(tokenizer: str, folder: Path) -> str:
  """The name of a tokenizer. Equal names mean equal tokenizers."""
  if tokenizer == "bytes":
    return "bytes"
  return f"{tokenizer} {hashlib.sha256((folder / 'tokenizer.json').read_bytes()).hexdigest()[:12]}"


def _write(folder: Path, root: Path, files: list[Path], tokenizer: str, vocab_size: int) -> None:
  """Tokenizes the files, one at a time, and writes the tokens to `folder`."""
  if tokenizer == "bpe":
    _train_bpe(folder, [text for f in files for text in _split(root, f, files)[:1] if text], vocab_size)
  encode, _ = codec(tokenizer, folder)
  dtype = np.uint8 if tokenizer == "bytes" else np.uint16 if vocab_size <= 1 << 16 else np.uint32
  digest, largest, sizes = hashlib.sha256(f"{tokenizer}{vocab_size}".encode()), 0, [0, 0]
  pairs = np.zeros((256, 256), np.int64)
  for split, name in enumerate(("train", "validation")):
    raw = folder / "tokens.raw"
    with raw.open("wb") as out:
      for file in files:
        text = _split(root, file, files)[split]
        if text:
          ids = np.frombuffer(text, np.uint8) if tokenizer == "bytes" else encode(text.decode(errors="replace"))
          ids = np.append(np.asarray(ids, dtype), np.asarray(END, dtype))
          largest = max(largest, int(ids.max()))
          sizes[split] += len(text) + 1
          if name == "train":
            pairs += pair_counts(b"\0" + text + b"\0")
          digest.update(ids.tobytes())
          out.write(ids.tobytes())
      digest.update(b"|")
    tokens = np.memmap(raw, dtype, mode="r") if raw.stat().st_size else np.zeros(0, dtype)
    np.save(folder / f"{name}.npy", tokens)
    raw.unlink()
  np.save(folder / "pairs.npy", pairs)
  meta = {
    "files": len(files), "bytes": sum(sizes), "validation_bytes": sizes[1],
    "largest_id": largest, "fingerprint": digest.hexdigest(),
  }  # fmt: skip
  (folder / "meta.json").write_text(json.dumps(meta))


def pair_counts(text: bytes) -> np.ndarray:
  """How often each pair of bytes occurs in a text, int64 [256, 256]."""
  values = np.frombuffer(text, np.uint8).astype(np.int64)
  return np.bincount(values[:-1] * 256 + values[1:], minlength=256 * 256).reshape(256, 256)


def _train_bpe(folder: Path, texts: list[bytes], vocab_size: int) -> None:
  from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

  if vocab_size < 257:
    raise ConfigError(
      f"model.vocab_size={vocab_size} is too small for a BPE; use at least 257: 256 bytes and the end-of-document token"
    )
  bpe = Tokenizer(models.BPE())
  bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  bpe.decoder = decoders.ByteLevel()
  alphabet = pre_tokenizers.ByteLevel.alphabet()
  trainer = trainers.BpeTrainer(
    vocab_size=vocab_size, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
  )
  bpe.train_from_iterator((text.decode(errors="replace") for text in texts), trainer)
  bpe.save(str(folder / "tokenizer.json"))


def _split(root: Path, file: Path, files: list[Path]) -> tuple[bytes, bytes]:
  """Splits a file into its parts for training and validation; one of them may be empty."""
  text = file.read_bytes()
  if len(files) < HELD_OUT:  # too few files to set whole ones apart
    cut = len(text) - len(text) // HELD_OUT
    cut = text.rfind(b"\n", cut - len(text) // 100, cut) + 1 or cut  # after the nearest end of a line
    while cut < len(text) and text[cut] & 0b1100_0000 == 0b1000_0000:  # not within a UTF-8 character
      cut += 1
    return text[:cut], text[cut:]
  return (b"", text) if file in _held_out(root, tuple(files)) else (text, b"")


@functools.cache
def _held_out(root: Path, files: tuple[Path, ...]) -> frozenset[Path]:
  """The files for validation, chosen by relative name, so that moving the folder does not change the choice."""
  by_hash = sorted(files, key=lambda f: hashlib.sha256(f.relative_to(root).as_posix().encode()).digest())
  return frozenset(by_hash[: len(files) // HELD_OUT])


def _is_text(file: Path, root: Path) -> bool:
  if any(part.startswith(".") for part in file.relative_to(root).parts):
    return False
  with file.open("rb") as opened:
    return b"\0" not in opened.read(8192)


def _common_parts(paths: list[tuple[str, ...]]) -> Iterator[str]:
  for parts in zip(*paths, strict=False):
    if len(set(parts)) > 1:
      return
    yield parts[0]
