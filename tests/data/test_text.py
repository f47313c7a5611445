"""Text: which files are read, how they are split and tokenized, and which are refused."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import model_config, one_sentence

import data
from data import text
from data.text import pair_counts
from evaluation.bigram import baseline, bits_per_byte


def settings(tmp_path: Path, **fields) -> SimpleNamespace:
  defaults = {
    "name": "text",
    "path": str(tmp_path / "corpus"),
    "tokenizer": "bytes",
    "cache_dir": str(tmp_path / "cache"),
  }
  return SimpleNamespace(**defaults | fields)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
  """Forty files of prose-like lines, a hidden one and a binary one."""
  folder = tmp_path / "corpus"
  (folder / "sub").mkdir(parents=True)
  for i in range(40):
    lines = "".join(f"line {i} {j} of the münchen file\n" for j in range(20))
    (folder / ("sub" if i % 2 else "") / f"{i:02d}.txt").write_text(lines)
  (folder / ".hidden.txt").write_text("SECRET")
  (folder / "image.bin").write_bytes(b"\0BINARY")
  return folder


def test_each_file_is_in_one_split_as_a_whole(tmp_path: Path, corpus: Path):
  dataset = data.load(settings(tmp_path), model_config())
  train, validation = (bytes(np.asarray(s.tokens)).split(b"\0")[:-1] for s in (dataset.train, dataset.validation))
  assert len(train) + len(validation) == 40
  assert validation
  assert sorted(train + validation) == sorted(f.read_bytes() for f in corpus.rglob("*.txt") if f.name[0] != ".")


def test_the_last_target_of_a_window_is_the_first_input_of_the_next(tmp_path: Path, corpus: Path):
  windows = data.load(settings(tmp_path), model_config()).train
  first, second = windows.read(np.array([0, 1]))["tokens"]
  assert len(first) == 33
  assert first[-1] == second[0]
  np.testing.assert_array_equal(np.append(first, second[1:]), windows.tokens[:65])


def test_the_cache_is_used_until_a_file_changes(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch):
  before = data.load(settings(tmp_path), model_config()).fingerprint
  with monkeypatch.context() as patched:
    patched.setattr(text, "_write", lambda *_: pytest.fail("the cache was not used"))
    assert data.load(settings(tmp_path), model_config()).fingerprint == before
  (corpus / "00.txt").write_text("another text\n" * 9)
  assert data.load(settings(tmp_path), model_config()).fingerprint != before


def test_a_single_file_gives_its_end_to_validation(tmp_path: Path):
  file = tmp_path / "one.txt"
  file.write_text("".join(f"{i}\n" for i in range(5000)))
  dataset = data.load(settings(tmp_path, path=str(file)), model_config())
  train, validation = (bytes(np.asarray(s.tokens))[:-1] for s in (dataset.train, dataset.validation))
  assert train + validation == file.read_bytes()
  assert 0.04 < len(validation) / len(train) < 0.06


def test_a_long_last_line_does_not_swallow_the_training_text(tmp_path: Path):
  file = tmp_path / "one.txt"
  file.write_text("id\n" + "ü" * 20_000)
  dataset = data.load(settings(tmp_path, path=str(file)), model_config())
  assert 18 < len(dataset.train.tokens) / len(dataset.validation.tokens) < 20
  bytes(np.asarray(dataset.train.tokens)).decode()  # not cut inside a character


@pytest.mark.parametrize("count", [20, 25, 39])
def test_a_small_folder_holds_one_whole_file_out(tmp_path: Path, count: int):
  (tmp_path / "corpus").mkdir()
  for i in range(count):
    (tmp_path / "corpus" / f"{i}.txt").write_text(f"document {i} " * 20)
  dataset = data.load(settings(tmp_path), model_config())
  assert bytes(np.asarray(dataset.validation.tokens)).count(b"\0") == 1


def test_decoding_bytes_skips_ids_above_255(tmp_path: Path, corpus: Path):
  dataset = data.load(settings(tmp_path), model_config(vocab_size=320))
  assert dataset.text.decode([100, 300, 101]) == "de"


def test_an_empty_name_between_commas_is_not_the_current_folder(tmp_path: Path, corpus: Path):
  _, files = text.find_files(f"{corpus / '00.txt'},")
  assert len(files) == 1


def test_several_paths_are_joined(tmp_path: Path, corpus: Path):
  paths = [corpus / "00.txt", corpus / "sub"]
  _, files = text.find_files(",".join(map(str, paths)))
  assert len(files) == 21


def test_bpe_has_the_requested_size_and_decodes_what_it_encodes(tmp_path: Path, corpus: Path):
  model = model_config(vocab_size=300)
  dataset = data.load(settings(tmp_path, tokenizer="bpe"), model)
  assert dataset.train.tokens.max() < 300
  assert dataset.train.tokens.max() >= 256
  assert dataset.text.decode(dataset.text.encode("line 3 of münchen\n")) == "line 3 of münchen\n"
  byte_level = data.load(settings(tmp_path), model_config())
  assert dataset.text.bytes_per_token == pytest.approx(
    len(byte_level.validation.tokens) / len(dataset.validation.tokens), rel=1e-6
  )
  assert dataset.text.bytes_per_token > 1.2


def test_the_default_text_is_the_standard_library(tmp_path: Path):
  dataset = data.load(settings(tmp_path, path=""), model_config())
  assert b"def " in bytes(np.asarray(dataset.train.tokens[:100_000]))
  assert "standard library" in dataset.description


def test_bigram_equals_counting_by_hand():
  counts = pair_counts(b"abab")
  assert counts[ord("a"), ord("b")] == 2
  assert counts.sum() == 3
  p_ab, p_ba = (2 + 1) / (2 + 256), (1 + 1) / (1 + 256)
  expected = -(np.log2(p_ab) + np.log2(p_ba)) / 2
  assert bits_per_byte(counts, [b"aba"]) == pytest.approx(expected)


def test_bigram_is_fitted_on_the_training_split_only(tmp_path: Path, corpus: Path):
  dataset = data.load(settings(tmp_path), model_config())
  train = bytes(np.asarray(dataset.train.tokens))
  windows = [bytes(w.astype(np.uint8)) for w in dataset.validation.read(np.arange(len(dataset.validation)))["tokens"]]
  expected = bits_per_byte(pair_counts(b"\0" + train), windows)
  tokens = dataset.validation.read(np.arange(len(dataset.validation)))["tokens"]
  assert baseline(dataset.text, tokens).bits_per_byte == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("tokenizer", ["byte", "tiktoken"])
def test_unknown_tokenizer_is_refused(tmp_path: Path, tokenizer: str):
  with one_sentence(f"data.tokenizer='{tokenizer}'", "bytes"):
    data.load(settings(tmp_path, tokenizer=tokenizer), model_config())


def test_missing_empty_and_short_texts_are_refused(tmp_path: Path):
  with one_sentence("data.path=", "does not exist"):
    data.load(settings(tmp_path, path=str(tmp_path / "nowhere.txt")), model_config())
  empty = tmp_path / "empty.txt"
  empty.touch()
  with one_sentence("data.path=", "no text"):
    data.load(settings(tmp_path, path=str(empty)), model_config())
  short = tmp_path / "short.txt"
  short.write_text("a few words")
  with one_sentence("data.path=", "shorter than one sequence", "model.seq_len=32"):
    data.load(settings(tmp_path, path=str(short)), model_config())


def test_tokens_outside_the_vocabulary_are_refused(tmp_path: Path, corpus: Path):
  with one_sentence("model.vocab_size=100", "token id", "256"):
    data.load(settings(tmp_path), model_config(vocab_size=100))
  with one_sentence("model.vocab_size=100", "257"):
    data.load(settings(tmp_path, tokenizer="bpe"), model_config(vocab_size=100))


def test_a_cache_that_cannot_be_written_is_refused(tmp_path: Path, corpus: Path):
  (tmp_path / "file").touch()
  with one_sentence("data.cache_dir=", "cannot be written"):
    data.load(settings(tmp_path, cache_dir=str(tmp_path / "file" / "cache")), model_config())
