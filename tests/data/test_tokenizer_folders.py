"""What a tokenizer's folder says: which tokens end a text, which are for training only, missing or added."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import config, one_sentence
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from data import text
from data.dataset import Dataset
from data.text import tokenizers
from reporting.evaluation.documents import documents

WORDS = "hello world, hello there; some words and more words. "
SPECIAL = ["<unk>", "<|endoftext|>", "</s>", "<turn>"]  # the first of END_NAMES that exists is 1


def made(folder: Path, full: bool = True, model: Any = None, **files: Any) -> Path:
  """A byte-level BPE, with a token for every byte if `full`, and files of JSON beside it."""
  found = Tokenizer(model or models.BPE())
  found.pre_tokenizer, found.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
  alphabet = pre_tokenizers.ByteLevel.alphabet() if full else []
  trainer = trainers.BpeTrainer(
    vocab_size=len(alphabet) + 60, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
  )
  found.train_from_iterator([WORDS] * 9, trainer)
  folder.mkdir()
  found.save(str(folder / "tokenizer.json"))
  for name, content in files.items():
    (folder / f"{name}.json").write_text(json.dumps(content))
  return folder / "tokenizer.json"


def load(tmp_path: Path, content: bytes, file: Path, **fields: Any) -> Dataset:
  (tmp_path / "a.txt").write_bytes(content)
  given = {"data__path": str(tmp_path / "a.txt"), "data__cache_dir": str(tmp_path / "cache"), "model__vocab_size": 0}
  return text.load(config(data__tokenizer=str(file), model__seq_len=8, **given | fields))


def test_a_text_has_the_same_tokens_each_time_whatever_the_dropout(tmp_path: Path):
  """Dropout is for training. Without it, words that were learned are one token each."""
  file = made(tmp_path / "made")
  (tmp_path / "dropping").mkdir()
  loaded = json.loads(file.read_text())
  loaded["model"]["dropout"] = 0.5
  dropping = tmp_path / "dropping" / "tokenizer.json"
  dropping.write_text(json.dumps(loaded))
  own = Tokenizer.from_file(str(dropping))
  assert len({tuple(own.encode(WORDS).ids) for _ in range(20)}) > 1
  expected = Tokenizer.from_file(str(file)).encode(WORDS).ids
  tokenizer, plain = tokenizers.from_file(dropping), tokenizers.from_file(file)
  for _ in range(20):
    assert tokenizer.encode([WORDS.encode()])[0].tolist() == expected
    assert tokenizer.text.encode(WORDS) == expected
  assert tokenizer.name.endswith(", without dropout")  # what was prepared before is not used
  assert not plain.name.endswith("dropout")


ENDS = {  # files beside the tokenizer, and the ids that end a text, END first
  "nothing": ({}, [1]),
  "a text": ({"tokenizer_config": {"eos_token": "</s>"}}, [2]),
  "a token": ({"tokenizer_config": {"eos_token": {"__type": "AddedToken", "content": "</s>"}}}, [2]),
  "none": ({"tokenizer_config": {"eos_token": None}, "config": {"eos_token_id": 2}}, [2]),
  "an old file": ({"special_tokens_map": {"eos_token": "</s>"}, "config": {"eos_token_id": 1}}, [2, 1]),
  "the tokenizer first": (
    {"tokenizer_config": {"eos_token": "<turn>"}, "generation_config": {"eos_token_id": 2}},
    [3, 2],
  ),
  "several": ({"tokenizer_config": {"eos_token": "</s>"}, "generation_config": {"eos_token_id": [3, 2]}}, [2, 3]),
  "generation before model": ({"generation_config": {"eos_token_id": 3}, "config": {"eos_token_id": 2}}, [3]),
}


@pytest.mark.parametrize("name", ENDS)
def test_end_is_the_token_that_the_folder_names(name: str, tmp_path: Path):
  files, ends = ENDS[name]
  tokenizer = tokenizers.from_file(made(tmp_path / "made", **files))
  assert tokenizer.end == ends[0]
  assert tokenizer.text.ends == set(ends)
  written = tmp_path / "written"
  written.mkdir()
  for file, content in tokenizer.text.files().items():  # a run, or an export, means the same
    (written / file).write_text(content)
  again = tokenizers.from_file(written / "tokenizer.json")
  assert (again.name, again.end) == (tokenizer.name, tokenizer.end)


def test_an_end_that_is_no_token_is_refused(tmp_path: Path):
  with one_sentence("has no token '<|im_end|>'", "tokenizer_config.json beside it", "same model"):
    tokenizers.from_file(made(tmp_path / "made", tokenizer_config={"eos_token": "<|im_end|>"}))


def padded(folder: Path) -> tuple[Path, int]:
  """A tokenizer to which [PAD] was added behind its vocabulary, and the number of ids before that."""
  file = made(folder)
  loaded = Tokenizer.from_file(str(file))
  size = loaded.get_vocab_size()
  loaded.add_special_tokens(["[PAD]"])
  loaded.save(str(file))
  return file, size


def test_an_added_token_that_no_text_holds_may_be_more_than_the_model_knows(tmp_path: Path):
  file, size = padded(tmp_path / "made")
  dataset = load(tmp_path, WORDS.encode() * 50, file, model__vocab_size=size)
  source = dataset.parts[0].train
  assert int(source.tokens.slice(0, len(source.tokens)).max()) < size
  with one_sentence(f"model.vocab_size={size - 1} is too small", f"has {size} ids"):
    load(tmp_path, WORDS.encode() * 50, file, model__vocab_size=size - 1)
  rows = "".join(json.dumps({"prompt": "some[PAD]", "completion": "words"}) + "\n" for _ in range(40))
  (tmp_path / "rows.jsonl").write_text(rows)
  fields = {"data__path": str(tmp_path / "rows.jsonl"), "data__prompt_field": "prompt", "data__packing": "documents"}
  with one_sentence(f"model.vocab_size={size} is too small", f"holds token id {size}"):
    load(tmp_path, WORDS.encode(), file, model__vocab_size=size, **fields)
  given = config(data__cache_dir=str(tmp_path / "cache"), model__vocab_size=size, model__seq_len=8, **fields)
  with one_sentence(f"holds token id {size}", f"the model knows {size}"):
    documents(str(tmp_path / "rows.jsonl"), given, tokenizers.from_file(file))


def test_bytes_that_are_not_utf8_are_reported_with_their_file(tmp_path: Path):
  """As bytes they are what they are."""
  content = "größe und wörter\n".encode("latin-1") * 500
  dataset = load(tmp_path, content, made(tmp_path / "made"))
  line = next(line for line in dataset.description.splitlines() if "not UTF-8" in line)
  assert f"note: {str(tmp_path / 'a.txt')!r} in data.path holds 1,500 bytes" in line
  assert "iconv" in line
  assert "not UTF-8" not in load(tmp_path, content, Path("bytes"), model__vocab_size=256).description
  assert "note:" not in load(tmp_path, content.decode("latin-1").encode(), tmp_path / "made").description


LOSSY = "hello Zé world\n"  # of 15 characters, `Z`, `é` and the end of the line have no token
MISSING = {  # model, and the note
  "left out": (None, f"1,500 of 7,500 characters ({1500 / 7500:.2%}) have no token"),
  "unknown": (models.BPE(unk_token="<unk>"), "2,000 of "),
}


@pytest.mark.parametrize("name", MISSING)
def test_characters_without_a_token_are_counted(name: str, tmp_path: Path):
  model, expected = MISSING[name]
  file = made(tmp_path / "made", full=False, model=model)
  assert Tokenizer.from_file(str(file)).decode(Tokenizer.from_file(str(file)).encode(LOSSY).ids) == "hello  world"
  dataset = load(tmp_path, LOSSY.encode() * 500, file)
  assert expected in dataset.description
  evaluated = documents(
    str(tmp_path / "a.txt"),
    config(data__cache_dir=str(tmp_path / "cache"), model__vocab_size=0),
    tokenizers.from_file(file),
  )
  assert any(expected in note for note in evaluated.notes)
  assert "note:" not in load(tmp_path, LOSSY.encode() * 500, made(tmp_path / "full")).description
