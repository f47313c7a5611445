"""What is in a file, by its first bytes. A name only decides where bytes cannot, as for CSV or token ids."""

import io
import json
import os
import re
import struct
import warnings
import zlib
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from data.opening import BUFFER, decompressed
from data.recognition import places
from errors import ConfigError, first_line

HEAD = 1 << 13  # bytes that are looked at, decompressed
LONGEST_LINE = 1 << 26  # bytes in which the end of a first line is looked for, where it says whether others follow
# The first bytes of files, and their kinds. Code below recognises the other kinds.
MAGIC = (
  (b"PAR1", "parquet"), (b"ARROW1", "arrow"), (b"\xff\xff\xff\xff", "arrow"), (b"FEA1", "feather"),
  (b"\x83\xaf\x70\xd1\x0d\x88\x4a\x3f", "array_record"), (b"\x89HDF\r\n\x1a\n", "hdf5"), (b"LITPKDS", "packed"),
  (b"MMIDIDX\0\0", "index"), (b"TNTIDX\0\0", "fairseq"), (b"GGUF", "gguf"), (b"%PDF-", "pdf"), (b"Obj\1", "avro"),
  (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "office"), (b"SQLite format 3\0", "sqlite"),
  (b"ORC", "orc"), (b"7z\xbc\xaf\x27\x1c", "7z"), (b"Rar!\x1a\7", "rar"),
  (b"\x89PNG\r\n", "image"), (b"\xff\xd8\xff", "image"), (b"GIF8", "image"), (b"II*\0", "image"), (b"MM\0*", "image"),
  (b"\4\x22\x4d\x18", "lz4"), (b"\xff\6\0\0sNaPpY", "snappy"), (b"\x1f\x9d", "unix_z"),
  (b"version https://git-lfs.github.com/spec/", "lfs"), (b"WARC/", "warc"), (b"<mediawiki", "mediawiki"),
  (b"\x7fELF", "compiled"), (b"\xca\xfe\xba\xbe", "compiled"), (b"\xcf\xfa\xed\xfe", "compiled"),
  (b"\xff\xfe", "utf16"), (b"\xfe\xff", "utf16"), (b"\0\0\xfe\xff", "utf16"),
)  # fmt: skip
READABLE = ("lfs", "warc", "mediawiki", "pdf")  # kinds of these that may hold letters only
COMPRESSED = (  # a file of zstd may begin with a frame that holds no content
  (re.compile(rb"\x1f\x8b\x08"), "gzip"), (re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"), "zstd"),
  (re.compile(rb"\xfd7zXZ\0"), "xz"), (re.compile(rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)"), "bz2"),
)  # fmt: skip
SUFFIXES = {
  ".gz": "gzip", ".gzip": "gzip", ".bgz": "gzip", ".zst": "zstd", ".zstd": "zstd", ".xz": "xz", ".bz2": "bz2",
}  # fmt: skip
ENDINGS = tuple(case for suffix in SUFFIXES for case in (suffix, suffix.upper()))
# Names that promise what the content must then be.
PROMISED = {".parquet": "parquet", ".arrow": "arrow", ".mds": "mds", ".npz": "npz", ".safetensors": "safetensors"}
LINES, IDS = (".jsonl", ".ndjson"), (".bin", ".npy")
COMPILED = (".pyc", ".pyo", ".o", ".obj", ".dll", ".exe", ".lib", ".a")
OFFICE = (".docx", ".xlsx", ".pptx", ".odt", ".ods", ".odp", ".epub")
LLMC: dict[int, np.dtype] = {
  20240520: np.dtype("<u2"),
  20240801: np.dtype("<u4"),
}  # the magic of llm.c's token files, and the type of ids
LLMC_HEADER = 256 * 4  # bytes
FIRST_FIELD = re.compile(rb'\{\s*"(?:[^"\\]|\\.)*"\s*:\s*["\[{\dtfn-]')  # how an object of JSON begins
OF_OBJECTS = re.compile(rb"\[\s*\{\s*[\"}]")  # how an array of them begins
MASK, POLYNOMIAL = 0xA282EAD8, 0x82F63B78  # of the checksums of TFRecord


class Content(NamedTuple):
  """What is in a file.

  Attributes:
    kind: a key of KINDS.
    compression: `gzip`, `zstd`, `xz`, `bz2`, or "" if it is plain.
  """

  kind: str
  compression: str = ""


def plain_name(name: str) -> str:
  """The name of a file without the suffix of its compression."""
  if name.endswith(ENDINGS):
    return name[: name.rindex(".")]
  return name


def look(path: str, size: int) -> Content:
  """What is in a file of this size. Opens it once. Raises OSError if it cannot be read."""
  if not size:
    return Content("empty")
  suffixes = [os.path.splitext(path)[1].lower(), os.path.splitext(plain_name(path))[1].lower()]
  with open(path, "rb", buffering=0) as file:
    head = file.read(HEAD)
    compression = _compression(head)
    if not compression:
      if suffixes[0] in SUFFIXES:
        return Content("not_compressed")
      return Content(_kind(head, suffixes[1], size, len(head) == size, file))
    file.seek(0)
    try:
      stream = io.BufferedReader(decompressed(file, path, compression), HEAD)
      head = stream.read(HEAD)
      kind = _kind(head, suffixes[1], None, len(head) < HEAD, stream)
    except (OSError, EOFError, zlib.error, ConfigError) as error:
      if isinstance(error, OSError) and error.errno:
        raise
      head = b""  # reading it reports what is wrong
  if not head:
    return Content(_by_name(suffixes[1]), compression)
  kind = "binary" if kind in ("ids", "llmc", "npy", "numbers") else kind  # arrays are read in place
  return Content(kind, compression)


def _compression(head: bytes) -> str:
  return next((name for magic, name in COMPRESSED if magic.match(head)), "")


def _by_name(suffix: str) -> str:
  """The kind of a file whose content cannot be seen."""
  return PROMISED.get(
    suffix, "json" if suffix in (*LINES, ".json") else suffix[1:] if suffix in (".csv", ".tsv") else "plain"
  )


def _kind(head: bytes, suffix: str, size: int | None, is_whole: bool, rest: Any) -> str:
  """The kind of a file with this suffix that begins with `head`. `size` is None if it is compressed.

  The `rest` of the file is read only if it matters.
  """
  kind = _by_magic(head, suffix, size)
  if not kind:
    if suffix == ".mds":
      return "mds"
    if suffix in IDS and not _is_ascii(head):
      return _ids(head, suffix)
    kind = "binary" if b"\0" in head else _of_text(head, suffix, is_whole, rest)
  if suffix in PROMISED and kind not in (PROMISED[suffix], "lfs"):
    return "not_as_named"
  return kind


def _by_magic(head: bytes, suffix: str, size: int | None) -> str:
  kind = next((kind for magic, kind in MAGIC if head.startswith(magic)), "")
  weak = (kind in ("utf16", "arrow") and suffix in IDS) or (kind == "unix_z" and suffix != ".z")
  if kind and not weak and (kind in READABLE or not _is_ascii(head)):  # a text may begin with ORC
    return kind
  if suffix in COMPILED and b"\0" in head:
    return "compiled"
  if head.startswith(b"\x93NUMPY"):
    return "npy" if _is_ids(head) else "numbers"
  if head.startswith(b"PK\3\4"):
    first = head[30 : 30 + int.from_bytes(head[26:28], "little")]
    is_weights = first.endswith((b"/data.pkl", b"/.format_version", b"/byteorder")) or suffix in (".pt", ".pth")
    return "npz" if suffix == ".npz" else "office" if suffix in OFFICE else "pytorch" if is_weights else "zip"
  if head[257:262] == b"ustar":
    return "tar"
  is_pickle = head[:1] == b"\x80" and 2 <= int.from_bytes(head[1:2]) <= 5 and suffix not in IDS
  if is_pickle or suffix in (".pkl", ".pickle", ".pt", ".pth"):
    return "pickle"
  if (head[:4] == b"RIFF" and head[8:12] == b"WEBP") or (head[:2] == b"BM" and suffix == ".bmp"):
    return "image"
  if head[:2] in (b"P5", b"P6") and suffix in (".pgm", ".ppm", ".pnm"):
    return "image"
  if size and len(head) > 9 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= size - 8:
    return "safetensors"
  if head[16:20] == b"\xde\xc0\xef\xbe":
    return "lmdb"
  if len(head) >= 12 and b"\0" in head[:8] and _masked_crc(head[:8]) == int.from_bytes(head[8:12], "little"):
    return "tfrecord"
  return ""


def _masked_crc(data: bytes) -> int:
  """The checksum of TFRecord: CRC-32C, rotated and shifted."""
  crc = 0xFFFFFFFF
  for byte in data:
    crc ^= byte
    for _ in range(8):
      crc = crc >> 1 ^ (POLYNOMIAL if crc & 1 else 0)
  crc ^= 0xFFFFFFFF
  return ((crc >> 15 | crc << 17) + MASK) & 0xFFFFFFFF


def _ids(head: bytes, suffix: str) -> str:
  """The kind of a file with the name of token ids."""
  if head[:2] in (b"\x80\x02", b"\x80\x04") and head[2:3] in (b"}", b"\x8a", b"\x95"):
    return "pickle"
  magic, version = struct.unpack("<ii", head[:8]) if len(head) >= 8 else (0, 0)
  return "llmc" if suffix == ".bin" and magic in LLMC and version == 1 else "ids"


def _is_ids(head: bytes) -> bool:
  """Whether a file of NumPy holds what may be token ids: integers in C order, in one or two dimensions."""
  try:
    with warnings.catch_warnings(action="ignore"):  # about files of Python 2
      shape, fortran, dtype = npy_header(io.BytesIO(head))
  except (ValueError, EOFError, SyntaxError):
    return False
  return dtype.kind in "iu" and dtype.byteorder in "<=|" and len(shape) in (1, 2) and not (fortran and len(shape) == 2)


def npy_header(file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype]:
  """The shape, whether it is in Fortran order, and the dtype of a file of NumPy. Leaves it where the numbers begin.

  Raises ValueError for a damaged header.
  """
  try:
    if np.lib.format.read_magic(file) == (1, 0):
      return np.lib.format.read_array_header_1_0(file)
    return np.lib.format.read_array_header_2_0(file)
  except (ValueError, EOFError, SyntaxError):
    raise
  except Exception as error:  # it is read as a literal of Python, which may fail in many ways
    raise ValueError(first_line(error)) from error


def _is_ascii(head: bytes) -> bool:
  """Whether it is printable, as no token ids are."""
  return not head.translate(None, bytes(range(32, 127)) + b"\t\r\n")


def _of_text(head: bytes, suffix: str, is_whole: bool, after: Any) -> str:
  """The kind of a text that begins with `head`, or is that."""
  if suffix in (".csv", ".tsv"):
    return suffix[1:]
  if places.is_code(suffix):
    return "plain"
  otherwise = "json" if suffix in LINES else "json_value" if suffix == ".json" else "plain"
  start = head.removeprefix(b"\xef\xbb\xbf").lstrip()
  if start.startswith(b"["):
    return "json_values" if OF_OBJECTS.match(start) else otherwise
  if not start.startswith(b"{"):
    return otherwise
  first, newline, rest = start.partition(b"\n")
  rest = rest.lstrip()
  if _is_object(first):
    if rest.startswith(b"{") or suffix in LINES or (rest and suffix == ".json"):
      return "json"
    return otherwise
  if not newline and not is_whole:  # a line longer than what was read
    is_object = FIRST_FIELD.match(first) and (suffix in LINES or _has_lines(after))
    return "json" if is_object else otherwise
  found, rest = _value(start)
  if found and rest.startswith(b"{"):
    return "json_values"  # several lines each
  return otherwise


def _has_lines(file: Any) -> bool:
  """Whether another line follows the one that is being read. Supposes so if that is very long."""
  for _ in range(0, LONGEST_LINE, BUFFER):
    if not (block := file.read(BUFFER)):
      return False
    _, newline, rest = block.partition(b"\n")
    if newline:
      return bool((rest or file.read(BUFFER) or b"").strip())
  return True


def _is_object(line: bytes) -> bool:
  try:
    return isinstance(json.loads(line), dict)
  except (ValueError, RecursionError):
    return False


def _value(start: bytes) -> tuple[bool, bytes]:
  """Whether a whole value of JSON is at the start, and what follows it."""
  text = start.decode(errors="replace")
  try:
    _, end = json.JSONDecoder().raw_decode(text)
  except (ValueError, RecursionError):
    return False, b""
  return True, text[end:].lstrip().encode()
