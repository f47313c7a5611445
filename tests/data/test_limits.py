"""A small file that asks for much memory is refused in one sentence, before there is room for it.

Most tests here have small limits. Those of `full` have the real ones, and ask a process of their own for its peak.
"""

import csv
import gzip
import io
import json
import lzma
import struct
import subprocess
import sys
import tracemalloc
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import config, one_sentence
from PIL import Image
from row_files import file_of

import limits
from checkpointing import form
from checkpointing.pretrained import families
from checkpointing.pretrained.folder import Folder
from data import images, records, text
from data.images import decode
from data.text import readers, sandbox, templates, tokenizers
from data.text.chat import Chat
from data.text.rows import Fields, delimited, pages, parquet, rows, unpacked
from data.text.templates import Template
from errors import ConfigError
from reporting import heartbeat

LIMIT = 1 << 20
LONG = "a" * (5 * LIMIT)
COMPRESS = {"gz": gzip.compress, "xz": lzma.compress}
CHAT = Chat(templates.Templates({"default": "{% for m in messages %}{{ m.content }}{% endfor %}"}, {}, "T"), ())
MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def table(rows: Any, **options: Any) -> bytes:
  out = io.BytesIO()
  pq.write_table(pa.table({"text": rows}), out, **{"compression": "zstd"} | options)
  return out.getvalue()


def batches(rows: Any, compression: str | None = "zstd", stream: bool = False) -> bytes:
  out, data = io.BytesIO(), pa.table({"text": rows})
  new = pa.ipc.new_stream if stream else pa.ipc.new_file
  with new(out, data.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as file:
    file.write_table(data)
  return out.getvalue()


def shard(value: bytes, encoding: str = "str") -> bytes:
  header = json.dumps({"column_names": ["text"], "column_encodings": [encoding], "column_sizes": [None]}).encode()
  begin, size = 4 * 3 + len(header), len(value)
  return np.array([1, begin, begin + 4 + size], "<u4").tobytes() + header + np.array([size], "<u4").tobytes() + value


def nulls(count: int, kind: Any) -> Any:
  return pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), pa.nulls(count, kind))


def nested(count: int) -> bytes:
  return b'{"text": "a", "others": [' + b"{}," * count + b"0]}\n"


REFUSED: dict[str, tuple[str, Any, str]] = {
  "json line": ("json", lambda: json.dumps({"text": LONG}).encode(), "line 1 of"),
  "json values": ("json", lambda: nested(40_000), "has so many values that it counts as 2"),
  "json element": ("json_values", lambda: json.dumps([{"text": LONG}]).encode(), "element 1 of"),
  "csv row": ("csv", lambda: f'text,n\n"{LONG}",1\n'.encode(), "row 1 of"),
  "parquet page": ("parquet", lambda: table([LONG], use_dictionary=False), "a page of the column 'text' in group 1"),
  "parquet value": ("parquet", lambda: table(["b" * (LIMIT * 3 // 2)]), "row 1 of"),
  "parquet list": ("parquet", lambda: table(nulls(2 * LIMIT, pa.int32())), "2,097,152 values"),
  "arrow batch": ("arrow", lambda: batches([LONG]), "a batch of"),
  "arrow stream": ("arrow", lambda: batches([LONG], "lz4", True), "a batch of"),
  "arrow value": ("arrow", lambda: batches(["b", LONG], None), "row 2 of"),
  "arrow nothing": ("arrow", lambda: batches(nulls(LIMIT, pa.null()), None), "row 1 of"),
  "arrow packed dictionary": ("arrow", lambda: batches(pa.array([LONG]).dictionary_encode()), "a batch of"),
  "arrow dictionary": ("arrow", lambda: batches(pa.array([LONG]).dictionary_encode(), None), "row 1 of"),
  "mds sample": ("mds", lambda: shard(b"a" * 2 * LIMIT), "sample 1 of"),
  "mds values": (
    "mds",
    lambda: shard(b"[" + b"{}," * 40_000 + b"0]", "json"),
    "has so many values that it counts as 2",
  ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_too_large_names_the_field_that_raises_the_limit(case: str, tmp_path: Path):
  kind, make, part = REFUSED[case]
  (tmp_path / "a").write_bytes(make())
  with one_sentence(part, "a'", "more than", "set data.limit_mb"):
    list(readers.read((file_of(tmp_path / "a", kind),), Fields(limit=LIMIT)))
  if case not in ("parquet list", "arrow nothing", "mds values"):  # those hold no text
    assert list(readers.read((file_of(tmp_path / "a", kind),), Fields(limit=25 * LIMIT)))


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_compressed_line_is_not_decompressed_beyond_the_limit(suffix: str, tmp_path: Path):
  (tmp_path / f"a.{suffix}").write_bytes(COMPRESS[suffix](json.dumps({"text": LONG}).encode()))
  with one_sentence("line 1 of", "more than 1 MB"):
    list(readers.read((file_of(tmp_path / f"a.{suffix}", "json"),), Fields(limit=LIMIT)))


def test_rows_that_share_a_value_are_read_few_at_a_time(tmp_path: Path):
  """A dictionary has a value once, and a thousand rows of it would be a thousand times as much."""
  shared = pa.DictionaryArray.from_arrays(pa.array(np.zeros(40, np.int32)), pa.array(["a" * (LIMIT - 99)]))
  for kind, content in (("parquet", table(shared, store_schema=False)), ("arrow", batches(shared, None))):
    (tmp_path / kind).write_bytes(content)
    before, count = pa.total_allocated_bytes(), 0
    tracemalloc.start()
    for row in rows(file_of(tmp_path / kind, kind), Fields(limit=LIMIT)):
      count += len(row.text or b"") == LIMIT - 99
      assert pa.total_allocated_bytes() - before < 12 * LIMIT  # of the library
      assert tracemalloc.get_traced_memory()[0] < 12 * LIMIT  # of Python
    tracemalloc.stop()
    assert count == 40


@pytest.mark.parametrize("encoding", ["PLAIN", "DELTA_BYTE_ARRAY", "RLE_DICTIONARY"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_pages_are_what_the_library_says_of_a_column(encoding: str, version: str, tmp_path: Path):
  texts = [f"{'some words' * (i % 50)} {i % 7}" for i in range(5000)]
  kinds = {"use_dictionary": True} if "DICT" in encoding else {"use_dictionary": False, "column_encoding": encoding}
  (tmp_path / "a").write_bytes(table(texts, data_page_size=9000, data_page_version=version, **kinds))
  with pq.ParquetFile(tmp_path / "a") as file, open(tmp_path / "a", "rb") as raw:
    column = file.metadata.row_group(0).column(0)
    found = pages.pages_of(raw, column)
  assert found.values == column.num_values == 5000
  assert bool(found.repeated) == (encoding != "PLAIN")
  headers = column.total_uncompressed_size - found.size
  assert 0 < headers < 0.1 * found.size  # the library counts the headers, too
  assert 0 < found.largest <= found.size


@pytest.mark.parametrize("name", ["text", "a.text"])
def test_a_footer_that_names_other_columns_hides_no_page(name: str, tmp_path: Path):
  out = io.BytesIO()
  pq.write_table(pa.table({name: [LONG]}), out, use_dictionary=False, store_schema=False, compression="zstd")
  content = out.getvalue()
  at = content.rindex(b"text")  # in the metadata of the column; before, it is in the schema
  assert content.count(b"text") == 2
  for given in (content, content[:at] + b"txet" + content[at + 4 :]):
    (tmp_path / "a").write_bytes(given)
    with one_sentence(f"a page of the column '{name}' in group 1", "set data.limit_mb"):
      list(readers.read((file_of(tmp_path / "a", "parquet"),), Fields(limit=LIMIT, text=name)))


def test_a_footer_has_a_limit_of_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  """Of the schema, of the groups of rows, and of the columns in them: 3 + 4 + 8 here, with the root of the schema."""
  rows = {"text": ["a", "b", "c", "d"], "n": [1, 2, 3, 4]}
  pq.write_table(pa.table(rows), tmp_path / "a", row_group_size=1)
  file = file_of(tmp_path / "a", "parquet")
  monkeypatch.setattr(pages, "COLUMNS", 15)
  assert len(list(readers.read((file,), Fields()))) == 4
  parquet._groups.cache_clear()
  monkeypatch.setattr(pages, "COLUMNS", 14)
  for read in (lambda: list(readers.read((file,), Fields())), lambda: parquet.schema(file)):
    with pytest.raises(ValueError, match="its footer has more than 14 columns"):
      read()


def test_groups_of_rows_are_what_the_library_says(tmp_path: Path):
  rows = {"text": [f"some words {i % 7}" for i in range(5000)], "ids": [[i, 2] for i in range(5000)]}
  for options in ({}, {"use_dictionary": False}, {"write_page_index": True, "data_page_version": "2.0"}):
    pq.write_table(pa.table(rows), tmp_path / "a", row_group_size=600, **options)
    with open(tmp_path / "a", "rb") as raw:
      found = pages.groups_of(raw)
    metadata = pq.read_metadata(tmp_path / "a")
    assert len(found) == metadata.num_row_groups == 9
    for i, group in enumerate(found):
      expected = metadata.row_group(i)
      assert (group.num_rows, group.total_byte_size) == (expected.num_rows, expected.total_byte_size)
      for j, chunk in enumerate(group.columns):
        column = expected.column(j)
        assert chunk.data_page_offset == column.data_page_offset
        assert chunk.dictionary_page_offset == (column.dictionary_page_offset or 0)
        assert chunk.total_compressed_size == column.total_compressed_size


def test_a_batch_says_its_size_as_the_library_decompresses_it(tmp_path: Path):
  texts = pa.array(["words " * i for i in range(999)])
  for stream in (False, True):
    (tmp_path / "a").write_bytes(batches(texts, "zstd", stream))
    with open(tmp_path / "a", "rb") as file:
      ((size, packed),) = unpacked.sizes(file)
    assert texts.nbytes <= size <= 1.01 * texts.nbytes + 200
    assert 0 < packed < size


def test_a_row_of_csv_is_read_no_further_than_the_limit():
  text = io.BytesIO(b"a" * 100)
  with pytest.raises(csv.Error, match="has more than 10 bytes"):
    next(delimited._Lines(text, 10))
  assert text.tell() == 10


def test_tools_of_a_dialogue_have_a_limit(tmp_path: Path):
  """A string in a table may hold JSON, which nothing else has counted."""
  tools = "[" + "{}," * 40_000 + "{}]"
  pq.write_table(pa.table({"messages": [MESSAGES], "tools": [tools]}), tmp_path / "a")
  read = lambda limit: list(
    rows(file_of(tmp_path / "a", "parquet"), Fields(messages="messages", limit=limit), chat=CHAT)
  )
  with one_sentence("row 1 of", "has so many values that it counts as 2", "set data.limit_mb"):
    read(LIMIT)
  assert read(25 * LIMIT)


def test_what_describes_something_has_a_limit_of_values():
  many = b"[" + b"{}," * 999 + b"{}]"
  assert len(limits.parsed(many)) == 1000
  with pytest.raises(ValueError, match="it has too many values"):
    limits.parsed(many, most=len(many))


def test_a_record_has_a_limit(tmp_path: Path):
  with (tmp_path / "config.json").open("wb") as file:
    file.truncate(limits.RECORD + 1)
  with pytest.raises(ValueError, match="it has 16 MB, more than the limit of 16 MB"):
    form.read(tmp_path / "config.json")
  (tmp_path / "0.json").write_bytes(b'{"a": 1}'.ljust(limits.RECORD + 1))
  assert heartbeat.read(tmp_path / "0.json") == {}
  assert limits.text("a" * limits.MOST_TEXT)
  assert not limits.text("a" * (limits.MOST_TEXT + 1))


def records_file(folder: Path, records: list[bytes], in_a_chunk: int = 0) -> Path:
  """A file of TensorFlow Datasets with these records, so many in a chunk, by default all."""
  from array_record.python.array_record_module import ArrayRecordWriter

  core = "tensorflow_datasets.core.features"
  text = {"pythonClassName": f"{core}.text_feature.Text", "text": {}}
  form = {"pythonClassName": f"{core}.features_dict.FeaturesDict", "featuresDict": {"features": {"text": text}}}
  (folder / "features.json").write_text(json.dumps(form))
  writer = ArrayRecordWriter(str(folder / "a.array_record"), f"group_size:{in_a_chunk or len(records)}")
  for record in records:
    writer.write(record)
  writer.close()
  return folder / "a.array_record"


@pytest.mark.parametrize(
  "size,count,part",
  [
    (10_000, 100, "decompressed, has 1000000"),
    (1, 90_000, "90,000 records, more than"),
    (0, 90_000, "90,000 records, more than"),  # which take less than a byte each
    (1 << 15, 1, "record 1 of"),
  ],
)
def test_records_have_limits(size: int, count: int, part: str, tmp_path: Path):
  file = file_of(records_file(tmp_path, [b"a" * size] * count), "array_record")
  with one_sentence(part, "set data.limit_mb"):
    list(readers.read((file,), Fields(limit=1 << 16)))


def test_what_does_not_compress_has_the_same_limits(tmp_path: Path):
  file = records_file(tmp_path, [np.random.default_rng(0).bytes(10_000)] * 100)
  with one_sentence("decompressed, has 1000000", "set data.limit_mb"):
    records.together(str(file), limit=1 << 16)


def test_chunks_are_found_behind_many_records(tmp_path: Path):
  """A chunk takes a byte of the file for each record, also if it needs less. What is behind it is limited, too."""
  file, other = records_file(tmp_path, [b""] * 200_000), tmp_path / "other"
  other.mkdir()
  at = file.stat().st_size
  assert at % (1 << 16) == 0
  file.write_bytes(file.read_bytes() + records_file(other, [b"a" * 10_000] * 100).read_bytes())
  with one_sentence("decompressed, has 1000000", "set data.limit_mb"):
    records.together(str(file), limit=200_000)


def test_a_chunk_that_never_ends_is_passed(tmp_path: Path):
  (tmp_path / "a").write_bytes(bytes(24) + struct.pack("<8xQ8xB7sQ", (1 << 64) - 1, ord("r"), b"", 0))
  assert records.together(str(tmp_path / "a"), limit=1) == 1


@pytest.mark.parametrize(
  "sizes, in_a_chunk, most",
  [
    ([1000] * 50, 1, 40_000),  # all of them
    ([10_000] * 50, 1, 8),
    ([3300] * 51, 3, 22),  # seven whole chunks, and a record of one more
    ([1000] * 20 + [40_000, 39_000] + [1000] * 20, 1, 3),
    ([10_000] * 9, 9, 1),  # a chunk that is larger than what is read together
  ],
)
def test_records_are_read_together_as_far_as_their_chunks_fit(
  sizes: list[int], in_a_chunk: int, most: int, tmp_path: Path
):
  """With a limit of 40 kB, all chunks with any of them have at most 80 kB. 16 records of 16 MB each took 1.4 GB."""
  random = np.random.default_rng(0)
  file = records_file(tmp_path, [random.bytes(size) for size in sizes], in_a_chunk)
  assert records.together(str(file), limit=40_000) == most


def test_the_field_reaches_every_reader(tmp_path: Path):
  """`data.limit_mb=1`, for texts, images and arrays."""
  fields = {"data__limit_mb": 1, "data__cache_dir": str(tmp_path / "cache")}
  (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a" * 2 * LIMIT}))
  with one_sentence("line 1 of", "more than 1 MB"):
    text.load(config(data__path=str(tmp_path / "a.jsonl"), **fields))
  for name in ("a", "b"):
    (tmp_path / "pictures" / name).mkdir(parents=True)
    for i in range(20):
      Image.new("1", (1200, 1000)).save(tmp_path / "pictures" / name / f"{i}.png")
  with one_sentence(".png'", "more than the limit of 1,048,576 pixels"):
    images.load(config("fsdp", "images", data__path=str(tmp_path / "pictures"), **fields))
  (tmp_path / "a.npz").write_bytes(npz(((200_000,), "<i8"), ((200_000, 1, 1), "|u1")))
  with one_sentence("'label' of data.path=", "more than the limit of 1 MB"):
    images.find(str(tmp_path / "a.npz"), "data.path", config("fsdp", "images", **fields).data).open()


# Images


def npz(label: Any, image: Any) -> bytes:
  """An archive whose arrays have these headers, and no numbers."""
  out = io.BytesIO()
  with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
    for name, (shape, kind) in {"label": label, "image": image}.items():
      with archive.open(f"{name}.npy", "w") as file:
        header = {"descr": kind, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
  return out.getvalue()


@pytest.mark.parametrize(
  "label,image,part",
  [
    (((1 << 30,), "<i8"), ((1 << 30, 1, 1), "|u1"), "'label' of data.path="),
    (((2,), "<i8"), ((2, 40_000, 40_000), "|u1"), "an image of data.path="),
  ],
)
def test_arrays_are_asked_for_their_sizes_first(label: Any, image: Any, part: str, tmp_path: Path):
  (tmp_path / "a.npz").write_bytes(npz(label, image))
  with one_sentence(part, "more than the limit of 64 MB", "set data.limit_mb="):
    images.find(str(tmp_path / "a.npz"), "data.path", config("fsdp", "images").data).open()


def test_an_image_has_a_limit_of_pixels(tmp_path: Path):
  Image.new("1", (1200, 1000)).save(tmp_path / "a.png")
  with one_sentence("a.png'", "has 1,200,000 pixels, more than the limit of 1,048,576 pixels", "data.limit_mb=2"):
    decode.pixels(str(tmp_path / "a.png"), str(tmp_path / "a.png"), 3, limit=LIMIT)
  assert decode.pixels(str(tmp_path / "a.png"), "a", 3, 4, limit=2 * LIMIT).shape == (4, 4, 3)
  content = bytearray((tmp_path / "a.png").read_bytes())
  content[16:24] = 2 * (20_000).to_bytes(4, "big")  # the header's width and height, and its checksum
  content[29:33] = zlib.crc32(content[12:29]).to_bytes(4, "big")
  (tmp_path / "b.png").write_bytes(content)  # Pillow's own limit does not speak first
  with one_sentence("b.png'", "has 400,000,000 pixels", "set data.limit_mb=382"):
    decode.pixels(str(tmp_path / "b.png"), str(tmp_path / "b.png"), 3)


def test_an_image_starts_no_other_program(tmp_path: Path):
  (tmp_path / "a.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n%%EOF\n")
  with Image.open(tmp_path / "a.png") as found:
    assert found.format == "EPS"  # Pillow would start Ghostscript to read it
  with one_sentence("a.png", "unknown format"):
    decode.pixels(str(tmp_path / "a.png"), str(tmp_path / "a.png"), 3)


def test_images_together_have_no_more_pixels_than_one_may_have():
  room, order = decode._Room(), []
  with room.taken(6, 10), room.taken(4, 10):
    import threading

    waits = threading.Thread(target=lambda: room.taken(1, 10).__enter__() or order.append("in"))
    waits.start()
    waits.join(0.05)
    assert waits.is_alive()
  waits.join(10)
  assert order == ["in"]
  with decode._Room().taken(99, 10):  # one alone never waits
    pass


# Models and tokenizers


def model(folder: Path, **fields: Any) -> Folder:
  given = json.loads((Path(__file__).parents[1] / "golden/pretrained/llama/config.json").read_text()) | fields
  (folder / "config.json").write_text(json.dumps(given))
  return Folder(str(folder))


def test_a_model_has_a_limit_of_layers(tmp_path: Path):
  with one_sentence("config.json of init_from=", "num_hidden_layers=40000000", "480,000,000 tensors", "524,288"):
    model(tmp_path, num_hidden_layers=40_000_000)
  assert model(tmp_path, num_hidden_layers=1000).shape.fields["depth"] == 1000
  assert limits.TENSORS > 7 * 61 * (12 + 3 * 384)  # far more than the models that are known have


@pytest.mark.parametrize(
  "content", [b"[" * 100_000, b'{"a": "\xff"}', b"{}" + b" " * limits.DESCRIPTION, b"[" + b"{}," * 999]
)
def test_a_description_that_is_none_gets_one_sentence(content: bytes, tmp_path: Path):
  (tmp_path / "config.json").write_bytes(content)
  with one_sentence("init_from=", "has no config.json that can be read", "copy it again"):
    Folder(str(tmp_path))


def test_a_header_of_safetensors_has_a_limit(tmp_path: Path):
  with (tmp_path / "model.safetensors").open("wb") as file:
    file.write((limits.HEADER + 1).to_bytes(8, "little") + b"{}")
    file.truncate(limits.HEADER + 99)
  with one_sentence("init_from=", "'model.safetensors' has a header of 16 MB, more than the limit"):
    model(tmp_path).stored  # noqa: B018


@pytest.mark.parametrize("theta", [None, "a", 10**400, float("nan"), True, -1])
def test_rotary_positions_of_no_number_are_refused(theta: Any):
  with one_sentence("config.json of init_from=", "rope_theta="):
    families.read(model_fields() | {"rope_theta": theta}, "config.json of init_from='a'")


def model_fields() -> dict[str, Any]:
  given = json.loads((Path(__file__).parents[1] / "golden/pretrained/llama/config.json").read_text())
  return {name: value for name, value in given.items() if not name.startswith("rope")}


def bpe(**model: Any) -> dict[str, Any]:
  return {
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "BPE", "vocab": {"a": 0, "</s>": 1}, "merges": []} | model,
  }


@pytest.mark.parametrize(
  "given,part",
  [
    (bpe(vocab={"a": 4294967290, "</s>": 1}), "it has token id 4294967290"),
    (
      bpe(vocab={"a": 0, "b": 1, "</s>": 2}, merges=[["a", "b"]], continuing_subword_prefix="##"),
      "does not begin with",
    ),
    # The library aborts the whole process for this one.
    (bpe(vocab={"éb": 0, "b": 1, "é": 2, "</s>": 3}, merges=[["b", "é"]], continuing_subword_prefix="a"), "['b', 'é']"),
    (bpe() | {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "Precompiled"),
    (bpe() | {"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "not a tokenizer of the Hugging Face form"),
  ],
)
def test_a_tokenizer_that_makes_its_library_fail_is_refused(given: dict[str, Any], part: str, tmp_path: Path):
  (tmp_path / "tokenizer.json").write_text(json.dumps(given))
  with one_sentence("data.tokenizer=", part):
    tokenizers.from_file(tmp_path / "tokenizer.json")


def test_a_tokenizer_has_a_limit_of_bytes(tmp_path: Path):
  with (tmp_path / "tokenizer.json").open("wb") as file:
    file.truncate(limits.DESCRIPTION + 1)
  with one_sentence("data.tokenizer=", "it has 64 MB, more than the limit of 64 MB"):
    tokenizers.from_file(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
  "entry,count,part",
  [
    (b'"a":0,', limits.ENTRIES, "524,289 entries, more than"),
    (b'"a b",', limits.STRINGS, "1,400,001 texts, more than"),
  ],
)
def test_a_tokenizer_has_a_limit_of_tokens(entry: bytes, count: int, part: str, tmp_path: Path):
  (tmp_path / "tokenizer.json").write_bytes(entry * (count + 1))
  with one_sentence("data.tokenizer=", f"it has about {part}"):
    tokenizers.from_file(tmp_path / "tokenizer.json")


def test_a_tokenizer_that_panics_later_is_refused(tmp_path: Path):
  decoder = {"type": "Strip", "content": "a", "start": 5, "stop": 5}
  (tmp_path / "tokenizer.json").write_text(json.dumps(bpe() | {"decoder": decoder}))
  found = tokenizers.from_file(tmp_path / "tokenizer.json")
  with one_sentence("data.tokenizer="):
    found.text.decode([0])


# Chat templates

DOUBLED = "{% set n = namespace(x=START) %}{% for i in range(60) %}{% set n.x = NEXT %}{% endfor %}{{ n.x }}"
RANGE = "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}"
HOSTILE = {
  "values": "{% set n = namespace(x=[1]) %}{% for i in range(13) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
  "loops": RANGE + "{% endfor %}" * 3,
  "calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
  "joins": DOUBLED.replace("START", "'aaaa'").replace("NEXT", "n.x ~ n.x"),
  "sums": DOUBLED.replace("START", "'aaaa'").replace("NEXT", "n.x + n.x"),
  "lists": DOUBLED.replace("START", "[1]").replace("NEXT", "n.x + n.x"),
  "nested": DOUBLED.replace("START", "[1]").replace("NEXT", "[n.x, n.x]"),
  "replace": DOUBLED.replace("START", "'aa'").replace("NEXT", "n.x|replace('a', 'aaaa')"),
  "method": DOUBLED.replace("START", "'aa'").replace("NEXT", "n.x.replace('a', 'aaaa')"),
  "powers": DOUBLED.replace("START", "9").replace("NEXT", "n.x * n.x"),
  "kept": "{% set x %}{% for a in range(99999) %}{{ 'a' * 9999 }}{% endfor %}{% endset %}",
  "center": "{{ 'a'|center(999999999) }}",
  "ljust": "{{ 'a'.ljust(999999999) }}",
  "percent": "{{ '%0999999999d' % 1 }}",
  "format": "{{ '{:999999999}'.format(1) }}",
  "filter": "{{ '%0999999999d'|format(1) }}",
  "indent": "{{ 'a'|indent(999999999, true) }}",
  "join": "{{ (['a' * 9999] * 999)|join('b' * 9999) }}",
  "bytes": "{{ (1).to_bytes(999999999, 'big') }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_template_has_limits_of_steps_and_of_sizes(name: str, monkeypatch: pytest.MonkeyPatch):
  """With few steps, and a clock that stands still: so it is the steps that end it."""
  monkeypatch.setattr(sandbox, "STEPS", 20_000)
  monkeypatch.setattr(sandbox, "LONGEST", 1 << 20)
  monkeypatch.setattr(sandbox, "NODES", 1 << 12)
  monkeypatch.setattr(sandbox.time, "monotonic", lambda: 0.0)
  template = Template(HOSTILE[name], {}, "the template")
  with pytest.raises(ConfigError, match="the template cannot write it") as caught:
    template.write(MESSAGES)
  assert isinstance(caught.value.__cause__, sandbox.TooMuch | OverflowError)


@pytest.mark.parametrize(
  "source,part",
  [
    ("a" * (sandbox.SOURCE + 1), "characters, more than"),
    ("{{ " + "~".join("a" * 20_000) + " }}", "joins more"),
  ],
)
def test_a_template_has_limits_before_it_runs(source: str, part: str):
  with one_sentence("the template", part):
    Template(source, {}, "the template").write(MESSAGES)


def test_a_template_has_a_limit_of_time(monkeypatch: pytest.MonkeyPatch):
  template = Template("{% for a in range(9999) %}a{% endfor %}", {}, "the template")
  assert template.write(MESSAGES).text == "a" * 9999
  now = iter(range(10_000))
  monkeypatch.setattr(sandbox.time, "monotonic", lambda: float(next(now)))
  with one_sentence("the template cannot write it (it takes too many steps)"):
    template.write(MESSAGES)
  assert next(now) == sandbox.SECONDS + 2  # it looked at the clock every OFTEN steps, and then stopped


def test_limits_change_nothing_that_a_template_writes():
  """As Jinja without them: sums of lists and texts, what loops know of themselves, formats and nested lists."""
  import jinja2

  source = (
    "{% for m in [messages[0]] + messages %}{{ loop.index ~ loop.length ~ loop.last }}{{ 'a' + m.role + 'b' ~ 3 }}"
    "{% endfor %}{{ '%s-%05d' % ('a', 3) }}{{ '{0}{1!r}'.format(1, 'b') }}{{ [1, [2, messages[0]]]|tojson }}"
    "{% set x %}{% for a in range(3) %}{{ a }}{% endfor %}{% endset %}{{ x|upper|replace('0', 'zero')|center(9) }}"
    "{% for k, v in messages[0]|items %}{{ k }}={{ v|trim|indent(2, true) }}{% endfor %}{{ 7 % 4 + 2 * 3 }}"
    "{% for a in messages|map(attribute='role') %}{{ loop.length }}{{ a.strip().split('s') }}{% endfor %}{{ (1, x) }}"
  )
  expected = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(source)
  expected.environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
  assert Template(source, {}, "T").write(MESSAGES).text == expected.environment.from_string(source).render(
    messages=MESSAGES
  )


# The real limits

LARGE: dict[str, tuple[str, Any]] = {
  "json line": ("json", lambda size: b'{"text": "' + b"a" * (size - 99) + "\U0001f600".encode() + b'"}\n'),
  "json values": ("json", lambda size: nested(size // 50)),
  "parquet": ("parquet", lambda size: table(["a" * (size - 99) + "\U0001f600"], use_dictionary=False)),
  "parquet dictionary": ("parquet", lambda size: table(
    pa.DictionaryArray.from_arrays(pa.array([0] * 9, pa.int32()), pa.array(["a" * (size - 99)])), store_schema=False
  )),
  "parquet deltas": ("parquet", lambda size: table(
    ["a" * (size - 99)] * 3, use_dictionary=False, column_encoding="DELTA_BYTE_ARRAY"
  )),
  "arrow": ("arrow", lambda size: batches(["a" * (size - 99) + "\U0001f600"])),
  "mds": ("mds", lambda size: shard(b"a" * (size - 4))),
}  # fmt: skip
PEAK = """
import sys
from pathlib import Path
from own_memory import peak_bytes
from row_files import file_of
from data.text import readers
from data.text.rows import Fields
from errors import ConfigError
try:
  count = sum(piece.last for piece in readers.read((file_of(Path(sys.argv[1]), sys.argv[2]),), Fields()))
except ConfigError as error:
  count = str(error)
print(count, peak_bytes(), sep="|")
"""


@pytest.mark.full
@pytest.mark.parametrize("factor", [1, 5])
@pytest.mark.parametrize("case", LARGE)
def test_no_file_takes_a_gigabyte(case: str, factor: int, tmp_path: Path):
  """Just below the limit it is read, and far above refused; each in a process of its own."""
  kind, make = LARGE[case]
  (tmp_path / "a").write_bytes(make(factor * limits.ROW))
  root = Path(__file__).parents[2]
  done = subprocess.run(
    [sys.executable, "-c", PEAK, str(tmp_path / "a"), kind], capture_output=True, text=True, check=True,
    env={"PYTHONPATH": f"{root}:{root / 'tests'}", "PATH": ""},
  )  # fmt: skip
  found, peak = done.stdout.strip().split("|")
  assert int(peak) < 1 << 30
  assert ("data.limit_mb" in found) == (factor > 1), found


def peak_of(code: str, file: Path) -> int:
  """The most memory of a process of its own that runs this code, in bytes."""
  imports, end = "import sys\nfrom pathlib import Path\nfrom own_memory import peak_bytes", "print(peak_bytes())"
  root = Path(__file__).parents[2]
  done = subprocess.run(
    [sys.executable, "-c", f"{imports}\n{code}\n{end}", str(file)],
    capture_output=True, text=True, check=True, env={"PYTHONPATH": f"{root}:{root / 'tests'}", "PATH": ""},
  )  # fmt: skip
  return int(done.stdout)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "I;16", "P"])
def test_no_image_takes_a_gigabyte(mode: str, tmp_path: Path):
  Image.new(mode, (8190, 8190)).save(tmp_path / "a.png", compress_level=1)
  code = "from data.images import decode\nassert decode.pixels(sys.argv[1], 'a', 3).shape == (8190, 8190, 3)"
  assert peak_of(code, tmp_path / "a.png") < 1 << 30


@pytest.mark.full
def test_no_tokenizer_takes_a_gigabyte(tmp_path: Path):
  vocab = {f"{i:06d}": i for i in range(limits.ENTRIES - 99)} | {"</s>": limits.ENTRIES}
  (tmp_path / "tokenizer.json").write_text(json.dumps(bpe(vocab=vocab)))
  code = "from data.text import tokenizers\ntokenizers.from_file(Path(sys.argv[1]))"
  assert peak_of(code, tmp_path / "tokenizer.json") < 1 << 30


@pytest.mark.full
def test_no_header_of_safetensors_takes_a_gigabyte(tmp_path: Path):
  model(tmp_path)
  entries = (f'"{i}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for i in range(290_000))
  header = ("{" + ",".join(entries) + "}").encode()
  assert 0.9 * limits.HEADER < len(header) < limits.HEADER
  (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
  code = "from checkpointing.pretrained.folder import Folder\nassert len(Folder(sys.argv[1]).stored) == 290_000"
  assert peak_of(code, tmp_path) < 1 << 30
