"""What a file is: by its content and its place. Every file is read right, or refused or skipped by its name."""

import bz2
import gzip
import io
import json
import lzma
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.orc
import pyarrow.parquet as pq
import pytest
import zstandard
from helpers import config, one_sentence

from data import text
from data.recognition import check, content, recognise, settled, survey
from data.recognition.kinds import KINDS
from data.text.files import TRAIN, VALIDATION, TextFile
from tools import prepare

ROW = '{"text": "some words"}\n'


def files_of(path: Path | str, **fields: Any) -> list[TextFile]:
  settings = config(data__path=str(path), **fields)
  (source,) = text.find_sources(settings).values()
  return list(source.files)


def write(folder: Path, files: dict[str, bytes | str]) -> Path:
  for name, value in files.items():
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(value if isinstance(value, bytes) else value.encode())
  return folder


def splits(folder: Path, **fields: Any) -> dict[str, int | None]:
  """The split of each file that is read, by its name in the folder."""
  return {Path(file.path).relative_to(folder).as_posix(): file.split for file in files_of(folder, **fields)}


def kind(tmp_path: Path, name: str, value: bytes | str) -> content.Content:
  file = write(tmp_path, {name: value}) / name
  return content.look(str(file), file.stat().st_size)


def parquet(rows: int, start: int = 0) -> bytes:
  out = io.BytesIO()
  pq.write_table(pa.table({"text": [f"row {i}" for i in range(start, start + rows)]}), out)
  return out.getvalue()


def tar() -> bytes:
  out = io.BytesIO()
  with tarfile.open(fileobj=out, mode="w") as archive:
    archive.addfile(tarfile.TarInfo("0.txt"), io.BytesIO())
  return out.getvalue()


def tfrecord(data: bytes = b"example") -> bytes:
  """A record as TensorFlow writes it: length, its checksum, data, its checksum. The first one by the package crc32c."""
  assert len(data) == 7
  return struct.pack("<Q", 7) + bytes.fromhex("bbd79f11") + data + bytes(4)


def archive(*names: str) -> bytes:
  out = io.BytesIO()
  with zipfile.ZipFile(out, "w") as opened:
    for name in names:
      opened.writestr(name, "x")
  return out.getvalue()


def npy(array: np.ndarray) -> bytes:
  out = io.BytesIO()
  np.save(out, array)
  return out.getvalue()


LINES = ROW * 3
PRETTY = json.dumps({"text": "some words"}, indent=2) + "\n"
IN_A_ROW = PRETTY * 2
ARRAY = json.dumps([{"text": "some words"}] * 3)
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
  "gzip": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zstd": zstandard.ZstdCompressor().compress,
}  # fmt: skip


CONTENTS = [
    ("a.txt", "some words\n", "plain"),
    ("a.txt", "{not JSON}\n", "plain"),
    ("a.txt", "ORCHIDS are plants\n", "plain"),  # begins as a file of ORC does
    ("a", b"\x80", "plain"),
    ("a.doc", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(99), "office"),
    ("a.py", ARRAY, "plain"),  # source code is text
    ("a.pyc", b"\xa7\r\r\n\0", "compiled"),
    ("a.so", b"\x7fELF\2", "compiled"),
    ("a.txt", LINES, "json"),  # whatever its name
    ("part-00000", LINES, "json"),
    ("a.json", LINES, "json"),
    ("a.jsonl", ROW, "json"),
    ("a.jsonl", "no JSON\n", "json"),  # reading it reports what is wrong
    ("a.json", ROW[:-3] + "x" * content.HEAD + '"}\n' + ROW, "json"),  # a first line longer than what is looked at
    ("part-00001", ROW[:-3] + "x" * content.HEAD + '"}\n' + ROW, "json"),
    ("vocab.json", json.dumps({f"token {i}": i for i in range(999)}), "json_value"),  # one line, and no others
    ("merges", json.dumps({f"token {i}": i for i in range(999)}) + "\n", "plain"),
    ("a.jsonl", json.dumps({"text": "x" * 9999}), "json"),
    ("a.json", ARRAY, "json_values"),
    ("a.json", json.dumps(json.loads(ARRAY), indent=1), "json_values"),
    ("a.txt", ARRAY, "json_values"),
    ("a.json", IN_A_ROW, "json_values"),
    ("a.json", "\ufeff" + ARRAY, "json_values"),
    ("a.json", PRETTY, "json_value"),
    ("a.json", ROW, "json_value"),
    ("a.json", "[1, 2]", "json_value"),
    ("a.csv", "text\nsome words\n", "csv"),
    ("a.tsv", "text\nsome words\n", "tsv"),
    ("a.parquet", parquet(1), "parquet"),
    ("download", parquet(1), "parquet"),
    ("a.bin", np.arange(300, 900, dtype="<u2").tobytes(), "ids"),
    ("a.bin", "readable text, and no token ids\n", "plain"),
    ("a.bin", struct.pack("<256i", 20240520, 1, 0, *([0] * 253)), "llmc"),
    ("a.bin", struct.pack("<256i", 20240801, 1, 0, *([0] * 253)), "llmc"),
    ("a.npy", np.arange(300, 900, dtype="<u2").tobytes(), "ids"),
    ("a.npy", npy(np.arange(9, dtype="<u2")), "npy"),
    ("a.npy", npy(np.zeros((3, 4), "<i4")), "npy"),
    ("a.npy", npy(np.zeros((3, 4), "<f4")), "numbers"),
    ("a.npy", npy(np.asfortranarray(np.zeros((3, 4), "<i4"))), "numbers"),
    ("a.npy", npy(np.arange(9, dtype=">u2")), "numbers"),
    ("a.tar", tar(), "tar"),
    ("00000.tar", tar(), "tar"),
    ("a.tfrecord", tfrecord(), "tfrecord"),
    ("a", tfrecord(), "tfrecord"),
    ("a.h5", b"\x89HDF\r\n\x1a\n" + bytes(99), "hdf5"),
    ("a.bin", b"LITPKDS" + bytes(99), "packed"),
    ("a.safetensors", struct.pack("<Q", 2) + b"{}", "safetensors"),
    ("a", struct.pack("<Q", 2) + b"{}", "safetensors"),
    ("a.gguf", b"GGUF" + bytes(99), "gguf"),
    ("a.pt", archive("archive/data.pkl"), "pytorch"),
    ("pytorch_model.bin", archive("pytorch_model/data.pkl"), "pytorch"),
    ("old.bin", pickle.dumps({"a": 1}, 2), "pickle"),
    ("a.pkl", pickle.dumps({"a": 1}), "pickle"),
    ("a.zip", archive("a.txt"), "zip"),
    ("a.npz", archive("image.npy"), "npz"),
    ("a.docx", archive("[Content_Types].xml"), "office"),
    ("a.pdf", b"%PDF-1.7\n", "pdf"),
    ("a.sqlite", b"SQLite format 3\0" + bytes(99), "sqlite"),
    ("a.warc", b"WARC/1.0\r\n", "warc"),
    ("a.xml", b"<mediawiki xmlns=...>\n", "mediawiki"),
    ("a.txt", "some words\n".encode("utf-16"), "utf16"),
    ("a.png", b"\x89PNG\r\n\x1a\n", "image"),
    ("a.lz4", b"\4\x22\x4d\x18" + bytes(9), "lz4"),
    ("a.parquet", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "lfs"),
    ("a.parquet", "<html>Not found</html>", "not_as_named"),
    ("a.txt.gz", "some words\n", "not_compressed"),
    ("a.dat", b"\0\1\2", "binary"),
    ("a.txt", "", "empty"),
]  # fmt: skip


@pytest.mark.parametrize(
  ("name", "value", "expected"), CONTENTS, ids=[f"{i} {c[0]} {c[2]}" for i, c in enumerate(CONTENTS)]
)
def test_content_says_what_a_file_is(tmp_path: Path, name: str, value: bytes | str, expected: str):
  assert kind(tmp_path, name, value) == (expected, "")


@pytest.mark.parametrize("compression", COMPRESS)
def test_content_is_looked_at_behind_a_compression(tmp_path: Path, compression: str):
  pack = COMPRESS[compression]
  for value, expected in ((LINES, "json"), (ARRAY, "json_values"), ("some words\n", "plain")):
    assert kind(tmp_path, "c4-train.00000-of-00001.json", pack(value.encode())) == (
      "json_value" if expected == "plain" else expected,
      compression,
    )
    assert kind(tmp_path, "a", pack(value.encode())) == (expected, compression)
  random = np.random.default_rng(0).integers(32, 127, 1 << 17).astype(np.uint8).tobytes()  # nothing to compress
  assert kind(tmp_path, "a.jsonl", pack(b'{"text": "' + random.replace(b'"', b"").replace(b"\\", b"") + b'"}\n')) == (
    "json",
    compression,
  )
  assert kind(tmp_path, "a.tar", pack(tar())) == ("tar", compression)
  assert kind(tmp_path, "a.bin", pack(np.arange(300, 900, dtype="<u2").tobytes())) == ("binary", compression)
  damaged = pack(LINES.encode())[:12]
  assert kind(tmp_path, "a.jsonl", damaged) == ("json", compression)  # reading it reports what is wrong


@pytest.mark.parametrize("writer", ["feather", "orc"])
def test_other_tables_are_known(tmp_path: Path, writer: str):
  table, file = pa.table({"text": ["a"]}), tmp_path / "table"
  if writer == "orc":
    pyarrow.orc.write_table(table, str(file))
  else:
    pyarrow.feather.write_feather(table, str(file), version=1)
  assert content.look(str(file), file.stat().st_size) == (writer, "")
  pyarrow.feather.write_feather(table, str(file))  # version 2 is Arrow
  assert content.look(str(file), file.stat().st_size) == ("arrow", "")


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if not kind.form and kind.fix])
def test_every_kind_that_is_not_read_says_what_to_do(name: str):
  assert KINDS[name].words
  assert KINDS[name].fix[-1] not in ".;"


REFUSED = [
  ("00000.tar", tar(), "tar archive, such as WebDataset"),
  ("train.tfrecord", tfrecord(), "TFRecord"),
  ("data.h5", b"\x89HDF\r\n\x1a\n" + bytes(99), "HDF5"),
  ("train.bin", b"LITPKDS" + bytes(99), "PackedDataset of Lit-GPT"),
  ("CC-MAIN.warc.gz", gzip.compress(b"WARC/1.0\r\n"), "WARC"),
  ("enwiki.xml.bz2", bz2.compress(b"<mediawiki>"), "MediaWiki dump"),
  ("model.safetensors", struct.pack("<Q", 2) + b"{}", "safetensors"),
  ("squad.json", json.dumps({"data": [1]}), "a single JSON value"),
]


@pytest.mark.parametrize(("name", "value", "says"), REFUSED, ids=[case[0] for case in REFUSED])
def test_what_is_not_read_is_refused_by_its_name(tmp_path: Path, name: str, value: bytes | str, says: str):
  write(tmp_path / "folder", {name: value})
  fix = KINDS[next(k for k in KINDS if KINDS[k].words.startswith(says))].fix
  with one_sentence(f"data.path='{tmp_path}/folder/{name}' cannot be read as text ({says}", fix):
    files_of(tmp_path / "folder" / name)
  with one_sentence("data.path=", "holds no text, but 1 × " + says, fix):
    files_of(tmp_path / "folder")


def test_files_of_litdata_are_refused_by_name(tmp_path: Path):
  index = {"chunks": [{"filename": "chunk-0-0.bin"}], "config": {"data_format": ["int"]}}
  write(tmp_path, {"index.json": json.dumps(index), "chunk-0-0.bin": bytes(range(256))})
  with one_sentence("holds no text, but 1 × litdata chunk", "numpy.save"):
    files_of(tmp_path)


def test_a_hub_snapshot_is_read_by_its_splits(tmp_path: Path):
  snapshot = {
    "README.md": "---\nlicense: mit\n---\n# Numbers\n" + "The train split has 300 rows.\n" * 40,
    "dataset_infos.json": "{}",
    "data/train-00000-of-00002.parquet": parquet(150),
    "data/train-00001-of-00002.parquet": parquet(150, 150),
    "data/validation-00000-of-00001.parquet": parquet(50, 300),
    "data/test-00000-of-00001.parquet": parquet(50, 350),
  }
  write(tmp_path / "hub", snapshot)
  dataset = text.load(config(data__path=str(tmp_path / "hub"), data__cache_dir=str(tmp_path / "cache")))
  (part,) = dataset.parts
  found = {}
  for split in ("train", "validation"):
    tokens = getattr(part, split).tokens
    found[split] = tokens.slice(0, len(tokens)).tobytes().split(b"\0")[:-1]
  assert found["train"] == [b"row %d" % i for i in range(300)]
  assert found["validation"] == [b"row %d" % i for i in range(300, 350)]
  assert "2 × Parquet to train on, 1 × Parquet to validate on; skipped 3: " in dataset.description
  assert "data/test-00000-of-00001.parquet (split 'test', while 'validation' is validated on)" in dataset.description


T, V, N = TRAIN, VALIDATION, None


@pytest.mark.parametrize(
  "expected",
  [
    {"train.jsonl": T, "validation.jsonl": V, "test.jsonl": "split"},
    {"train.jsonl": T, "test.jsonl": V},
    {"train.jsonl": N, "more.jsonl": N},
    {"train.jsonl": T, "more.jsonl": T, "dev.jsonl": V},
    {"a-valid-0.jsonl": V, "a-train-0.jsonl": T, "a-test-0.jsonl": "split"},
    {"c4-train.00000-of-00002.json.gz": T, "c4-validation.00000-of-00001.json.gz": V},
    {"fineweb_train_000001.jsonl": T, "fineweb_val_000000.jsonl": V},
    {"train/0.jsonl": T, "train/1.jsonl": T, "val/0.jsonl": V, "test/0.jsonl": "split"},
    {"data/test/0.jsonl": V, "data/other/0.jsonl": T},
    {"test/train-0.jsonl": V, "other/train-1.jsonl": T},  # the folder decides
    {"a photo of a train.jsonl": N, "a photo of test tubes.jsonl": N, "www_farodevigo_es.jsonl": N},
    {"Train.jsonl": T, "TEST.jsonl": V},
    {"train_sft.jsonl": T, "test_sft.jsonl": V},
    {"pretrain.jsonl": N, "validated.jsonl": N, "latest.jsonl": N, "devices.jsonl": N},  # other words
    {"training-0.jsonl": T, "evaluation-0.jsonl": V},
    {"training/0.jsonl": T, "heldout-0.jsonl": V, "holdout.jsonl": V, "development.jsonl": V},
    {"train.txt": T, "valid.txt": V, "test.txt": "split"},
    {"README.md": "about", "LICENSE": "about", "a-train.txt": T, "a-valid.txt": V, "more.txt": T},
    {"wiki.train.tokens": T, "wiki.valid.tokens": V, "wiki.test.tokens": "split"},
    {"src/train.py": N, "src/test.py": N, "tests/test_train.py": N, "README.md": N},  # source code
    {"guide/test.md": N, "guide/dev.md": N, "guide/other.md": N},  # no text is named train
  ],
  ids=lambda expected: " ".join(expected)[:60],
)
def test_names_of_files_and_folders_say_their_splits(tmp_path: Path, expected: dict[str, Any]):
  row = gzip.compress(LINES.encode())
  values = {name: row if name.endswith(".gz") else LINES if ".json" in name else "some words\n" for name in expected}
  write(tmp_path, values)
  assert splits(tmp_path) == {name: split for name, split in expected.items() if split not in ("split", "about")}


def test_a_file_that_a_user_names_is_read_whatever_its_name(tmp_path: Path):
  write(tmp_path, {"test.jsonl": LINES, "more/valid.jsonl": LINES})
  assert splits(tmp_path / "test.jsonl") == {".": None}


def test_a_folder_with_nothing_to_train_on_is_refused(tmp_path: Path):
  write(tmp_path, {"test-0.jsonl": LINES, "test-1.jsonl": LINES})
  with one_sentence("data.path=", "nothing to train on", "'test'", "test-0.jsonl", "name a file"):
    files_of(tmp_path)


def test_the_readme_of_a_hub_says_the_splits(tmp_path: Path):
  readme = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: "data/part-*"
  - split: validation
    path: ["held/a.jsonl", "deep/**/b.jsonl"]
  - split: unsupervised
    path: extra.jsonl
- config_name: other
  data_dir: train
  data_files: "*.jsonl"
---
# Rows
"""
  names = ["data/part-0.jsonl", "data/part-1.jsonl", "held/a.jsonl", "deep/er/b.jsonl", "extra.jsonl", "train/0.jsonl"]
  write(tmp_path, dict.fromkeys(names, LINES) | {"README.md": readme})
  assert splits(tmp_path) == {"data/part-0.jsonl": T, "data/part-1.jsonl": T, "held/a.jsonl": V, "deep/er/b.jsonl": V}
  verdicts = settled(recognise(str(tmp_path), "data.path").all, "here")
  whys = {verdict.file.relative: verdict.why for verdict in verdicts}
  assert "'unsupervised'" in whys["extra.jsonl"]
  assert whys["train/0.jsonl"] == "not in the config 'default' of README.md"
  (tmp_path / "README.md").write_text(readme.replace("config_name: default", "config_name: first"))
  with one_sentence("data.path=", "README.md with several configs, first, other", "of one"):
    files_of(tmp_path)
  (tmp_path / "README.md").write_text(readme.replace("config_name: other", "config_name: other\n  default: true"))
  (tmp_path / "README.md").write_text(
    (tmp_path / "README.md").read_text().replace("config_name: default", "config_name: first")
  )
  assert splits(tmp_path) == {"train/0.jsonl": N}
  (tmp_path / "README.md").write_text("---\nconfigs: [\n---\n")
  with one_sentence("README.md whose head is not valid YAML", "remove that file"):
    files_of(tmp_path)


def readme_of(*configs: str) -> str:
  return "---\nconfigs:\n" + "".join(f"- {{{config}}}\n" for config in configs) + "---\n# Rows\n"


@pytest.mark.parametrize(
  ("patterns", "expected"),
  [
    ("train: 'part-[0-3].*', validation: 'part-[!0-3].*'", {"part-1.jsonl": T, "part-7.jsonl": V}),
    ("train: 'part-?.jsonl', validation: '**/**/b.jsonl'", {"part-1.jsonl": T, "part-7.jsonl": T, "more/b.jsonl": V}),
    ("train: '[z-a]', test: 'part-1.jsonl', validation: 'more/*'", None),
  ],
)
def test_patterns_of_a_readme(tmp_path: Path, patterns: str, expected: dict[str, Any] | None):
  names = ["part-1.jsonl", "part-7.jsonl", "more/b.jsonl"]
  readme = readme_of(f"config_name: one, data_files: {{{patterns}}}")
  write(tmp_path, dict.fromkeys(names, LINES) | {"README.md": "\ufeff" + readme})
  if expected is None:
    with one_sentence("nothing to train on, only files of the split 'validation'"):
      files_of(tmp_path)
  else:
    assert splits(tmp_path) == expected


def test_patterns_that_would_take_for_ever_are_refused(tmp_path: Path):
  many = "/".join("y" * 30)
  write(tmp_path, {f"{many}/a.jsonl": LINES, "README.md": readme_of(f"data_files: '{'**/' * 30}x'")})
  assert splits(tmp_path) == {f"{many}/a.jsonl": N}  # as one `**/`
  (tmp_path / "README.md").write_text(readme_of(f"data_files: '{'*y' * 9}'"))
  with one_sentence("README.md with the pattern '*y*y", "more than 4 wildcards", "correct it"):
    files_of(tmp_path)


def test_a_readme_may_name_text_or_folders(tmp_path: Path):
  readme = readme_of("data_files: {train: one.txt, validation: two.txt}")
  write(tmp_path / "text", {"one.txt": "words\n", "two.txt": "words\n", "README.md": readme})
  assert splits(tmp_path / "text") == {"one.txt": T, "two.txt": V}
  names = ["de/test-0.jsonl", "de/0.jsonl", "en/0.jsonl"]
  folders = ["config_name: de, data_dir: de", "config_name: en, data_dir: en"]
  write(tmp_path / "two", dict.fromkeys(names, LINES) | {"README.md": readme_of(*folders)})
  with one_sentence("several configs, de, en"):
    files_of(tmp_path / "two")
  (tmp_path / "two/README.md").write_text(readme_of(folders[0] + ", default: true", folders[1]))
  assert splits(tmp_path / "two") == {"de/test-0.jsonl": V, "de/0.jsonl": T}
  write(tmp_path / "many", {f"{i}.jsonl": LINES for i in range(9)})
  write(tmp_path / "many", {"README.md": readme_of(*[f"config_name: c{i}, data_files: {i}.jsonl" for i in range(9)])})
  with one_sentence("several configs, c0, c1, c2 and more; name"):
    files_of(tmp_path / "many")


def test_every_folder_of_a_saved_dict_is_a_split(tmp_path: Path):
  for name in ("train", "val", "test", "unsupervised"):
    out = io.BytesIO()
    with pa.ipc.new_stream(out, pa.schema([("text", pa.string())])) as stream:
      stream.write_table(pa.table({"text": [name]}))
    state = json.dumps({"_data_files": [{"filename": "data.arrow"}]})
    files = {"data.arrow": out.getvalue(), "cache-0.arrow": out.getvalue(), "state.json": state}
    write(tmp_path / name, files | {"dataset_info.json": "{}"})
  write(tmp_path, {"dataset_dict.json": json.dumps({"splits": ["train", "val", "test", "unsupervised"]})})
  assert splits(tmp_path) == {"train/data.arrow": T, "val/data.arrow": V}


def test_what_is_beside_rows_is_no_text(tmp_path: Path):
  beside = {"README.md": "words\n" * 999, "LICENSE": "words\n" * 999, "index.json": "{}", "load.py": "words\n" * 999}
  write(tmp_path, {"a.jsonl": LINES, "b.csv": "text\nsome words\n", "notes.txt": "some words\n", **beside})
  assert splits(tmp_path) == {"a.jsonl": N, "b.csv": N}
  whys = {v.file.relative: v.why for v in settled(recognise(str(tmp_path), "data.path").all, "here") if v.why}
  assert whys == dict.fromkeys(["README.md", "LICENSE", "load.py", "notes.txt"], "plain text, beside rows") | {
    "index.json": "metadata"
  }
  assert splits(tmp_path, data__form="text").keys() == {"a.jsonl", "b.csv", "notes.txt", *beside}
  assert {file.kind for file in files_of(tmp_path, data__form="text")} == {"plain"}


def test_more_skipped_than_read_is_refused(tmp_path: Path):
  write(tmp_path, {"rows.csv": "text\nsome words\n", "a.txt": "some words\n" * 20_000, "b.dat": bytes(5)})
  with one_sentence(
    "data.path=", "holds 1 × CSV (0.0 kB)", "more of what would be skipped: 1 × plain text (0.2 MB), such as 'a.txt'",
    "name the files", "data.form to 'text' to read the text, or 'rows' to skip them",
  ):  # fmt: skip
    files_of(tmp_path)
  assert splits(tmp_path, data__form="rows") == {"rows.csv": N}
  assert splits(tmp_path, data__form="text") == {"rows.csv": N, "a.txt": N}
  (tmp_path / "b.dat").write_bytes(bytes(300_000))
  assert splits(tmp_path, data__form="text") == {"rows.csv": N, "a.txt": N}
  (tmp_path / "rows.csv").unlink()
  with one_sentence("skipped: 1 × binary (0.3 MB), such as 'b.dat'", "'text' to skip them"):
    files_of(tmp_path)
  write(tmp_path / "code", {f"{i}.py": "words\n" * 99 for i in range(30)} | {"table.csv": "text\nsome words\n"})
  with one_sentence("holds 1 × CSV", "30 × plain text", ".py'", "'text' to read the text"):
    files_of(tmp_path / "code")
  with one_sentence("data.form='texts' does not exist", "did you mean 'text'"):
    files_of(tmp_path, data__form="texts")


@pytest.mark.parametrize("name", ["b.parquet", "link"])
def test_data_that_is_not_there_is_named(tmp_path: Path, name: str):
  write(tmp_path, {"a.parquet": parquet(99)})
  if name == "link":
    (tmp_path / name).symlink_to("missing")
  else:
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
  with one_sentence("data.path=", "lacks data", name, "git lfs pull" if name != "link" else "fetch that file"):
    files_of(tmp_path)
  assert splits(tmp_path, data__form="rows") == {"a.parquet": N}


def test_a_shard_that_is_no_table_is_refused(tmp_path: Path):
  write(tmp_path, {"a.parquet": parquet(99), "b.parquet": "<html>Too many requests</html>"})
  with one_sentence("lacks data: 'b.parquet' cannot be read (something else than its name says)", "fetch or write"):
    files_of(tmp_path)


def test_a_check_shows_what_a_run_would_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
  write(tmp_path, {"a/train.jsonl": LINES, "a/test.jsonl": LINES, "b/0.jsonl": LINES})
  made = config(data__validation_path=str(tmp_path / "b"))
  prepare.check(made, [str(tmp_path / "a")])
  train, test, validation = [line for line in capsys.readouterr().out.splitlines() if line[:4] in ("read", "skip")]
  assert train.endswith("to train on                           train.jsonl")
  assert test.endswith("data.validation_path is validated on  test.jsonl")
  assert validation.endswith("to validate on  0.jsonl")
  prepare.check(config(data__path=""), [])
  assert "standard library" in capsys.readouterr().out
  for name in ("c_document.bin", "c_document.idx"):
    (tmp_path / name).touch()
  for name in ("c_document", "c_document.bin", "c_document.idx"):
    prepare.check(config(), [str(tmp_path / name)])
    assert "token ids of Megatron-LM, in" in capsys.readouterr().out
  made.data.validation_path = str(tmp_path / "c_document")  # found as a run finds it, also beside the library
  for path in (str(tmp_path / "c_document"), ""):
    made.data.path = path
    prepare.check(made, [])
    assert capsys.readouterr().out.count("token ids of Megatron-LM, in") == (2 if path else 1)
  with one_sentence("data.validation_path='tfds:none'", "data.dir"):
    prepare.check(config(data__dir=str(tmp_path), data__validation_path="tfds:none"), [str(tmp_path / "b")])
  with one_sentence("data.path='tfds:none'", "data.dir"):
    prepare.check(config(data__dir=str(tmp_path)), ["tfds:none"])


def test_files_are_opened_once_and_not_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  folder, opened = tmp_path / "data", []
  write(folder, {f"{i}.txt": "some words\n" * 9 for i in range(30)} | {"more/a.dat": bytes(9)})
  look = content.look
  monkeypatch.setattr(survey, "look", lambda path, size: opened.append(path) or look(path, size))
  first = check(str(folder), str(tmp_path / "cache"))
  assert len(opened) == len(set(opened)) == 31
  assert check(str(folder), str(tmp_path / "cache")) == first
  assert len(opened) == 31
  (folder / "3.txt").write_text("other words\n" * 99)
  assert check(str(folder), str(tmp_path / "cache")) != first
  assert opened[31:] == [str(folder / "3.txt")]
  lines = first.splitlines()
  assert lines[0] == f"{folder}: 30 of 31 files are read as text"
  assert [line.split()[0] for line in lines[2:]] == ["read", "skip"]
  assert "binary" in lines[3]
  assert "more/a.dat" in lines[3]
  (kept,) = (tmp_path / "cache/recognised").iterdir()
  other_kinds = kept.read_text().replace('"plain"', '"of later"')
  for damaged in ("damaged", "[]", "[" * 99_999, "\0", other_kinds):
    kept.write_text(damaged)
    assert check(str(folder), str(tmp_path / "cache")).splitlines()[0] == lines[0]


LEFT = [
  "Thumbs.db", "desktop.ini", "__MACOSX/a.jsonl", "b.jsonl~", "b.jsonl.tmp", "b.jsonl.bak", "b.jsonl.sha256",
  "SHA256SUMS", "_temporary/0/part-0.jsonl",
]  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
@pytest.mark.parametrize("form", ["rows", "text"])
def test_what_programs_leave_is_not_read(tmp_path: Path, name: str, form: str):
  value, first = (LINES, "a.jsonl") if form == "rows" else ("some words\n", "a.txt")
  write(tmp_path, {first: value, name: bytes(9999) if name == "Thumbs.db" else value})
  assert splits(tmp_path) == {first: N}
  (verdict,) = recognise(str(tmp_path), "data.path").skipped
  assert verdict.why == "left by a program, no data"
  if form == "rows" and name != "Thumbs.db":
    assert len(files_of(tmp_path / name)) == 1  # the user says that it is data


def test_advice_that_would_not_help_is_not_given(tmp_path: Path):
  write(tmp_path / "left", {"a.txt.bak": "some words\n"})
  with one_sentence("holds no text, but 1 × plain text (0.0 kB); name the data itself"):
    files_of(tmp_path / "left")
  write(tmp_path / "tars", {"README.md": "words\n", "0.tar": tar()})
  with one_sentence("1 × tar archive", "such as '0.tar'; unpack its texts with", "or name the files that you mean"):
    files_of(tmp_path / "tars")


@pytest.mark.parametrize("name", ["b.jsonl.part", "b.jsonl.crdownload", "x.incomplete/b.jsonl"])
def test_downloads_that_have_not_ended_are_named(tmp_path: Path, name: str):
  write(tmp_path, {"a.jsonl": LINES, name: LINES[:-9]})
  with one_sentence("lacks data: ", name, "download that has not ended", "let it end"):
    files_of(tmp_path)
  assert splits(tmp_path, data__form="rows") == {"a.jsonl": N}


@pytest.mark.parametrize("beside", ["_delta_log/0.json", "metadata/v1.metadata.json", ".hoodie/hoodie.properties"])
def test_tables_with_a_log_are_refused_by_name(tmp_path: Path, beside: str):
  write(tmp_path, {"table/part-0.parquet": parquet(9), "table/part-1.parquet": parquet(9), f"table/{beside}": LINES})
  with one_sentence("2 × file of a Delta, Iceberg or Hudi table", "write the table as Parquet"):
    files_of(tmp_path)
  assert len(files_of(f"{tmp_path}/table/part-0.parquet,{tmp_path}/table/part-1.parquet")) == 2


def test_the_cache_of_a_data_set_is_not_read_twice(tmp_path: Path):
  out = io.BytesIO()
  with pa.ipc.new_stream(out, pa.schema([("text", pa.string())])) as stream:
    stream.write_table(pa.table({"text": ["a"]}))
  arrow, at = out.getvalue(), "default/0.0.0/abc"
  names = ("tiny-train.arrow", "tiny-validation.arrow", "cache-0123456789abcdef.arrow", "tmp1a_b2c3d")
  write(tmp_path, {f"{at}/{name}": arrow for name in names} | {f"{at}/dataset_info.json": "{}"})
  assert splits(tmp_path) == {f"{at}/tiny-train.arrow": T, f"{at}/tiny-validation.arrow": V}


def test_several_versions_of_a_data_set_are_refused(tmp_path: Path):
  for name in ("default/0.0.0/abc", "default/0.0.0/def", "other/0.0.0/abc"):
    write(tmp_path / name, {"train.jsonl": LINES, "dataset_info.json": "{}"})
  with one_sentence("several versions of a data set, ", "'default/0.0.0/abc'", "'default/0.0.0/def'", "folder of one"):
    files_of(tmp_path)
  assert splits(tmp_path / "default/0.0.0/abc") == {"train.jsonl": N}
  (tmp_path / "default/0.0.0/def/dataset_info.json").unlink()  # two data sets, each in one version
  assert len(splits(tmp_path)) == 3


def test_a_list_of_data_sets_hides_none(tmp_path: Path):
  write(tmp_path, {"dataset_info.json": json.dumps({"a": {"file_name": "a.json"}}), "a.json": ARRAY, "b.json": ARRAY})
  assert splits(tmp_path) == {"a.json": N, "b.json": N}
  write(tmp_path / "web", {"index.json": json.dumps({"shards": []}), "a.txt": "some words\n"})  # of something else
  assert splits(tmp_path / "web").keys() == {"index.json", "a.txt"}


def test_data_that_is_missing_is_named_in_a_data_set_too(tmp_path: Path):
  pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
  state = json.dumps({"_data_files": [{"filename": "data.arrow"}]})
  write(tmp_path, {"data.arrow": pointer, "state.json": state, "dataset_info.json": "{}"})
  with one_sentence("lacks data: 'data.arrow'", "Git LFS pointer", "git lfs pull"):
    files_of(tmp_path)


def test_a_link_is_not_read_beside_its_file(tmp_path: Path):
  write(tmp_path, {"a/0.jsonl": LINES, ".store/1": LINES})
  (tmp_path / "latest.jsonl").symlink_to("a/0.jsonl")
  (tmp_path / "1.jsonl").symlink_to(".store/1")  # whose file is hidden
  assert splits(tmp_path) == {"a/0.jsonl": N, "1.jsonl": N}
  assert [one.why for one in recognise(str(tmp_path), "data.path").skipped] == [
    "the same file as a/0.jsonl, which is read"
  ]
  (tmp_path / "2.jsonl").symlink_to(".store/1")
  assert len(splits(tmp_path)) == 2
  (tmp_path / "test.jsonl").symlink_to("a/0.jsonl")
  with one_sentence(
    "holds a file twice, for different splits, as 'a/0.jsonl' and as the link 'test.jsonl'", "remove one"
  ):
    files_of(tmp_path)


def test_a_dump_is_read_as_text_if_the_user_says_so(tmp_path: Path):
  write(tmp_path, {"enwik8": "<mediawiki xmlns='...'>\n"})
  with one_sentence("MediaWiki dump", "data.form='text'"):
    files_of(tmp_path)
  assert splits(tmp_path, data__form="text") == {"enwik8": N}
  assert len(files_of(tmp_path / "enwik8", data__form="text")) == 1


def test_names_may_hold_any_bytes(tmp_path: Path):
  names = [b"bad\xff%d.txt" % i for i in range(30)] + [b"two\nlines.txt"]
  for name in names:
    (tmp_path / name.decode(errors="surrogateescape")).write_text("some words\n")
  assert sum(file.split == VALIDATION for file in files_of(tmp_path)) == 1
  write(tmp_path, {"bad\x1b\n.dat": b"\0"})
  table = check(str(tmp_path))
  assert all(line.isprintable() for line in table.splitlines())
  assert "bad\\x1b\\n.dat" in table
