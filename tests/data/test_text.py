"""Text: which files are read, how they are split and tokenized, and which are refused."""

import gzip
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import config, one_sentence
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from data import text
from data.dataset import Dataset
from data.text import cutting, pair_counts, prepare, tokenizers
from reporting.evaluation.bigram import bits_per_byte


def load(tmp_path: Path, **fields) -> Dataset:
  defaults = {"data__path": str(tmp_path / "corpus"), "data__cache_dir": str(tmp_path / "cache")}
  return text.load(config(**defaults | {name.replace("model_", "model__"): x for name, x in fields.items()}))


def tokens_of(dataset: Dataset, split: str = "train") -> np.ndarray:
  tokens = getattr(dataset.parts[0], split).tokens
  return tokens.slice(0, len(tokens))


def text_of(dataset: Dataset, split: str = "train") -> bytes:
  return tokens_of(dataset, split).tobytes()


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
  dataset = load(tmp_path)
  train, validation = (text_of(dataset, split).split(b"\0")[:-1] for split in ("train", "validation"))
  assert len(train) == 38
  assert len(validation) == 2
  assert sorted(train + validation) == sorted(f.read_bytes() for f in corpus.rglob("*.txt") if f.name[0] != ".")


def test_the_last_target_of_a_window_is_the_first_input_of_the_next(tmp_path: Path, corpus: Path):
  dataset = load(tmp_path)
  first, second = dataset.parts[0].train.read(np.array([0, 1]))["tokens"]
  assert len(first) == 33
  assert first[-1] == second[0]
  np.testing.assert_array_equal(np.append(first, second[1:]), tokens_of(dataset)[:65])


def test_the_cache_is_used_until_a_file_changes(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch):
  before = load(tmp_path).parts[0].fingerprint
  with monkeypatch.context() as patched:
    patched.setattr(prepare, "write", lambda *_: pytest.fail("the cache was not used"))
    assert load(tmp_path).parts[0].fingerprint == before
  (corpus / "00.txt").write_text("another text\n" * 9)
  assert load(tmp_path).parts[0].fingerprint != before


def test_a_single_file_gives_its_end_to_validation(tmp_path: Path):
  file = tmp_path / "one.txt"
  file.write_text("".join(f"{i}\n" for i in range(5000)))
  dataset = load(tmp_path, data__path=str(file))
  train, validation = (text_of(dataset, split)[:-1] for split in ("train", "validation"))
  assert train + validation == file.read_bytes()
  assert train.endswith(b"\n")
  assert 0.04 < len(validation) / len(train) < 0.06


def test_a_long_last_line_does_not_swallow_the_training_text(tmp_path: Path):
  file = tmp_path / "one.txt"
  file.write_text("id\n" + "ü" * 20_000)
  dataset = load(tmp_path, data__path=str(file))
  assert 18 < len(tokens_of(dataset)) / len(tokens_of(dataset, "validation")) < 20
  text_of(dataset).decode()  # not cut inside a character


@pytest.mark.parametrize("count", [20, 25, 39])
def test_a_small_folder_holds_one_whole_file_out(tmp_path: Path, count: int):
  (tmp_path / "corpus").mkdir()
  for i in range(count):
    (tmp_path / "corpus" / f"{i}.txt").write_text(f"document {i} " * 20)
  assert text_of(load(tmp_path), "validation").count(b"\0") == 1


def test_decoding_bytes_skips_ids_above_255(tmp_path: Path, corpus: Path):
  dataset = load(tmp_path, model_vocab_size=320)
  assert dataset.text.decode([100, 300, 101]) == "de"


def test_an_empty_name_between_commas_is_not_the_current_folder(tmp_path: Path, corpus: Path):
  files = text.find_text(f"{corpus / '00.txt'},")
  assert len(files) == 1


def test_several_paths_are_joined(tmp_path: Path, corpus: Path):
  paths = [corpus / "00.txt", corpus / "sub"]
  files = text.find_text(",".join(map(str, paths)))
  assert len(files) == 21


def test_files_are_read_folder_by_folder(tmp_path: Path):
  """As `sorted` orders paths: "a/x" comes before "a-b/x", though "-" comes before "/"."""
  names = ["a/x.txt", "a-b/x.txt", "a/y.txt.gz", "a/y.txt.b"]
  for name in names:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(gzip.compress(b"some text") if name.endswith(".gz") else b"some text")
  files = text.find_text(str(tmp_path))
  assert [Path(file.path).relative_to(file.root).as_posix() for file in files] == [
    "a/x.txt", "a/y.txt.gz", "a/y.txt.b", "a-b/x.txt",
  ]  # fmt: skip


def test_bpe_has_the_requested_size_and_decodes_what_it_encodes(tmp_path: Path, corpus: Path):
  dataset = load(tmp_path, data__tokenizer="bpe", model_vocab_size=300)
  assert 256 <= tokens_of(dataset).max() < 300
  assert dataset.text.decode(dataset.text.encode("line 3 of münchen\n")) == "line 3 of münchen\n"
  in_bytes = tokens_of(load(tmp_path), "validation")
  bytes_per_token = dataset.parts[0].bytes_per_token
  assert bytes_per_token == pytest.approx(len(in_bytes) / len(tokens_of(dataset, "validation")), rel=1e-6)
  assert bytes_per_token > 1.2


def test_a_bpe_is_the_same_for_text_in_pieces(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch):
  whole = load(tmp_path, data__tokenizer="bpe", model_vocab_size=300)
  monkeypatch.setattr(cutting, "PIECE", 64)
  pieces = load(tmp_path, data__tokenizer="bpe", model_vocab_size=300, data__cache_dir=str(tmp_path / "other"))
  assert pieces.tokenizer == whole.tokenizer
  assert pieces.parts[0].fingerprint == whole.parts[0].fingerprint


def test_pieces_do_not_depend_on_the_blocks_in_which_a_document_comes(monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(cutting, "PIECE", 100)
  document = "".join(f"{i * i} größer als 我们" if i % 9 else "我" * 99 for i in range(300)).encode()
  cut = cutting.Cutter().cut
  expected = list(cut([document]))
  assert [part.next_context is None for part in expected] == [False] * (len(expected) - 1) + [True]
  for part in expected:
    part.text.decode()  # not cut inside a character
  for size in (1, 7, 199, 204, 205, 5000):
    assert list(cut(document[i : i + size] for i in range(0, len(document), size))) == expected
  assert len(list(cut([b"\x80" * 1000]))) > 4  # not UTF-8
  monkeypatch.setattr(cutting, "PIECE", 10)
  random = np.random.default_rng(0)
  for _ in range(400):
    document = "".join(random.choice(["我", "\n", "\u3000", "a,"], 60, p=(0.6, 0.2, 0.1, 0.1))).encode()
    assert list(cut(bytes([byte]) for byte in document)) == list(cut([document]))


def test_words_of_ascii_are_those_of_any_text():
  random = np.random.default_rng(0)
  for _ in range(200):
    line = bytes(random.choice([*range(128), *b"\t\n\x0b\x1c\x1f  __AZaz09"], 200).astype(np.uint8)).decode()
    assert tokenizers.ASCII_WORDS.findall(line) == tokenizers.WORDS.findall(line)


def test_the_sample_for_a_bpe_is_bounded_and_evenly_spread():
  pieces = [b"%06d " % i + b"x" * (tokenizers.UNIT - 7) for i in range(100)]
  assert tokenizers.sample(pieces, size=101 * tokenizers.UNIT) == pieces
  assert tokenizers.sample(pieces, size=30 * tokenizers.UNIT) == pieces[::4]
  few_words = tokenizers.sample(pieces, words=10 * tokenizers.UNIT)
  assert few_words == pieces  # each has the same two words but for the number
  many_words = [bytes(np.random.default_rng(i).integers(97, 123, 1 << 12, np.uint8)) for i in range(256)]
  sampled = tokenizers.sample(many_words, words=1 << 17)
  assert sum(map(len, sampled)) == 1 << 17
  assert sampled[:16] == many_words[:16]
  assert sampled[16:] == many_words[128:144]


def hugging_face(folder: Path, end: str = "</s>") -> Path:
  """A tokenizer.json of 300 tokens, with truncation and padding on, as published ones may have them."""
  bpe = Tokenizer(models.BPE())
  bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  alphabet = pre_tokenizers.ByteLevel.alphabet()
  trainer = trainers.BpeTrainer(
    vocab_size=300, special_tokens=["<s>", end], initial_alphabet=alphabet, show_progress=False
  )
  bpe.train_from_iterator(["of the münchen file"] * 9, trainer)
  bpe.enable_truncation(4)
  bpe.enable_padding(length=10_000)
  folder.mkdir(exist_ok=True)
  bpe.save(str(folder / "tokenizer.json"))
  return folder / "tokenizer.json"


def test_a_tokenizer_json_gives_its_own_tokens(tmp_path: Path, corpus: Path):
  file = hugging_face(tmp_path / "tokenizer")
  dataset = load(tmp_path, data__tokenizer=str(file.parent), model_vocab_size=0)
  own = Tokenizer.from_file(str(file))
  own.no_truncation()
  own.no_padding()
  assert dataset.model["vocab_size"] == own.get_vocab_size()
  held_out = text_of(load(tmp_path), "validation").decode().split("\0")[:-1]
  expected = [i for document in held_out for i in [*own.encode(document).ids, own.token_to_id("</s>")]]
  assert tokens_of(dataset, "validation").tolist() == expected
  again = load(tmp_path, data__tokenizer=str(file), model_vocab_size=1000)
  assert again.parts[0].fingerprint == dataset.parts[0].fingerprint
  assert again.model == {}


def test_tokenizers_that_do_not_work_are_refused(tmp_path: Path, corpus: Path):
  with one_sentence("data.tokenizer='byte' does not exist", "'bytes'", "tokenizer.json"):
    load(tmp_path, data__tokenizer="byte")
  with one_sentence("data.tokenizer=", "00.txt' is not a tokenizer"):
    load(tmp_path, data__tokenizer=str(corpus / "00.txt"))
  file = str(hugging_face(tmp_path / "tokenizer"))
  with one_sentence("model.vocab_size=250 is too small", "tokenizer.json' has 2"):
    load(tmp_path, data__tokenizer=file, model_vocab_size=250)
  with one_sentence("has no token that ends a document", "<|endoftext|>"):
    load(tmp_path, data__tokenizer=str(hugging_face(tmp_path / "tokenizer", end="STOP")))


def test_a_source_is_prepared_once_whatever_it_is_mixed_with(tmp_path: Path, corpus: Path):
  (tmp_path / "other.txt").write_text("other text\n" * 200)
  alone = load(tmp_path, data__path=str(corpus / "sub")).parts[0]
  mixed = load(tmp_path, data__path={str(corpus / "sub"): 3, str(tmp_path / "other.txt"): 1})
  assert mixed.weights == (3, 1)
  assert [part.name for part in mixed.parts] == [str(corpus / "sub"), str(tmp_path / "other.txt")]
  assert mixed.parts[0].train == alone.train
  assert mixed.parts[0].fingerprint == alone.fingerprint
  assert len(mixed.description.splitlines()) == 2


def test_one_bpe_is_trained_on_all_sources_of_a_mixture(tmp_path: Path, corpus: Path):
  (tmp_path / "other.txt").write_text("wagon " * 1000)
  mixed = load(
    tmp_path, data__path={str(corpus): 1, str(tmp_path / "other.txt"): 1}, data__tokenizer="bpe", model_vocab_size=300
  )
  assert len(mixed.text.encode(" wagon")) == len(mixed.text.encode(" file")) == 1


def test_a_bpe_is_not_trained_on_validation_text(tmp_path: Path, corpus: Path):
  (tmp_path / "other.txt").write_text("wagon " * 1000)
  fields = {"data__validation_path": str(tmp_path / "other.txt"), "data__tokenizer": "bpe", "model_vocab_size": 300}
  dataset = load(tmp_path, **fields)
  assert len(dataset.text.encode(" file")) == 1
  assert len(dataset.text.encode(" wagon")) > 3


def test_files_to_validate_on_may_be_named(tmp_path: Path, corpus: Path):
  fields = {"data__path": str(corpus / "sub"), "data__validation_path": str(corpus / "00.txt")}
  dataset = load(tmp_path, **fields)
  assert text_of(dataset, "validation") == (corpus / "00.txt").read_bytes() + b"\0"
  assert text_of(dataset).count(b"\0") == 20
  with one_sentence("data.validation_path=", "does not exist"):
    load(tmp_path, **fields | {"data__validation_path": "nowhere.txt"})
  with one_sentence("data.validation_path=", "mixture"):
    load(tmp_path, **fields | {"data__path": {str(corpus): 1.0}})


def test_packed_documents_come_from_the_same_preparation(tmp_path: Path, corpus: Path):
  packed = load(tmp_path, data__packing="documents").parts[0]
  batch = packed.train.read(np.arange(len(packed.train)))
  assert set(batch) == {"tokens", "segments"}
  assert packed.fingerprint != load(tmp_path).parts[0].fingerprint
  with one_sentence("data.packing='document'", "did you mean 'documents'"):
    load(tmp_path, data__packing="document")


def test_the_default_text_is_the_standard_library(tmp_path: Path):
  dataset = load(tmp_path, data__path="", data__cache_dir="~/.cache/meshwright/tests")
  assert b"def " in text_of(dataset)[:100_000]
  assert "standard library" in dataset.description
  files = [Path(file.path) for file in text.find_text("")]
  assert Path(sys.modules["json"].__file__) in files
  assert not any("test" in file.parts for file in files)


def test_pairs_equal_counting_by_hand():
  counts = pair_counts(b"abab")
  assert counts[ord("a"), ord("b")] == 2
  assert counts[ord("b"), ord("a")] == 1
  assert counts.sum() == 3
  assert pair_counts(b"a").sum() == pair_counts(b"").sum() == 0
  p_ab, p_ba = (2 + 1) / (2 + 256), (1 + 1) / (1 + 256)
  expected = -(np.log2(p_ab) + np.log2(p_ba)) / 2
  assert bits_per_byte(counts, [b"aba"]) == pytest.approx(expected)


def test_pairs_are_counted_in_the_training_split_only(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(cutting, "PIECE", 64)
  dataset = load(tmp_path)
  np.testing.assert_array_equal(dataset.parts[0].byte_pairs, pair_counts(b"\0" + text_of(dataset)))


def test_missing_empty_and_short_texts_are_refused(tmp_path: Path):
  with one_sentence("data.path=", "does not exist"):
    load(tmp_path, data__path=str(tmp_path / "nowhere.txt"))
  empty = tmp_path / "empty.txt"
  empty.touch()
  with one_sentence("data.path=", "no text"):
    load(tmp_path, data__path=str(empty))
  short = tmp_path / "short.txt"
  short.write_text("a few words")
  with one_sentence("data.path=", "shorter than one sequence", "model.seq_len=32"):
    load(tmp_path, data__path=str(short))


def test_tokens_outside_the_vocabulary_are_refused(tmp_path: Path, corpus: Path):
  with one_sentence("model.vocab_size=100", "token id", "256"):
    load(tmp_path, model_vocab_size=100)
  with one_sentence("model.vocab_size=100", "257"):
    load(tmp_path, data__tokenizer="bpe", model_vocab_size=100)


def test_a_cache_that_cannot_be_written_is_refused(tmp_path: Path, corpus: Path):
  (tmp_path / "file").touch()
  with one_sentence("data.cache_dir=", "cannot be written"):
    load(tmp_path, data__cache_dir=str(tmp_path / "file" / "cache"))
