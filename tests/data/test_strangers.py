"""Data from strangers: a folder or an archive gives nothing but what is in it, and runs no code."""

import gzip
import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import config, one_sentence
from PIL import Image

from data import images, text
from data.text import rows, tokenizers
from errors import file_name, inside

NAMES = ["../secret.arrow", "/etc/passwd", "inner/a.arrow", "..", "", "a\0", None, 3]


class Bomb:
  """Runs code when it is unpickled."""

  def __reduce__(self) -> Any:
    return os.mkdir, ("exploded",)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
  """A file outside the folder `data`, which is empty."""
  (tmp_path / "data").mkdir()
  (tmp_path / "secret.txt").write_text("the secret\n" * 100)
  return tmp_path / "secret.txt"


@pytest.mark.parametrize("name", NAMES)
def test_only_plain_names_are_names_of_files_in_a_folder(name: Any):
  with one_sentence("an index names the file", repr(name), "in the same folder"):
    file_name("an index", name)
  assert file_name("an index", "a..b.arrow") == "a..b.arrow"


@pytest.mark.parametrize(
  "state", [{"_data_files": [{"filename": "../secret.txt"}]}, {"_data_files": [{}]}, {"_data_files": ["a"]}, {}, []]
)
def test_a_saved_dataset_names_files_of_its_folder(state: Any, secret: Path, tmp_path: Path):
  (tmp_path / "data/dataset_info.json").write_text("{}")
  (tmp_path / "data/state.json").write_text(json.dumps(state))
  with one_sentence("state.json of data.path="):
    text.find_text(str(tmp_path / "data"))


def test_links_do_not_lead_out_of_a_folder(secret: Path, tmp_path: Path):
  folder, inner = tmp_path / "data", tmp_path / "data/inner"
  (folder / "a.txt").write_text("some words\n")
  (folder / "b.txt").symlink_to("a.txt")
  inner.mkdir()
  (inner / "c.txt").symlink_to("../a.txt")
  assert len(text.find_text(str(folder))) == 1  # the links are the same file
  (tmp_path / "other").symlink_to("data")  # the user names a link
  assert len(text.find_text(str(tmp_path / "other"))) == 1
  (inner / "d.txt").symlink_to("../../secret.txt")
  with one_sentence("data.path=", "inner/d.txt', a link out of this folder to", "secret.txt", "copy that"):
    text.find_text(str(folder))
  (inner / "d.txt").unlink()
  (folder / "train.bin").symlink_to("../secret.txt")
  (folder / "val.bin").write_bytes(bytes(10))
  with one_sentence("data.path=", "train.bin', a link out of this folder"):
    text.find_source(str(folder))


def test_links_into_the_cache_of_hugging_face_are_followed(tmp_path: Path):
  blobs, folder = tmp_path / "datasets--a--b/blobs", tmp_path / "datasets--a--b/snapshots/0123abcd"
  for new in (blobs, folder / "data"):
    new.mkdir(parents=True)
  (blobs / "4567").write_text("some words\n")
  (folder / "data/a.txt").symlink_to("../../../blobs/4567")
  for path in (folder, folder / "data"):
    assert len(text.find_text(str(path))) == 1
  (folder / "data/b.txt").symlink_to("../../../../datasets--a--b")
  with one_sentence("a link out of this folder"):
    inside("data.path='a'", folder, folder / "data/b.txt")


@pytest.mark.parametrize("link", ["train", "train/cat", "train/cat/1.png"])
def test_links_do_not_lead_out_of_a_folder_of_images(link: str, tmp_path: Path):
  for split in ("train", "val"):
    for label in ("cat", "dog"):
      for i in range(2):
        file = tmp_path / "data" / split / label / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 4, 3), i, np.uint8)).save(file)
  data = config("fsdp", "images").data
  images.find(str(tmp_path / "data"), "data.path", data).open()
  place = tmp_path / "data" / link
  place.rename(tmp_path / "moved")
  place.symlink_to(tmp_path / "moved")
  with one_sentence("data.path=", f"data/{link}', a link out of this folder to", "moved'"):
    images.find(str(tmp_path / "data"), "data.path", data).open()


@pytest.mark.parametrize("name", ["image", "label"])
def test_arrays_are_never_unpickled(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.chdir(tmp_path)
  arrays = {"image": np.zeros((1, 4, 4), np.uint8), "label": np.zeros(1, int)} | {name: np.array([Bomb()], object)}
  np.savez(tmp_path / "a.npz", **arrays)
  with one_sentence("data.path=", "a.npz"):
    images.find(str(tmp_path / "a.npz"), "data.path", config("fsdp", "images").data).open()
  assert not (tmp_path / "exploded").exists()
  with pytest.raises(FileExistsError):  # it would have
    pickle.loads(pickle.dumps(Bomb())), pickle.loads(pickle.dumps(Bomb()))


def test_files_beside_a_tokenizer_fit_it_and_are_in_its_folder(secret: Path, tmp_path: Path):
  from tokenizers import Tokenizer, models

  Tokenizer(models.BPE({"</s>": 0}, [])).save(str(tmp_path / "data/tokenizer.json"))
  tokenizers.from_file(tmp_path / "data/tokenizer.json")
  for end in (1, -1, 1 << 40):
    (tmp_path / "data/generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    with one_sentence("data.tokenizer=", f"ids below 1, but a file beside it says that {end} ends a text"):
      tokenizers.from_file(tmp_path / "data/tokenizer.json")
  (tmp_path / "data/generation_config.json").unlink()
  (tmp_path / "data/tokenizer_config.json").symlink_to(secret)
  with one_sentence("data.tokenizer=", "tokenizer_config.json', a link out of this folder"):
    tokenizers.from_file(tmp_path / "data/tokenizer.json")


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_compressed_line_does_not_fill_the_memory(suffix: str, tmp_path: Path):
  line = b'{"text": "' + b"a" * 1000 + b'"}\n'
  file = tmp_path / f"a.jsonl{suffix}"
  file.write_bytes(gzip.compress(line) if suffix == ".gz" else pa.Codec("zstd").compress(line, asbytes=True))
  with one_sentence("line 1 of", "a.jsonl", "more than 1000 bytes", "data.limit_mb"):
    list(rows.rows(*text.find_text(str(file)), rows.Fields(limit=1000)))
  assert len(list(rows.rows(*text.find_text(str(file)), rows.Fields(limit=2000)))) == 1


def test_json_without_end_is_refused(tmp_path: Path):
  (tmp_path / "a.jsonl").write_text('{"text": ' + 100_000 * "[" + "\n")
  with one_sentence("line 1 of", "a.jsonl", "not valid JSON"):
    list(rows.rows(*text.find_text(str(tmp_path / "a.jsonl")), rows.Fields()))


@pytest.mark.parametrize("stored", ["{", "[1]", '{"info": []}', 100_000 * "["], ids=lambda stored: stored[:9])
def test_metadata_of_classes_is_checked(stored: str, tmp_path: Path):
  table = pa.table({"text": ["a"], "label": [0]}).replace_schema_metadata({"huggingface": stored})
  pq.write_table(table, tmp_path / "a.parquet")
  with one_sentence("a.parquet", "metadata of the `datasets` library"):
    rows.class_names(*text.find_text(str(tmp_path / "a.parquet")), "label")


def test_a_table_without_columns_is_refused(tmp_path: Path):
  pq.write_table(pa.table({}), tmp_path / "a.parquet")
  with one_sentence("data.text_field='text' is not in", "a.parquet', which has no fields; use another file"):
    list(rows.rows(*text.find_text(str(tmp_path / "a.parquet")), rows.Fields()))
