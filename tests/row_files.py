"""Files of rows for tests: how a file is found, and the shards in golden/mds with what is in them."""

import json
from pathlib import Path

from data.recognition.content import SUFFIXES
from data.text.files import TextFile

GOLDEN = Path(__file__).parent / "golden/mds"
MDS_ROWS = [json.loads(line) for line in (GOLDEN / "rows.jsonl").read_text().splitlines()]


def file_of(path: Path, kind: str) -> TextFile:
  """The file at a path as one of a text, of which a part is held out."""
  stat, compression = path.stat(), SUFFIXES.get(path.suffix, "")
  return TextFile(str(path), str(path.parent), stat.st_size, stat.st_mtime_ns, None, kind, compression)


def mds_files(name: str) -> tuple[TextFile, ...]:
  """The shards in a folder of golden/mds."""
  return tuple(file_of(path, "mds") for path in sorted((GOLDEN / name).glob("shard.*")))
