"""The tokens of a document: the same wherever it is cut into pieces, and none that ends it before its end."""

import json
from pathlib import Path

import numpy as np
import pytest
from helpers import config, one_sentence
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from data import text
from data.text import cutting, readers
from data.text.tokenizers import Tokenizer as Ours
from data.text.tokenizers import from_file

PATTERNS = {  # how tokenizers split a text into words
  "GPT-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
  "Llama 3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
  r"|\s+(?!\S)|\s+",
  "Qwen": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
  r"|\s+(?!\S)|\s+",
  "o200k": r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*"
  r"|\s*[\r\n]+|\s+(?!\S)|\s+",
}
BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
METASPACE = {scheme: pre_tokenizers.Metaspace(prepend_scheme=scheme) for scheme in ("first", "always", "never")}
PREPEND = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
# (normalizer, pre-tokenizer). In some of them, tokens contain spaces and ends of lines.
FORMS = {
  "Llama 2, Mistral 7B v0.1": (PREPEND, None),
  "Mistral v0.3": (None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
  "prepended to words": (normalizers.Prepend("▁"), pre_tokenizers.Split(" ", "merged_with_next")),
  **{f"metaspace, {scheme}": (None, metaspace) for scheme, metaspace in METASPACE.items()},
  "byte level": (None, pre_tokenizers.ByteLevel(add_prefix_space=True)),
  "digits, then metaspace": (normalizers.NFC(), pre_tokenizers.Sequence([pre_tokenizers.Digits(), METASPACE["first"]])),
  "always after digits": (None, pre_tokenizers.Sequence([pre_tokenizers.Digits(), METASPACE["always"]])),
  "Unigram": (None, METASPACE["always"]),
  "WordPiece": (normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()),
  "stripped": (normalizers.Strip(), pre_tokenizers.WhitespaceSplit()),
  **{
    name: (None, pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), BYTE_LEVEL]))
    for name, pattern in PATTERNS.items()
  },
}
CODE = Path(readers.__file__).read_text()[-4000:]
DOCUMENTS = [
  " ".join(f"word{i % 7} and line {i}.\n" * (1 + i % 3) for i in range(40)) + "a_line_without_spaces\n" * 40,
  CODE, CODE.replace("\n", "\r\n"), CODE.replace(" ", "\t").replace("\t\t", "\n "),
  "it's,they're(we've)+" * 200,
  '{\n    "key":"it\'s",\n    "k2":123456,\n    "ü":[0.1234,0.5678]\n},\n' * 40,
  "\u3000\u3000他说，这是一本书。\n第二天下雨了\n\u3000没有人来，也没有信\n" * 40,
  "digits " + "0123456789" * 200 + " nothin" + "g" * 1500 + " " * 1500 + "的" * 500 + "\n" * 500 + "and more",
  "abc\n" * 500,
  " <extra> two <extra> words<extra>and<extra>" * 50,
]  # fmt: skip


def made(file: Path, name: str) -> Tokenizer:
  """A tokenizer of this form, a BPE or of the model that is named. `<end>` is a special token, `<extra>` another."""
  model = {"Unigram": models.Unigram, "WordPiece": models.WordPiece}.get(name, models.BPE)()
  made = Tokenizer(model)
  made.decoder = decoders.ByteLevel()
  made.normalizer, made.pre_tokenizer = FORMS[name]
  characters = sorted({*"".join(DOCUMENTS)} | {"▁"})
  alphabet = [*dict.fromkeys([*pre_tokenizers.ByteLevel.alphabet(), *characters])]
  options = {"BPE": {"max_token_length": 24}, "Unigram": {"unk_token": "<unk>"}}.get(type(model).__name__, {})
  trainer = getattr(trainers, f"{type(model).__name__}Trainer".replace("BPE", "Bpe"))(
    vocab_size=len(alphabet) + 300, initial_alphabet=alphabet, special_tokens=["<unk>"], show_progress=False, **options
  )
  made.train_from_iterator(DOCUMENTS, trainer)
  if name == "WordPiece":
    made.model.unk_token = "<unk>"
  made.add_special_tokens([AddedToken("<end>", special=True)])
  made.add_tokens(["<extra>"])
  made.save(str(file))
  return Tokenizer.from_file(str(file))  # whose scores may differ in the last digit, and so between equal choices


def prepared(folder: Path, file: Path, tokenizer: str, **fields) -> list[list[int]]:
  """The token ids of each training document, without the END token."""
  fields = {"data__path": str(file), "data__tokenizer": tokenizer, "data__cache_dir": str(folder), **fields}
  part = text.load(config("single", **{"model__vocab_size": 0, "model__seq_len": 8} | fields)).parts[0]
  tokens = part.train.tokens.slice(0, len(part.train.tokens))
  ends = np.flatnonzero(tokens == tokens[-1])
  return [ids[:-1].tolist() for ids in np.split(tokens, ends + 1)[:-1]]


def in_pieces(tokenizer: Ours, document: str) -> tuple[list[int], int]:
  """The token ids of a document that is cut, and the number of its pieces."""
  parts = list(tokenizer.cutter.cut([document.encode()]))
  assert b"".join(part.text for part in parts) == document.encode()
  encoded = (tokenizer.encode([part.context, part.context + part.text]) for part in parts)
  return [i for context, both in encoded for i in both[len(context) :].tolist()], len(parts)


@pytest.mark.parametrize("name", FORMS)
def test_a_document_in_pieces_has_the_tokens_of_the_whole(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(cutting, "PIECE", 200)
  monkeypatch.setattr(cutting, "WIDE", 1)
  theirs = made(tmp_path / "tokenizer.json", name)
  tokenizer = from_file(tmp_path / "tokenizer.json")
  pieces = 0
  for document in DOCUMENTS:
    ids, count = in_pieces(tokenizer, document)
    assert ids == theirs.encode(document).ids
    pieces += count
  assert pieces > len("".join(DOCUMENTS).encode()) / 600


@pytest.mark.parametrize("name", ["Llama 2, Mistral 7B v0.1", "metaspace, first"])
def test_prepared_documents_have_the_tokens_of_the_whole(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  """In a file of plain text, and in rows."""
  monkeypatch.setattr(cutting, "PIECE", 200)
  monkeypatch.setattr(cutting, "WIDE", 1)
  theirs, document = made(tmp_path / "tokenizer.json", name), DOCUMENTS[0]
  (tmp_path / "a.txt").write_text(document)
  (tmp_path / "a.jsonl").write_text((json.dumps({"text": document}) + "\n") * 30)
  rows = prepared(tmp_path / "rows", tmp_path / "a.jsonl", str(tmp_path / "tokenizer.json"))
  assert rows == [theirs.encode(document).ids] * len(rows)
  (plain,) = prepared(tmp_path / "plain", tmp_path / "a.txt", str(tmp_path / "tokenizer.json"))
  train = document.encode()[: readers.held_out_from(*text.find_text(str(tmp_path / "a.txt")))].decode()
  assert plain == theirs.encode(train).ids


def test_reading_goes_on_within_a_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  """With the same context of the next piece, which may be a whole piece."""
  monkeypatch.setattr(cutting, "PIECE", 200)
  monkeypatch.setattr(cutting, "WIDE", 1)
  made(tmp_path / "tokenizer.json", "Llama 3")
  (tmp_path / "a.txt").write_text("".join(DOCUMENTS[-3:]))
  files, cutter = text.find_text(str(tmp_path / "a.txt")), from_file(tmp_path / "tokenizer.json").cutter
  pieces = list(readers.read(files, readers.Fields(), cutter=cutter))
  assert len({len(piece.context) for piece in pieces}) > 5
  for at, piece in enumerate(pieces):
    assert list(readers.read(files, readers.Fields(), piece.position, cutter)) == pieces[at + 1 :]


def test_a_text_that_cannot_be_cut_is_refused(monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(cutting, "PIECE", 200)
  monkeypatch.setattr(cutting, "WIDE", 1)
  of_length = cutting.Cutter(lambda texts: [np.array([len(text)]) for text in texts], nearby=64)
  text = b"and on " * 5000
  assert [part.text for part in of_length.cut([text[:20_000]])] == [text[:20_000]]  # in one piece
  with one_sentence("data.tokenizer cannot take in pieces", "after 'and on and on an'", "add spaces"):
    list(of_length.cut([text]))


def test_special_tokens_in_a_document_are_text(tmp_path: Path):
  """Data cannot end its documents. A prompt may hold special tokens, as that of `tools.generate`."""
  made(tmp_path / "tokenizer.json", "byte level")
  tokenizer = from_file(tmp_path / "tokenizer.json")
  documents = [b"word1<end> and", b"<end>"]
  ids = tokenizer.encode(documents)
  assert not any((found == tokenizer.end).any() for found in ids)
  assert [tokenizer.text.decode(found).strip() for found in ids] == [document.decode() for document in documents]
  assert [found.tolist() for found in tokenizer.encode_prompts(documents)] == [
    tokenizer.text.encode(document.decode()) for document in documents
  ]
  assert tokenizer.end in tokenizer.encode_prompts(documents)[0]


def test_a_zero_byte_in_a_text_of_bytes_is_refused(tmp_path: Path):
  (tmp_path / "a.jsonl").write_text(json.dumps({"text": "some words\0 and more"}) + "\n")
  with one_sentence("token 0, which ends documents, after 'some words'", "another data.tokenizer"):
    prepared(tmp_path / "cache", tmp_path / "a.jsonl", "bytes", model__vocab_size=256)
