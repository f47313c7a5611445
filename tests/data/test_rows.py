"""Readers of rows: each gives the same rows as JSON lines, from any row on, and one sentence if a file is damaged."""

import bz2
import csv
import gzip
import io
import json
import lzma
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from helpers import config, one_sentence
from row_files import GOLDEN, MDS_ROWS, file_of, mds_files

from data import opening, text, tfds
from data.opening import opened
from data.recognition.content import SUFFIXES
from data.text import prepare, readers
from data.text.files import held_out
from data.text.rows import Fields, class_names, json_values, mds, rows
from data.text.tokenizers import BYTES

STRANGE = ['"quoted" \\"', "a,b;c\td|e", "two\nlines\r\nand more\n", "{[}] \\{", "größe 🎉", " spaces ", "'", "\\u0041"]
TEXTS = [*STRANGE, *(f"row {i}, of größe {i * i}" for i in range(100 - len(STRANGE) - 1)), "long" * 50_000]
ROWS = [{"id": i, "text": text, "label": i % 3} for i, text in enumerate(TEXTS)]
CLASSES = Fields(label="label")


def as_csv(rows: list[dict[str, Any]], **options: Any) -> bytes:
  out = io.StringIO()
  writer = csv.DictWriter(out, list(rows[0]), **options)
  writer.writeheader()
  writer.writerows(rows)
  return out.getvalue().encode()


def frames(content: bytes) -> bytes:
  """Zstd in two frames, one of them with a checksum, with one to skip between them."""
  half = len(content) // 2
  first = zstandard.ZstdCompressor(write_checksum=True, write_content_size=False).compress(content[:half])
  skipped = (0x184D2A53).to_bytes(4, "little") + (5).to_bytes(4, "little") + b"extra"
  return first + skipped + zstandard.ZstdCompressor().compress(content[half:])


def twice(compress: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
  return lambda content: compress(content[: len(content) // 3]) + compress(content[len(content) // 3 :])


COMPRESS = {".gz": twice(gzip.compress), ".xz": twice(lzma.compress), ".bz2": twice(bz2.compress), ".zst": frames}
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
ARRAY = json.dumps(ROWS, indent=2, ensure_ascii=False).encode()
CONTENTS: dict[str, tuple[str, bytes]] = {
  "a.jsonl": ("json", LINES),
  "array.json": ("json_values", ARRAY),
  "array-in-a-line.json": ("json_values", b"\xef\xbb\xbf " + json.dumps(ROWS).encode()),
  "objects.json": ("json_values", "\n\n".join(json.dumps(row, indent=1) for row in ROWS).encode()),
  "a.csv": ("csv", as_csv(ROWS)),
  "semicolons.csv": (
    "csv",
    b"\xef\xbb\xbf"
    + as_csv([{"text": "", **row} for row in ROWS], delimiter=";", lineterminator="\n", quoting=csv.QUOTE_ALL),
  ),
  "bars.csv": ("csv", as_csv([{"a;b,c": ",,,;;;", **row} for row in ROWS], delimiter="|")),
  "a.tsv": ("tsv", as_csv(ROWS, delimiter="\t") + b"\n"),
  **{f"a.jsonl{suffix}": ("json", compress(LINES)) for suffix, compress in COMPRESS.items()},
  "array.json.xz": ("json_values", lzma.compress(ARRAY)),
  "a.csv.bz2": ("csv", bz2.compress(as_csv(ROWS))),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_rows_are_the_same_in_every_form_and_from_any_row_on(name: str, tmp_path: Path):
  kind, content = CONTENTS[name]
  (tmp_path / name).write_bytes(content)
  file = file_of(tmp_path / name, kind)
  found = list(rows(file, CLASSES))
  expected = [(row["text"].encode(), row["label"]) for row in ROWS]
  assert [(row.text, row.label) for row in found] == expected
  assert found[-1].done == file.size
  for start in (1, 3, 9, 50, 99, 100):
    assert list(rows(file, CLASSES, found[start - 1].offset, start)) == found[start:]


@pytest.mark.parametrize("name", ["array.json", "objects.json", "a.csv"])
def test_the_borders_of_blocks_do_not_matter(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  kind, content = CONTENTS[name]
  (tmp_path / name).write_bytes(content)
  monkeypatch.setattr(json_values, "BUFFER", 7)
  monkeypatch.setattr(opening, "BUFFER", 11)
  found = [row.text for row in rows(file_of(tmp_path / name, kind), Fields())]
  assert found == [row["text"].encode() for row in ROWS]


@pytest.mark.parametrize("name", ["array.json", "a.csv", "a.jsonl.xz"])
def test_a_preparation_that_is_interrupted_gives_the_same_files(
  name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
  kind, content = CONTENTS[name]
  (tmp_path / name).write_bytes(content)
  interrupted_equals_undisturbed((file_of(tmp_path / name, kind),), tmp_path, monkeypatch)


def interrupted_equals_undisturbed(files: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
  """Stops a preparation in the middle of many batches, and compares what it leaves in the end."""
  monkeypatch.setattr(prepare, "SAVE_EVERY", 500)
  write = lambda name: prepare.write(tmp_path / name, files, BYTES, CLASSES, name)
  for name in ("whole", "stopped"):
    (tmp_path / name).mkdir()
  write("whole")
  monkeypatch.setattr(prepare, "BATCH", 300)
  add, starts, stops = prepare.Writer.add, [], [2, 2, 3, 2]

  def stop(writer: Any, *arguments: Any) -> None:
    add(writer, *arguments)
    left[0] -= 1
    if not left[0]:
      raise KeyboardInterrupt

  def read(*arguments: Any) -> Any:
    starts.append(tuple(arguments[2]))
    return readers.read(*arguments)

  monkeypatch.setattr(prepare.Writer, "add", stop)
  monkeypatch.setattr(prepare, "read", read)
  for count in stops:
    left = [count + 1]
    with pytest.raises(KeyboardInterrupt):
      write("stopped")
  left = [-1]
  write("stopped")
  assert starts == sorted(starts)
  assert len(set(starts)) > 3
  contents = {file.name: file.read_bytes() for file in (tmp_path / "whole").iterdir()}
  assert {file.name: file.read_bytes() for file in (tmp_path / "stopped").iterdir()} == contents
  return contents


SMALL = b'[{"text": "one"}, {"text": "two"}'


@pytest.mark.parametrize(
  ("kind", "content", "parts"),
  [
    ("json_values", SMALL, ["a' in data.path is not complete", "no end after element 2"]),
    ("json_values", SMALL + b',\n {"text": "th', ["element 3 of", "is not complete", "again"]),
    ("json_values", SMALL + b', {"text": "\\"}]', ["element 3 of", "is not complete"]),
    ("json_values", SMALL + b",]", ["element 3 of", "is missing"]),
    ("json_values", SMALL + b', "three"]', ["element 3 of", "is not a JSON object"]),
    ("json_values", SMALL + b', {"text": three}]', ["element 3 of", "not valid JSON", "correct it"]),
    ("json_values", SMALL + b', {"texts": "three"}]', ["'text' is not in element 3", "did you mean 'texts'"]),
    ("json_values", SMALL + b' {"text": "three"}]', ["element 3 of", "no comma"]),
    ("json_values", SMALL + b"]\n{}", ["goes on after the end", "element 2"]),
    ("json_values", b'{"text": "one"}\n\n{"text": "two"}, 3', ["element 3 of", "is not a JSON object"]),
    ("csv", b"text,label\na,1\nb\n", ["row 2 of", "in line 3, has 1 cells", "header has 2", "in quotes"]),
    ("csv", b'text,label\n"a\nb",1\nc,d,1\n', ["row 2 of", "in line 4, has 3 cells", "header has 2", "in quotes"]),
    ("csv", b'text,label\na,1\n"b,1\nc,1\n', ["row 2 of", "in line 3, cannot be read", "close the quotes"]),
    ("csv", b'text,label\n"a" b,1\n', ["row 1 of", "in line 2, cannot be read", "double the quotes"]),
    ("csv", "text\ngröße\n".encode("latin-1"), ["row 1 of", "in line 2, is not UTF-8", "iconv"]),
    ("csv", "text\n".encode("utf-16"), ["the header of", "in line 1, is not UTF-8", "iconv"]),
    ("csv", b"Text,label\na,1\n", ["'text' is not in the header of", "Text, label", "did you mean 'Text'"]),
    ("csv", b"text,text\na,1\n", ["names 2 columns of", "rename"]),
    ("csv", ",".join(map(str, range(99))).encode(), ["which has 0, 1, 2", "18, 19 and 79 more; use one of them"]),
    ("tsv", b"text,label\na,1\n", ["'text' is not in the header of", "text,label"]),
  ],
)  # fmt: skip
def test_a_mistake_gets_one_sentence(kind: str, content: bytes, parts: list[str], tmp_path: Path):
  (tmp_path / "a").write_bytes(content)
  with one_sentence("a'", *parts):
    list(rows(file_of(tmp_path / "a", kind), Fields()))


def test_a_mistake_has_the_same_sentence_after_going_on(tmp_path: Path):
  (tmp_path / "a").write_bytes(b"text,label\n" + b"a,1\n" * 50 + b"b\n")
  file = file_of(tmp_path / "a", "csv")
  reading = rows(file, Fields())
  offsets = [next(reading).offset for _ in range(50)]
  for start in (0, 20, 50):
    with one_sentence("row 51 of", "in line 52, has 1 cells"):
      list(rows(file, Fields(), offsets[start - 1] if start else 0, start))


@pytest.mark.parametrize("kind", ["csv", "json_values"])
def test_a_quote_without_end_does_not_fill_the_memory(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(json_values, "BUFFER", 1000)
  (tmp_path / "a").write_bytes({"csv": b'text\n"', "json_values": b'{"text": "'}[kind] + b"word\n" * 100_000)
  with one_sentence("1 of", "has more than 10000 bytes", "data.limit_mb"):
    list(rows(file_of(tmp_path / "a", kind), Fields(limit=40_000 if kind == "csv" else 10_000)))


def test_a_column_of_numbers_in_csv_has_classes_as_json_has(tmp_path: Path):
  (tmp_path / "a").write_bytes(b"text,label\na,0\nb,12\nc,012\nd,-1\ne,\n")
  assert [row.label for row in rows(file_of(tmp_path / "a", "csv"), CLASSES)] == [0, 12, "012", "-1", ""]


# Compressions


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_file_that_is_cut_off_anywhere_is_refused(suffix: str, tmp_path: Path):
  random = np.random.default_rng(0)
  noise, words = random.integers(0, 256, 3000, np.uint8).tobytes(), b"words and words " * 40_000 + b"a" * 300_000
  whole = COMPRESS[suffix](noise + words)

  def read(content: bytes) -> bytes:
    (tmp_path / f"a{suffix}").write_bytes(content)
    with opened(str(tmp_path / f"a{suffix}"), SUFFIXES[suffix]) as (text, raw):
      found = text.read()
      assert raw.tell() == len(content)
      return found

  assert read(whole) == noise + words
  shorter = 0
  for size in sorted({*random.integers(1, len(whole), 50).tolist(), *range(len(whole) - 12, len(whole))}):
    try:
      assert (noise + words).startswith(read(whole[:size]))
      shorter += 1  # between two streams, the file is whole
    except OSError:
      pass
  assert shorter == 0
  with pytest.raises(OSError):
    read(whole + b"garbage")


def test_frames_of_zstd_with_long_windows_are_read(tmp_path: Path):
  content = b"words and words " * 10_000
  parameters = zstandard.ZstdCompressionParameters(window_log=31, enable_ldm=True)
  stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()  # the size is not written
  encoded = stream.compress(content) + stream.flush()
  assert zstandard.get_frame_parameters(encoded).window_size == 1 << 31
  file = tmp_path / "a b.zst"
  file.write_bytes(encoded)
  with opened(str(file), "zstd") as (found, _):
    assert found.read() == content
  assert encoded[5] == 31 - 10 << 3
  file.write_bytes(encoded[:5] + bytes([32 - 10 << 3]) + encoded[6:])  # twice the window
  with one_sentence("a b.zst' in data.path", "window of more than 2 GiB", f"zstd -d --long=31 '{file}'"):
    with opened(str(file), "zstd") as (found, _):
      found.read()


# MDS


@pytest.mark.parametrize(("name", "shards"), [("plain", 2), ("zstd", 2), ("gz", 1), ("bz2", 1)])
def test_shards_of_mosaicml_are_read(name: str, shards: int):
  files = mds_files(name)
  assert len(files) == shards
  found = [list(rows(file, CLASSES)) for file in files]
  assert [(row.text, row.label) for part in found for row in part] == [
    (row["text"].encode(), row["label"]) for row in MDS_ROWS
  ]
  for file, part in zip(files, found, strict=True):
    assert part[-1].done == file.size
    for start in (1, len(part) // 2, len(part)):
      assert list(rows(file, CLASSES, part[start - 1].offset, start)) == part[start:]


@pytest.mark.parametrize("name", ["ids", "ids-typed", "ids-shaped"])
def test_arrays_of_mosaicml_are_token_ids(name: str):
  found = [row.ids.tolist() for file in mds_files(name) for row in rows(file, Fields("ids")) if row.ids is not None]
  resize = (lambda ids: np.resize(ids, 8).tolist()) if name == "ids-shaped" else list
  assert found == [resize(row["ids"]) for row in MDS_ROWS]


def test_arrays_of_mosaicml_say_their_type():
  """The codes of streaming's NDArray, each with a number that another type would not give."""
  cases = [(8, "B", 200), (9, "b", -5), (16, "H", 60_000), (17, "h", -5), (32, "I", 1 << 31), (33, "i", -5)]
  for code, letter, number in [
    *cases,
    (64, "Q", 1 << 63),
    (65, "q", -5),
    (18, "e", 0.5),
    (34, "f", 0.5),
    (66, "d", 0.5),
  ]:
    for width, size in ((0, "<B"), (1, "<H"), (2, "<I"), (3, "<Q")):
      encoded = bytes([code, 1 << 2 | width]) + struct.pack(size, 2) + struct.pack(f"<2{letter}", number, 1)
      assert mds._array_decoder("")(encoded).tolist() == [number, 1]
  assert mds._array_decoder("int16:2,3")(struct.pack("<6h", *range(6))).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_shards_are_prepared_again_after_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  interrupted_equals_undisturbed(mds_files("zstd"), tmp_path, monkeypatch)


def test_shards_that_cannot_be_read_are_refused(tmp_path: Path):
  file = mds_files("plain")[0]
  with one_sentence("data.text_field='picture' has the encoding 'pkl'", "'ndarray:int32'"):
    list(rows(file, Fields("picture")))
  with one_sentence("data.text_field='words' is not in", "label, picture, score, text"):
    list(rows(file, Fields("words")))
  whole = Path(file.path).read_bytes()
  (tmp_path / "as-bytes.mds").write_bytes(
    Path(mds_files("ids")[0].path).read_bytes().replace(b'"ndarray"', b'"bytes"  ')
  )
  with one_sentence("data.text_field='ids' has bytes that are not UTF-8 text in sample 1", "'ndarray:int32'"):
    list(rows(file_of(tmp_path / "as-bytes.mds", "mds"), Fields("ids")))
  header = json.loads(re.search(rb"\{.*?\}", whole)[0])  # type: ignore[index]
  assert header["column_names"] == ["label", "picture", "score", "text"]
  for damaged in (
    whole[:-1], whole[:50], whole + b"x", whole[:4] + whole[8:12] + whole[4:8] + whole[12:], b"\xff" * 99,
    whole.replace(b"column_names", b"column_nameZ"), whole.replace(b"null, 4", b"4   , 4"), b"",
  ):  # fmt: skip
    (tmp_path / "a.mds").write_bytes(damaged)
    with one_sentence("a.mds' in data.path cannot be read", "again"):
      list(readers.read((file_of(tmp_path / "a.mds", "mds"),), Fields()))


# TensorFlow Datasets


@pytest.fixture(scope="module")
def text_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """A data set of texts, written by TensorFlow Datasets, in two shards to train on."""
  import tensorflow_datasets as tf

  root = tmp_path_factory.mktemp("tfds")
  features = {
    "text": tf.features.Text(),
    "raw": tf.features.Tensor(shape=(), dtype=np.object_),
    "label": tf.features.ClassLabel(names=["bad", "fine", "good"]),
    "ids": tf.features.Sequence(np.int32),
    "picture": tf.features.Image(shape=(2, 2, 3), encoding_format="png"),
  }
  picture = io.BytesIO()
  from PIL import Image

  Image.new("RGB", (2, 2)).save(picture, "PNG")

  def info(self: Any) -> Any:
    return self.dataset_info_from_configs(features=tf.features.FeaturesDict(features))

  def examples(rows: list[dict[str, Any]]) -> Any:
    for i, row in enumerate(rows):
      picture.seek(0)
      values = {"text": row["text"], "raw": row["text"].encode(), "label": row["label"]}
      yield i, values | {"ids": np.array(row["ids"], np.int32), "picture": io.BytesIO(picture.getvalue())}

  methods = {
    "_info": info,
    "_split_generators": lambda self, _: {"train": examples(MDS_ROWS[:40]), "validation": examples(MDS_ROWS[40:])},
    "_generate_examples": examples,
  }
  body = {"name": "words", "VERSION": tf.core.Version("1.2.0"), "BUILDER_CONFIGS": [], "__module__": __name__}
  with tf.core.registered.skip_registration():
    builder = type("words", (tf.core.GeneratorBasedBuilder,), body | methods)
  settings = tf.download.DownloadConfig(num_shards=2)
  builder(data_dir=str(root), file_format="array_record").download_and_prepare(download_config=settings)
  return root


def test_texts_of_tensorflow_datasets_are_read(text_set: Path):
  folder = tfds.find("tfds:words", config(data__dir=str(text_set)).data, "data.path='tfds:words'")
  assert folder == text_set / "words/1.2.0"
  expected = {row["text"].encode(): row for row in MDS_ROWS}
  for split, count in (("train", 40), ("validation", 20)):
    ids, texts, raw = [], [], []
    for name in sorted(folder.glob(f"words-{split}*")):
      file = file_of(name, "array_record")
      assert class_names(file, "label") == ["bad", "fine", "good"]
      texts += (found := list(rows(file, CLASSES)))
      raw += rows(file, Fields("raw"))
      ids += rows(file, Fields("ids"))
      for start in (1, len(found) // 2, len(found)):
        assert list(rows(file, CLASSES, found[start - 1].offset, start)) == found[start:]
    assert len({row.text for row in texts}) == len(texts) == count
    assert [row.text for row in raw] == [row.text for row in texts]
    named = rows(file, Fields("raw", label="text"))  # a class that is not a ClassLabel
    assert all(row.label == (row.text or b"").decode() for row in named)
    wanted = [expected[row.text or b""] for row in texts]
    assert [row.label for row in texts] == [row["label"] for row in wanted]
    assert [row.ids.tolist() for row in ids if row.ids is not None] == [row["ids"] for row in wanted]


def test_records_are_prepared_again_after_an_interruption(
  text_set: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
  files = tuple(file_of(name, "array_record") for name in sorted((text_set / "words/1.2.0").glob("words-train*")))
  interrupted_equals_undisturbed(files, tmp_path, monkeypatch)


def test_records_that_cannot_be_read_are_refused(text_set: Path, tmp_path: Path):
  folder = tmp_path / "words/1.2.0"
  shutil.copytree(text_set / "words/1.2.0", folder)
  name = next(folder.glob("words-train*"))
  with one_sentence("data.text_field='words' is not in", "ids, label, picture, raw, text"):
    list(rows(file_of(name, "array_record"), Fields("words")))
  whole = name.read_bytes()
  for damaged in (whole[:100], whole[:-1], b"garbage" * 99):
    name.write_bytes(damaged)
    with one_sentence(f"{str(name)!r} in data.path cannot be read", "prepare it again"):
      list(rows(file_of(name, "array_record"), Fields()))
  features = folder / "features.json"
  features.write_text(features.read_text().replace("tensorflow_datasets.core.features.text", "antigravity"))
  with one_sentence(f"{str(name)!r} in data.path has a features.json with the class 'antigravity"):
    list(rows(file_of(name, "array_record"), Fields()))


def ids_of(path: Path) -> list[list[int] | None]:
  found = rows(file_of(path, "parquet"), Fields("ids"))
  return [None if row.ids is None else row.ids.tolist() for row in found]


def test_pyarrow_files_are_read_with_lists_of_any_kind(tmp_path: Path):
  lists = [[1, 2, 3], [], None, [4], [5, 6]]
  kinds = [pa.list_(pa.int32()), pa.large_list(pa.uint16()), pa.list_(pa.int64())]
  for i, kind in enumerate(kinds):
    table = pa.table({"ids": pa.array(lists, kind)})
    pq.write_table(table, tmp_path / f"{i}.parquet", row_group_size=2)
    assert ids_of(tmp_path / f"{i}.parquet") == lists
  pq.write_table(pa.table({"ids": pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int8(), 2))}), tmp_path / "f.parquet")
  assert ids_of(tmp_path / "f.parquet") == [[1, 2], None, [3, 4]]
  pq.write_table(pa.table({"ids": [[1, 2], [3, None]]}), tmp_path / "n.parquet")
  with one_sentence("data.text_field='ids' is [3, None] in row 2 of", "token ids"):
    list(rows(file_of(tmp_path / "n.parquet", "parquet"), Fields("ids")))


def test_equal_rows_give_equal_prepared_text(tmp_path: Path):
  prints = set()
  for name in ("a.jsonl", "array.json", "a.csv", "a.tsv"):
    kind, content = CONTENTS[name]
    (tmp_path / name).write_bytes(content)
    settings = config(data__cache_dir=str(tmp_path / "cache"))
    prepared = text.prepare_text(settings, name, (file_of(tmp_path / name, kind),), BYTES)
    assert sum(prepared.meta["documents"].values()) == len(ROWS)
    prints.add(prepared.meta["fingerprint"])
  assert len(prints) == 1


def train_documents(tmp_path: Path, path: Path | str, **fields: Any) -> list[bytes]:
  part = text.load(config(data__path=str(path), data__cache_dir=str(tmp_path / "cache"), **fields)).parts[0]
  tokens = part.train.tokens  # type: ignore[attr-defined]
  return tokens.slice(0, len(tokens)).tobytes().split(b"\0")[:-1]


def test_every_form_is_recognised_by_its_path(tmp_path: Path, text_set: Path):
  for name in ("array.json", "semicolons.csv", "a.tsv", "a.jsonl.xz", "a.jsonl.bz2", "a.jsonl.zst", "a.csv.bz2"):
    (tmp_path / name).write_bytes(CONTENTS[name][1])
    expected = [row["text"].encode() for i, row in enumerate(ROWS) if not held_out(i)]
    assert train_documents(tmp_path, tmp_path / name) == expected, name
  expected = [row["text"].encode() for i, row in enumerate(MDS_ROWS) if not held_out(i)]
  for name in ("plain", "zstd", "gz", "bz2"):
    assert train_documents(tmp_path, GOLDEN / name) == expected
  found = train_documents(tmp_path, "tfds:words", data__dir=str(text_set))
  assert sorted(found) == sorted(row["text"].encode() for row in MDS_ROWS[:40])
