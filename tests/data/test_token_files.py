"""Token files of other programs: which paths are such files, what is read from them, and which are refused."""

import dataclasses
import itertools
import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import helpers
import numpy as np
import pytest
from helpers import one_sentence
from ml_collections import ConfigDict

from data.files import Joined, array_file
from data.text import foreign, headers, megatron, scan, sources

LENGTH = 32  # model.seq_len of the preset
IDS = np.random.default_rng(0).integers(1, 256, 4000)


def settings(tmp_path: Path, **fields: Any) -> ConfigDict:
  return helpers.config(**{"data__cache_dir": str(tmp_path / "cache")} | fields)


def find(path: str) -> scan.TokenFiles | None:
  files = sources.find_source(path).files
  return files if isinstance(files, scan.TokenFiles) else None


def load(tmp_path: Path, path: Path, end: int | None = None, vocab_size: int = 0, **fields: Any) -> foreign.Part:
  files = find(str(path))
  assert files
  return foreign.load(str(path), files, settings(tmp_path, **fields), end, vocab_size)[0]


def write_megatron(
  prefix: Path, documents: list[list[list[int]]], dtype: Any = np.uint16, code: int = 8, modes: bool = False
) -> Path:
  """Writes PREFIX.bin and PREFIX.idx as the format is described. Each document is a list of sequences."""
  sequences = [np.array(sequence, dtype) for document in documents for sequence in document]
  prefix.with_name(prefix.name + ".bin").write_bytes(b"".join(sequence.tobytes() for sequence in sequences))
  with prefix.with_name(prefix.name + ".idx").open("wb") as idx:
    idx.write(b"MMIDIDX\x00\x00")
    idx.write(struct.pack("<Q", 1))
    idx.write(struct.pack("<B", code))
    idx.write(struct.pack("<QQ", len(sequences), len(documents) + 1))
    for sequence in sequences:
      idx.write(struct.pack("<i", len(sequence)))
    for before in itertools.accumulate((sequence.nbytes for sequence in sequences[:-1]), initial=0):
      idx.write(struct.pack("<q", before))
    for before in itertools.accumulate((len(document) for document in documents), initial=0):
      idx.write(struct.pack("<q", before))
    if modes:
      idx.write(bytes(len(sequences)))
  return prefix


def megatron_documents(count: int = 200, seed: int = 0) -> list[list[list[int]]]:
  """Documents of one to three sequences, some of them empty."""
  random = np.random.default_rng(seed)
  sizes = [random.integers(0, 30, random.integers(1, 4)) for _ in range(count)]
  return [[random.integers(1, 256, size).tolist() for size in document] for document in sizes]


def joined(documents: list[list[list[int]]]) -> list[int]:
  return [token for document in documents for sequence in document for token in sequence]


def tokens_of(source: Any) -> list[int]:
  """The tokens of windows in a row."""
  found = source.read(np.arange(len(source)))["tokens"]
  return [*found[:, :-1].ravel().tolist(), int(found[-1, -1])]


def documents_of(source: Any) -> list[tuple[int, ...]]:
  """The documents that packed sequences hold whole, sorted."""
  batch = source.read(np.arange(len(source)))
  found = []
  for tokens, segments in zip(batch["tokens"], batch["segments"], strict=True):
    found += [tuple(tokens[segments == segment].tolist()) for segment in range(1, segments.max() + 1)]
  return sorted(found)


def test_a_folder_as_nanogpt_prepares_it_is_read_as_it_is(tmp_path: Path):
  folder = tmp_path / "shakespeare_char"
  folder.mkdir()
  IDS[:3000].astype(np.uint16).tofile(folder / "train.bin")
  IDS[3000:].astype(np.uint16).tofile(folder / "val.bin")
  (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 256}))
  for name in ("prepare.py", "readme.md", "input.txt"):
    (folder / name).write_text("beside the tokens")
  part = load(tmp_path, folder)
  assert tokens_of(part.train) == IDS[: 2999 // LENGTH * LENGTH + 1].tolist()
  assert tokens_of(part.validation) == IDS[3000 : 3000 + 999 // LENGTH * LENGTH + 1].tolist()
  assert not [f for f in (tmp_path / "cache").rglob("*") if f.is_file() and f.stat().st_size > 2000]  # no copy


def test_the_last_twentieth_of_a_single_file_is_for_validation(tmp_path: Path):
  IDS.astype(np.uint16).tofile(tmp_path / "all.bin")
  part = load(tmp_path, tmp_path / "all.bin")
  assert tokens_of(part.train) == IDS[: 3799 // LENGTH * LENGTH + 1].tolist()
  assert tokens_of(part.validation) == IDS[3800 : 3800 + 199 // LENGTH * LENGTH + 1].tolist()


def test_other_token_files_can_be_for_validation(tmp_path: Path):
  IDS.astype(np.uint16).tofile(tmp_path / "all.bin")
  other = write_megatron(tmp_path / "other", [[IDS[::-1].tolist()]], np.int32, 4)
  train, validation = find(str(tmp_path / "all.bin")), find(str(other))
  assert train
  assert validation
  both = dataclasses.replace(train, validation=validation.train)
  part, _ = foreign.load("both", both, settings(tmp_path))
  assert tokens_of(part.train) == IDS.tolist()[: 3999 // LENGTH * LENGTH + 1]
  assert tokens_of(part.validation) == IDS[::-1].tolist()[: 3999 // LENGTH * LENGTH + 1]
  with one_sentence("data.packing='documents'", "data.tokenizer"):  # the ends are known of the second only
    foreign.load("both", both, settings(tmp_path, data__packing="documents"))


@pytest.mark.parametrize(
  ("dtype", "code"),
  [(np.uint8, 1), (np.int16, 3), (np.int32, 4), (np.int64, 5), (np.uint16, 8)],
)
def test_megatrons_files_are_split_at_the_end_of_a_document(tmp_path: Path, dtype: Any, code: int):
  documents = megatron_documents()
  prefix = write_megatron(tmp_path / "corpus_text_document", documents, dtype, code)
  sizes = [len(joined([document])) for document in documents]
  total = sum(sizes)
  borders = np.cumsum(sizes)
  border = int(borders[np.abs(borders - (total - total // 20)).argmin()])
  expected = joined(documents)
  part = load(tmp_path, prefix)
  assert tokens_of(part.train) == expected[: (border - 1) // LENGTH * LENGTH + 1]
  validation = tokens_of(part.validation)
  assert validation == expected[border : border + len(validation)]
  assert 0 <= len(expected) - border - len(validation) < LENGTH


@pytest.mark.parametrize("block", [1, 3, 7, 64, 1 << 18])
def test_megatrons_documents_are_packed_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int):
  monkeypatch.setattr(megatron, "BLOCK", block)
  monkeypatch.setattr(scan, "BLOCK", block * 16)
  documents = megatron_documents()
  prefix = write_megatron(tmp_path / "corpus", documents)
  part = load(tmp_path, prefix, data__packing="documents", model__seq_len=99)
  whole = sorted(tuple(joined([document])) for document in documents)
  assert sorted(documents_of(part.train) + documents_of(part.validation)) == [d for d in whole if len(d) > 1]
  assert 0.03 < sum(map(len, documents_of(part.validation))) / sum(map(len, whole)) < 0.07


@pytest.mark.parametrize("block", [16, 1 << 20])
def test_nanogpts_documents_end_with_the_tokenizers_end_token(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
):
  monkeypatch.setattr(scan, "BLOCK", block)
  documents = [[*joined([document]), 0] for document in megatron_documents()]
  (tmp_path / "folder").mkdir()
  np.concatenate(documents[:150]).astype(np.uint16).tofile(tmp_path / "folder" / "train.bin")
  np.concatenate(documents[150:])[:-1].astype(np.uint16).tofile(
    tmp_path / "folder" / "val.bin"
  )  # the last one is cut off
  part = load(tmp_path, tmp_path / "folder", end=0, data__packing="documents", model__seq_len=99)
  assert documents_of(part.train) == sorted(tuple(d) for d in documents[:150] if len(d) > 1)
  cut = [*documents[150:-1], documents[-1][:-1]]
  assert documents_of(part.validation) == sorted(tuple(d) for d in cut if len(d) > 1)


def test_the_splits_of_one_document_part_within_it(tmp_path: Path):
  prefix = write_megatron(tmp_path / "corpus", [[IDS.tolist()]])
  part = load(tmp_path, prefix)
  assert tokens_of(part.validation)[0] == IDS[3800]


def test_every_form_of_a_path_finds_the_files(tmp_path: Path):
  prefix = write_megatron(tmp_path / "v1.2_text_document", megatron_documents(3))
  both = scan.TokenFile(tmp_path / "v1.2_text_document.bin", tmp_path / "v1.2_text_document.idx", "megatron")
  for name in (prefix, both.bin, both.index):
    assert find(f" {name} ") == scan.TokenFiles((both,))
  IDS.astype(np.uint16).tofile(tmp_path / "plain.bin")
  assert find(str(tmp_path / "plain.bin")) == scan.TokenFiles((scan.TokenFile(tmp_path / "plain.bin"),))


def test_text_is_not_taken_for_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  folder = tmp_path / "project"
  folder.mkdir()
  for name in ("train.bin", "notes.txt"):
    (folder / name).write_text("text")
  for path in ("", str(folder), str(folder / "notes.txt")):
    assert find(path) is None
  with one_sentence("data.path=", "missing.bin", "does not exist"):
    find(str(folder / "missing.bin"))
  for name in ("train.bin", "val.bin"):
    IDS.astype(np.uint16).tofile(folder / name)
  assert find(str(folder))  # other files such as a README or a tokenizer.json do not matter
  monkeypatch.chdir(folder)
  assert find("") is None  # the standard library, wherever the program runs


def test_a_fingerprint_stands_for_the_examples(tmp_path: Path):
  documents = megatron_documents()

  def fingerprint(name: str, written: list[list[list[int]]], **fields: Any) -> str:
    (tmp_path / name).mkdir(exist_ok=True)
    return load(tmp_path, write_megatron(tmp_path / name / "corpus", written), **fields).fingerprint

  one = fingerprint("one", documents)
  assert fingerprint("two", documents) == one  # wherever the files are
  assert fingerprint("one", documents, model__seq_len=64) == one
  packed = fingerprint("one", documents, data__packing="documents")
  merged = [documents[0] + documents[1], *documents[2:]]
  assert joined(merged) == joined(documents)
  changed = [[[*documents[0][0][:-1], documents[0][0][-1] ^ 1], *documents[0][1:]], *documents[1:]]
  others = [packed, fingerprint("three", merged, data__packing="documents"), fingerprint("four", changed)]
  assert len({one, *others}) == 4


def test_the_pass_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  prefix = write_megatron(tmp_path / "corpus", megatron_documents())
  before = load(tmp_path, prefix)
  files = find(str(prefix))
  assert files
  with monkeypatch.context() as patched:
    patched.setattr(scan, "_write", lambda *_: pytest.fail("the pass was made again"))
    assert load(tmp_path, prefix).fingerprint == before.fingerprint
    _, line = foreign.load("corpus", files, settings(tmp_path))
  tokens = joined(megatron_documents())
  train, validation = before.train.tokens.count, before.validation.tokens.count
  assert train + validation == len(tokens)
  assert (
    line == f"tokens of corpus: {train:,} tokens to train on and {validation:,} to validate on (Megatron-LM, uint16)"
  )
  write_megatron(prefix, megatron_documents(seed=1))
  assert load(tmp_path, prefix).fingerprint != before.fingerprint


def refused(tmp_path: Path, path: Path, *parts: str, **arguments: Any) -> None:
  with one_sentence(*parts):
    load(tmp_path, path, **arguments)


def test_tokens_that_do_not_fit_the_config_are_refused(tmp_path: Path):
  path = tmp_path / "all.bin"
  np.append(IDS, 300).astype(np.uint16).tofile(path)
  refused(tmp_path, path, "model.vocab_size=256", "token id 300", "use 301")
  refused(tmp_path, path, "model.vocab_size=0", "not known", "use 301", model__vocab_size=0)
  refused(tmp_path, path, "model.vocab_size=0", "only 300 ids", "use 301", model__vocab_size=0, vocab_size=300)
  assert load(tmp_path, path, model__vocab_size=0, vocab_size=301)
  assert load(tmp_path, path, model__vocab_size=301, vocab_size=300)
  fields = {"model__vocab_size": 301}
  refused(tmp_path, path, "data.packing='documents'", "data.tokenizer", data__packing="documents", **fields)
  refused(tmp_path, path, "model.objective='class'", "labels", model__objective="class", **fields)
  refused(tmp_path, path, "200 tokens for validation", "needs 251", "smaller", model__seq_len=250, **fields)


def test_documents_of_one_token_are_refused(tmp_path: Path):
  prefix = write_megatron(tmp_path / "corpus", [[[1]]] * 100)
  refused(tmp_path, prefix, "no document of 2 tokens or more for train", data__packing="documents")


def test_damaged_files_are_refused(tmp_path: Path):
  odd = tmp_path / "odd.bin"
  odd.write_bytes(IDS.astype(np.uint16).tobytes()[:-1])
  refused(tmp_path, odd, "data.path=", "odd.bin", "odd number of bytes, 7999", "copy it again")
  for dtype in (np.uint32, np.int64):
    for ids in (IDS, IDS + 1000, IDS * 400):  # up to 102,400
      (tmp_path / "wide.bin").write_bytes(ids.astype(dtype).tobytes())
      refused(tmp_path, tmp_path / "wide.bin", "wide.bin", "4 bytes or more", "write uint16")
  negative = write_megatron(tmp_path / "negative", [[[-1, *IDS]]], np.int16, 3)
  refused(tmp_path, negative, "negative.bin", "token id -1", "write it again")
  modes = write_megatron(tmp_path / "modes", megatron_documents(), modes=True)
  refused(tmp_path, modes, "modes.idx", "multimodal", "text alone")
  floats = write_megatron(tmp_path / "floats", megatron_documents(), np.float32, 7)
  refused(tmp_path, floats, "floats.idx", "ids of type 7", "integer type")


@pytest.mark.parametrize(
  ("at", "value", "reason"),
  [
    (0, b"TNTIDX", "begins with MMIDIDX"),
    (9, struct.pack("<Q", 2), "version 2"),
    (17, b"\x09", "ids of type 9"),
    (17, b"\x04", "sequences do not follow one another"),  # int32 where the ids are uint16
    (18, struct.pack("<Q", 1 << 62), "bytes where 4611686018427387904 sequences need"),
    (26, struct.pack("<Q", 3), "bytes where 5 sequences need"),
    (34 + 4, struct.pack("<i", -3), "sequences do not follow one another"),
    (34 + 16, struct.pack("<i", 1), "counts 81 tokens where the .bin holds 100"),
    (34 + 20 + 8, struct.pack("<q", 2), "sequences do not follow one another"),
    (34 + 60, struct.pack("<q", 1), "first document"),
    (34 + 60 + 8, struct.pack("<q", 4), "not in order"),
    (34 + 60 + 24, struct.pack("<q", 4), "do not hold all"),
    (34 + 60 + 24, struct.pack("<q", 6), "do not hold all"),
    (34 + 60 + 16, struct.pack("<qq", 5, 6), "do not hold all"),
    (34, struct.pack("<5i5q", 30, -10, 40, 20, 20, 0, 60, 40, 120, 160), "sequences do not follow one another"),
  ],
)
@pytest.mark.parametrize("block", [1, 1 << 18])
def test_an_index_that_does_not_fit_is_refused(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, value: bytes, reason: str, block: int
):
  monkeypatch.setattr(megatron, "BLOCK", block)
  row = IDS[:20].tolist()
  prefix = write_megatron(tmp_path / "corpus", [[row, row], [row], [row, row]])
  index = Path(f"{prefix}.idx")
  whole = index.read_bytes()
  index.write_bytes(whole[:at] + value + whole[at + len(value) :])
  refused(tmp_path, prefix, "data.path=", "corpus.idx", reason)


def test_a_truncated_index_or_file_is_refused(tmp_path: Path):
  prefix = write_megatron(tmp_path / "corpus", megatron_documents())
  index, tokens = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
  whole = index.read_bytes()
  for size, reason in ((20, "begins with MMIDIDX"), (len(whole) - 8, "bytes where"), (0, "begins with MMIDIDX")):
    index.write_bytes(whole[:size])
    refused(tmp_path, prefix, "corpus.idx", reason)
  index.write_bytes(whole)
  count = tokens.stat().st_size // 2
  os.truncate(tokens, 2 * count - 2)
  refused(tmp_path, prefix, f"counts {count} tokens where the .bin holds {count - 1}", "copy both files again")
  os.truncate(tokens, 2 * count - 3)
  refused(tmp_path, prefix, "not a whole number of uint16 ids")


def test_a_missing_partner_is_named(tmp_path: Path):
  prefix = write_megatron(tmp_path / "corpus_text_document", megatron_documents())
  index, tokens = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
  index.rename(tmp_path / "kept")
  for path in (prefix, tokens):
    refused(tmp_path, path, "data.path=", f"lacks {str(index)!r}", "beside the .bin")
  (tmp_path / "plain.bin").touch()
  refused(tmp_path, tmp_path / "plain", "lacks", "plain.idx", "in full")
  tokens.unlink()
  (tmp_path / "kept").rename(index)
  for path in (prefix, index, tokens):
    refused(tmp_path, path, "data.path=", f"lacks {str(tokens)!r}", "beside the .idx")


def test_token_files_that_say_so_are_read_beside_their_text(tmp_path: Path):
  folder = tmp_path / "data"
  folder.mkdir()
  prefix = write_megatron(folder / "my_text_document", megatron_documents(20))
  (folder / "corpus.json").write_text('{"text": "some words"}\n' * 999)  # as its tools read it
  (folder / "gpt2-vocab.json").write_text(json.dumps({f"token {i}": i for i in range(999)}))
  files = find(str(folder))
  assert files
  assert [file.index for file in files.all] == [prefix.with_suffix(".idx")]
  (folder / "corpus.json").rename(folder / "corpus.jsonl")  # what no description is called
  with one_sentence("1 × Megatron token ids", "JSON lines", "'rows' to read the rows, or 'tokens' to skip"):
    find(str(folder))


def test_several_token_files_need_weights(tmp_path: Path):
  for name in ("a.bin", "b.bin"):
    IDS.astype(np.uint16).tofile(tmp_path / name)
  both = f"{tmp_path / 'a.bin'}, {tmp_path / 'b.bin'}"
  refused(tmp_path, Path(both), "data.path=", "a weight", f"'{tmp_path / 'b.bin'}': 1.0")


@pytest.mark.parametrize("change", ["longer", "shorter", "rewritten", "missing"])
def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str):
  path = tmp_path / "folder" / "train.bin"
  path.parent.mkdir()
  for name in ("train.bin", "val.bin"):
    IDS.astype(np.uint16).tofile(path.parent / name)
  blocks = scan._Seen.blocks
  monkeypatch.setattr(scan, "BLOCK", 64)

  def changing(seen: scan._Seen, tokens: Any) -> Any:
    for number, block in enumerate(blocks(seen, tokens)):
      if number == 2:
        if change == "missing":
          path.unlink(missing_ok=True)
        else:
          with path.open("r+b" if change == "rewritten" else "ab") as file:
            file.write(b"\1\0") if change != "shorter" else file.truncate(100)
          os.utime(path, ns=(1, 1))
      yield block

  with monkeypatch.context() as patched:
    patched.setattr(scan._Seen, "blocks", changing)
    refused(tmp_path, path.parent, "train.bin", "shorter" if change == "shorter" else "has changed while it was read")
  IDS.astype(np.uint16).tofile(path)
  assert tokens_of(load(tmp_path, path.parent).train)[:100] == IDS[:100].tolist()


def llmc(file: Path, ids: np.ndarray, magic: int = 20240520, count: int | None = None) -> Path:
  """Writes a file as data_common.py of llm.c does: 256 int32, then the ids."""
  header = np.zeros(256, np.int32)
  header[:3] = magic, 1, len(ids) if count is None else count
  file.parent.mkdir(parents=True, exist_ok=True)
  file.write_bytes(header.tobytes() + ids.astype(np.uint16 if magic == 20240520 else np.uint32).tobytes())
  return file


WIDE = IDS + 100_000  # as Llama 3's


def test_shards_of_llmc_are_read_as_one_text(tmp_path: Path):
  folder = tmp_path / "fineweb10B"
  sizes = [700, 1, 900, 60, 1300]
  pieces = np.split(IDS[:2961], np.cumsum(sizes)[:-1])
  for number, piece in enumerate(pieces, 1):
    llmc(folder / f"fineweb_train_{number:06d}.bin", piece)
  llmc(folder / "fineweb_val_000000.bin", IDS[3000:])
  part = load(tmp_path, folder)
  assert tokens_of(part.train) == IDS[: 2960 // LENGTH * LENGTH + 1].tolist()
  assert tokens_of(part.validation) == IDS[3000 : 3000 + 999 // LENGTH * LENGTH + 1].tolist()
  # Whatever files the tokens are in, they are the same data.
  IDS[:2961].astype(np.uint16).tofile(tmp_path / "train.bin")
  IDS[3000:].astype(np.uint16).tofile(tmp_path / "val.bin")
  files = scan.TokenFiles((scan.TokenFile(tmp_path / "train.bin"),), (scan.TokenFile(tmp_path / "val.bin"),))
  assert foreign.load("one", files, settings(tmp_path))[0].fingerprint == part.fingerprint
  documents = load(tmp_path, folder, end=int(IDS[0]), data__packing="documents", model__seq_len=1999)
  expected = np.split(IDS[:2961], np.flatnonzero(IDS[:2961] == IDS[0]) + 1)
  assert documents_of(documents.train) == sorted(tuple(d.tolist()) for d in expected if len(d) > 1)


def test_the_last_twentieth_of_several_files_is_for_validation(tmp_path: Path):
  for number, piece in enumerate(np.split(IDS, [1500, 3790, 3900])):
    llmc(tmp_path / "shards" / f"{number}.bin", piece)
  part = load(tmp_path, tmp_path / "shards")
  assert tokens_of(part.train) == IDS[: 3799 // LENGTH * LENGTH + 1].tolist()
  assert tokens_of(part.validation) == IDS[3800 : 3800 + 199 // LENGTH * LENGTH + 1].tolist()


@pytest.mark.parametrize("form", ["llmc", "npy", "no header", "rows"])
def test_ids_of_large_vocabularies_are_read_whole(tmp_path: Path, form: str):
  if form == "llmc":
    path = llmc(tmp_path / "llama.bin", WIDE, 20240801)
  elif form == "no header":
    path = tmp_path / "llama.bin"
    WIDE.astype(np.uint32).tofile(path)
  else:
    path = tmp_path / "llama.npy"
    np.save(path, (WIDE.reshape(40, 100) if form == "rows" else WIDE).astype(np.uint32))
  part = load(tmp_path, path, model__vocab_size=128_256)
  assert tokens_of(part.train) == WIDE[: 3799 // LENGTH * LENGTH + 1].tolist()
  assert load(tmp_path, path, vocab_size=128_256, model__vocab_size=0).fingerprint == part.fingerprint
  # Never uint16, where the vocabulary does not fit into it.
  IDS.astype(np.uint16).tofile(tmp_path / "narrow.bin")
  refused(tmp_path, tmp_path / "narrow.bin", "model.vocab_size=128256", "token id", model__vocab_size=128_256)
  np.save(tmp_path / "narrow.npy", WIDE.astype(np.uint16))  # whoever wrote it has cut the ids off
  refused(tmp_path, tmp_path / "narrow.npy", "type uint16", "128256 tokens", "uint32", model__vocab_size=128_256)


def test_ids_without_a_header_may_be_named_as_those_of_numpy(tmp_path: Path):
  IDS.astype(np.uint16).tofile(tmp_path / "part-0.npy")  # as OLMo's tokenizer writes them
  assert tokens_of(load(tmp_path, tmp_path / "part-0.npy").train) == IDS[: 3799 // LENGTH * LENGTH + 1].tolist()


@pytest.mark.parametrize(
  "header",
  [
    struct.pack("<256i", 20250101, 1, 4000, *[0] * 253),  # another magic number
    struct.pack("<4sIQ", b"TOKS", 2, 4000),
    struct.pack("<QQ", 7, 4000),
    struct.pack("<III", 0xBEEF, 3, 4000),
    struct.pack("<64i", 77, *[0] * 63),
    struct.pack("<HH", 60_000, 1),  # only its ids are too large
  ],
  ids=["256 int32", "name, version, count", "uint64", "three uint32", "zeros", "a number"],
)
def test_other_headers_are_refused(tmp_path: Path, header: bytes):
  (tmp_path / "other.bin").write_bytes(header + (IDS + 1000).astype(np.uint16).tobytes())
  refused(
    tmp_path, tmp_path / "other.bin", "data.path=", "begins with a header", "numpy.save", model__vocab_size=50_000
  )


def test_ids_are_not_taken_for_a_header(tmp_path: Path):
  random = np.random.default_rng(0)
  for number in range(200):
    ids = random.integers(0, 50_257, 3000 + number)
    ids[: number % 40] = 0  # padding at the beginning
    ids.astype(np.uint16).tofile(tmp_path / f"{number}.bin")
    headers.refuse([array_file(tmp_path / f"{number}.bin", "<u2")])
  sparse = np.where(random.random(70_000) < 0.9, 0, random.integers(0, 300, 70_000))  # documents with much padding
  sparse.astype(np.uint16).tofile(tmp_path / "sparse.bin")
  headers.refuse([array_file(tmp_path / "sparse.bin", "<u2")])


def test_signs_of_a_header_in_few_of_many_files_are_chance(tmp_path: Path):
  padded = np.concatenate([[5] * 9, np.zeros(300, int), np.random.default_rng(1).integers(1, 256, 9000)])
  files = {"a.bin": padded, "b.bin": padded[309:], "c.bin": padded[309:]}  # the first begins with a short document
  folder = tmp_path / "data"
  folder.mkdir()
  for name, ids in files.items():
    ids.astype("<u2").tofile(folder / name)
  part = load(tmp_path, folder)
  assert sum(map(len, (part.train.tokens, part.validation.tokens))) == sum(map(len, files.values()))
  padded.astype("<u2").tofile(folder / "b.bin")
  with one_sentence(f"{folder}/a.bin' begins with a header"):
    load(tmp_path, folder)


def test_files_that_do_not_fit_their_header_are_refused(tmp_path: Path):
  refused(tmp_path, llmc(tmp_path / "a.bin", IDS, count=4001), "a.bin", "says that 4001 ids follow", "copy it again")
  refused(tmp_path, llmc(tmp_path / "b.bin", IDS, count=3999), "b.bin", "says that 3999 ids follow")
  np.save(tmp_path / "c.npy", IDS.astype(np.uint16))
  os.truncate(tmp_path / "c.npy", 4000)
  refused(tmp_path, tmp_path / "c.npy", "c.npy", "cut off", "4000 ids")
  wide = IDS.astype(np.uint32).tobytes()
  (tmp_path / "d.bin").write_bytes(struct.pack("<256H", *range(30_000, 30_256)) + wide)
  refused(tmp_path, tmp_path / "d.bin", "d.bin", "4 bytes or more", model__vocab_size=50_000)  # whatever it begins with
  mixed = tmp_path / "mixed"
  llmc(mixed / "0.bin", IDS)
  llmc(mixed / "1.bin", WIDE, 20240801)
  refused(tmp_path, mixed, "uint16 in", "0.bin", "uint32 in", "1.bin", "one type", model__vocab_size=128_256)


def test_files_that_are_joined_read_as_one(tmp_path: Path):
  pieces = np.split(IDS.astype(np.uint16), [0, 5, 6, 6, 700, 3000])
  for number, piece in enumerate(pieces):
    piece.tofile(tmp_path / str(number))
  joined = Joined(tuple(array_file(tmp_path / str(number), "<u2") for number in range(len(pieces))))
  assert len(joined) == len(IDS)
  for length in (1, 2, 5, 33, 900, 4000):
    starts = np.array([*range(10), 690, 699, 700, 2999, 3000, 4000 - length])
    starts = starts[starts + length <= 4000]
    expected = np.stack([IDS[start : start + length] for start in starts])
    np.testing.assert_array_equal(joined.read(starts, length), expected)
  assert joined.slice(3, 3).tolist() == []
  assert joined.slice(0, 4000).tolist() == IDS.tolist()
