"""The kinds of files: how people call each, what it is read as, and what to do about one that is not read."""

import dataclasses

TEXT, ROWS, TOKENS = "text", "rows", "tokens"  # the forms: what a file is read as
FORMS = (TEXT, ROWS, TOKENS)


@dataclasses.dataclass(frozen=True)
class Kind:
  """A kind of file.

  Attributes:
    words: what people call it.
    form: what it is read as; "" if it is not read.
    fix: what to do about a file that is not read, as an order.
    is_missing: whether the data that belongs in such a file is not there.
  """

  words: str
  form: str = ""
  fix: str = ""
  is_missing: bool = False


_UNPACK = "unpack it, and name the folder"
_IMAGES = "for images, use a preset such as --config=configs/fsdp.py:images"
_AS_JSON = 'write a JSON object a line, {"text": "..."}, into a file .jsonl'
_AS_IDS = "write the ids with numpy.save, as a .npy of one dimension"

KINDS = {
  # Text
  "plain": Kind("plain text", TEXT),
  # Rows: each is a document
  "json": Kind("JSON lines", ROWS),
  "json_values": Kind("JSON objects", ROWS),
  "csv": Kind("CSV", ROWS),
  "tsv": Kind("TSV", ROWS),
  "parquet": Kind("Parquet", ROWS),
  "arrow": Kind("Arrow", ROWS),
  "mds": Kind("MDS", ROWS),
  "array_record": Kind("array_record", ROWS),
  # Token ids
  "ids": Kind("token ids without a header", TOKENS),
  "llmc": Kind("llm.c token ids", TOKENS),
  "npy": Kind("NumPy token ids", TOKENS),
  "megatron": Kind("Megatron token ids", TOKENS),
  # What describes other files
  "index": Kind("Megatron index"),
  "json_value": Kind("a single JSON value", fix=_AS_JSON + " (if its field data has the rows: jq -c '.data[]' FILE)"),
  "metadata": Kind("metadata"),
  "empty": Kind("empty"),
  # What stands for files that are not there
  "lfs": Kind("Git LFS pointer", fix="fetch the content with: git lfs pull", is_missing=True),
  "broken_link": Kind("link to a missing file", fix="fetch that file, or remove the link", is_missing=True),
  "unfinished": Kind(
    "download that has not ended", fix="let it end, remove it, or rename it if it is whole", is_missing=True
  ),
  "folder_link": Kind("link to a folder", fix="name that folder in data.path, separated by a comma"),
  # Forms of data sets that are not read
  "tar": Kind("tar archive, such as WebDataset", fix="unpack its texts with: tar -xf FILE; " + _AS_JSON),
  "tfrecord": Kind(
    "TFRecord", fix="write array_record, with TensorFlow Datasets' file_format='array_record', or JSON lines"
  ),
  "litdata": Kind("litdata chunk", fix="read it with litdata.StreamingDataset, and " + _AS_IDS),
  "packed": Kind("PackedDataset of Lit-GPT", fix="read it with its PackedDataset, and " + _AS_IDS),
  "hdf5": Kind("HDF5", fix="read it with h5py, and " + _AS_JSON + ", or token ids with numpy.save"),
  "fairseq": Kind("fairseq index", fix="read the data with fairseq, and " + _AS_IDS),
  "numbers": Kind(
    "NumPy array that is not token ids", fix="save integers, in one or two dimensions and in C order, with numpy.save"
  ),
  "npz": Kind("NumPy archive (.npz)", fix="save token ids with numpy.save; " + _IMAGES),
  "warc": Kind("WARC, web pages as fetched", fix="extract the text, such as with trafilatura, and " + _AS_JSON),
  "mediawiki": Kind(
    "MediaWiki dump", fix="extract the text with wikiextractor --json, or read it as it is with data.form='text'"
  ),
  "lmdb": Kind("LMDB", fix="read it with lmdb, and " + _AS_JSON),
  "sqlite": Kind("SQLite", fix="export a table with: sqlite3 -csv -header FILE 'SELECT ...' > rows.csv"),
  "avro": Kind("Avro", fix="convert it to Parquet or JSON lines"),
  "orc": Kind("ORC", fix="convert it to Parquet, such as with pyarrow.orc and pyarrow.parquet"),
  "feather": Kind("Feather version 1", fix="convert it to Parquet, with pyarrow.feather and pyarrow.parquet"),
  "table": Kind(
    "file of a Delta, Iceberg or Hudi table, of which not all files count",
    fix="write the table as Parquet, such as with deltalake or pyiceberg, or name the files themselves",
  ),
  # What holds no text
  "safetensors": Kind("safetensors, weights of a model", fix="name the data; a model goes into init_from"),
  "gguf": Kind("GGUF, weights of a model", fix="name the data; init_from takes a folder with safetensors"),
  "pytorch": Kind("PyTorch archive", fix="name the data; token ids go into a .npy, with numpy.save"),
  "pickle": Kind("pickle, which can run code when read", fix="write JSON lines, or token ids with numpy.save"),
  "zip": Kind("zip archive", fix=_UNPACK),
  "7z": Kind("7z archive", fix=_UNPACK),
  "rar": Kind("RAR archive", fix=_UNPACK),
  "office": Kind("office document or e-book", fix="convert it to plain text, such as with pandoc"),
  "pdf": Kind("PDF", fix="convert it to plain text, such as with pdftotext"),
  "compiled": Kind("compiled program"),
  "image": Kind("image", fix=_IMAGES),
  "utf16": Kind("text in UTF-16 or UTF-32", fix="convert it with: iconv -f UTF-16 -t UTF-8 FILE > FILE.txt"),
  "lz4": Kind("lz4-compressed", fix="decompress it with: lz4 -d FILE"),
  "snappy": Kind("snappy-compressed", fix="decompress it, or compress it with gzip or zstd"),
  "unix_z": Kind("compressed (.Z)", fix="decompress it with: uncompress FILE"),
  "not_compressed": Kind(
    "not compressed, although its name says so",
    fix="fetch or write it again, or give it the name of what it is",
    is_missing=True,
  ),
  "not_as_named": Kind("something else than its name says", fix="fetch or write it again", is_missing=True),
  "binary": Kind("binary", fix="use UTF-8 text, rows or token ids (docs/data.md lists the forms); " + _IMAGES),
}  # fmt: skip
