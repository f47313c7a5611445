"""Damaged and hostile files for every reader: each must be read, or refused in one sentence. Not part of `make test`.

    make fuzz                                    # 10,000 cases for each reader
    python -m tests.fuzz --cases=100000 --only=parquet

Needs `pip install '.[fuzz]'`. It changes small valid files: bytes, and of JSON also values. Of the first cases, which
Hypothesis makes, what fails is shown in the smallest form. Put it into tests/data/test_hostile_files.py and correct the
reader.
"""

import argparse
import contextlib
import copy
import functools
import gzip
import io
import json
import math
import random
import struct
import sys
import tempfile
import time
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from kept import make
from model_folders import FOLDER, NAMES
from row_files import GOLDEN, file_of

from checkpointing import finished, history, reading, record
from checkpointing.memory import store, tier
from checkpointing.pretrained.folder import Folder
from data import sealed
from data.images import arrays, decode
from data.recognition import content, survey
from data.text import headers, megatron, readers, rows, templates, tokenizers
from data.text.rows import Fields
from errors import ConfigError
from job import supervisor
from job.attempt import Here
from reporting import heartbeat, source
from reporting.evaluation import choices
from runtime.storage.bucket import location
from tools import checkpoint, profile, report
from training import settings

LIMIT = 1 << 20  # of a row
SHRINKING = 500  # cases that Hypothesis makes, and shrinks if they fail
ROWS = [{"text": f"some words {i} é", "label": i % 2, "ids": [1, 2, i]} for i in range(5)]
MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
Read = Callable[[Path], Any]


def rows_of(kind: str, **fields: Any) -> Read:
  return lambda path: list(readers.read((file_of(path, kind),), Fields(limit=LIMIT, **fields)))


def tokenizer(path: Path) -> None:
  own = path.with_name("tokenizer.json")
  own.write_bytes(path.read_bytes())
  found = tokenizers.from_file(own)
  found.encode([b"some words", "é\0".encode()])
  found.text.decode(found.text.encode("some words"))


def model(name: str) -> Read:
  """A model folder in which this file is replaced."""

  def read(path: Path) -> None:
    folder = path.with_name("model")
    folder.mkdir(exist_ok=True)
    for file in (FOLDER / NAMES[0]).glob("*.[js]*"):
      (folder / file.name).write_bytes(path.read_bytes() if file.name == name else file.read_bytes())
    found = Folder(str(folder))
    assert found.fields, found.notes
    found.stored  # noqa: B018

  return read


def template(path: Path) -> None:
  given = path.read_bytes()
  (path.with_name("tokenizer_config.json")).write_bytes(given)
  found = templates.found_beside(path.with_name("tokenizer.json"))
  found.digest  # noqa: B018
  source = found.sources.get("default")
  if source is not None:
    templates.Template(source, found.variables, "T").write(MESSAGES, prompt=True)


def parquet() -> bytes:
  import pyarrow as pa
  import pyarrow.parquet as pq

  out = io.BytesIO()
  pq.write_table(pa.Table.from_pylist(ROWS), out)
  return out.getvalue()


def arrow(compression: str | None, stream: bool) -> bytes:
  import pyarrow as pa

  out, table = io.BytesIO(), pa.Table.from_pylist(ROWS)
  options = pa.ipc.IpcWriteOptions(compression=compression)
  with (pa.ipc.new_stream if stream else pa.ipc.new_file)(out, table.schema, options=options) as file:
    file.write_table(table)
  return out.getvalue()


def npz() -> bytes:
  out = io.BytesIO()
  np.savez(out, image=np.zeros((4, 4, 4), np.uint8), label=np.arange(4) % 2)
  return out.getvalue()


def image(form: str) -> bytes:
  from PIL import Image

  out = io.BytesIO()
  Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3)).save(out, form)
  return out.getvalue()


def lines() -> bytes:
  return b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)


def golden(name: str) -> bytes:
  return (FOLDER / NAMES[0] / name).read_bytes()


def mds() -> bytes:
  shards = map(Path.read_bytes, sorted(GOLDEN.glob("*/shard.*.mds")))
  return next(shard for shard in shards if b'"text"' in shard)


def trained() -> bytes:
  with tempfile.TemporaryDirectory() as folder:
    tokenizers.train_bpe(Path(folder), [b"some words and more words"], 270)
    return (Path(folder) / "tokenizer.json").read_bytes()


def index() -> bytes:
  return b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 2, 3) + struct.pack("<2i2q3q", 2, 3, 0, 4, 0, 1, 2)


def megatron_index(path: Path) -> None:
  ids = path.with_name("a.bin")
  ids.write_bytes(bytes(10))
  list(megatron.read_index(path, ids).ends())


@functools.cache
def kept() -> dict[str, bytes]:
  """The files of a run that an earlier commit has made, without its arrays, and with a journal and a sign of life."""
  with zipfile.ZipFile(make.FOLDER / "runs/windows/workdir.zip") as archive:
    found = {name: archive.read(name) for name in archive.namelist() if "ocdbt" not in name and "/d/" not in name}
  clock = {"began": 1.7e9, "wall_time": {"set-up": 3.0, "train": 60.5, "checkpoint": 1.0}}
  events = [
    {"event": "start", "step": 0, "time": 1.7e9, "source": "checkpoint", "host": "a", "command": "python", **clock},
    {"event": "evaluation", "step": 4, "time": 1.7e9 + 5, "loss": 2.5, "sample": "some text", **clock},
    {"event": "failure", "step": 7, "time": 1.7e9 + 9, "error": "E", "wait": 3, **clock},
    {"event": "end", "step": 9, "time": 1.7e9 + 99, **clock, "loss": 2.0},
  ]
  beat = clock | {name: {str: "x", dict: {}}.get(kind, 1) for name, kind in heartbeat.READ.items() if name not in clock}
  note, job = {"run": "ab", "step": 3}, {"starts": 2, "saved": 3, "failures": [1], "refused": {}, "lost": {"a": 1.5}}
  made = {"heartbeats/0.json": beat, tier.NOTE: note, supervisor.STATE: job, "checkpoints/sent.json": {"steps": [20]}}
  found |= {name: json.dumps(value).encode() for name, value in made.items()}
  return found | {"journal.jsonl": b"".join(json.dumps(event).encode() + b"\n" for event in events)}


RECORD = f"checkpoints/20/{reading.RECORD}"


def workdir(name: str, *tools: Callable[[Path], Any]) -> tuple[Callable[[], bytes], Read]:
  """A workdir in which this file is replaced, as these of our tools read it."""

  def read(path: Path) -> None:
    at = path.with_name("workdir")
    for file, held in kept().items() if not at.exists() else ():
      (at / file).parent.mkdir(parents=True, exist_ok=True)
      (at / file).write_bytes(held)
    (at / name).write_bytes(path.read_bytes())
    (at / "report.html").unlink(missing_ok=True)
    sentences = [_said(lambda tool=tool: tool(at)) for tool in tools]
    for sentence in filter(None, sentences):
      raise ConfigError(sentence)

  return lambda: kept()[name], read


def _said(run: Callable[[], Any]) -> str:
  try:
    with contextlib.redirect_stdout(io.StringIO()):
      run()
  except ConfigError as error:
    return str(error)
  return ""


def resumed(at: Path) -> None:
  """What a run asks of a record before it resumes from it, or says of it."""
  saved, now = reading.read_record(at / "checkpoints/20"), json.loads(kept()[RECORD])
  if saved is not None:
    record.check_version(saved, now, "a")
    record.changes(saved, now)
    history.continued(saved["data"], now["data"] | {"turns": [1, 1]}, saved["loop"]["step"])
    history.change(saved["data"], now["data"])
    record.check_same_run(saved, now, "a")


def opened(at: Path) -> None:
  found = source.open_model(str(at))
  settings.program(found.config, "cpu")


def page(at: Path) -> None:
  report.main([str(at), f"--html={at}/report.html"])


def shared_page(at: Path) -> None:
  report.main([str(at), f"--html={at}/report.html", "--share"])


def step_of(at: Path) -> None:
  settings.program(profile.config_of(at), "cpu")


def listed(at: Path) -> None:
  checkpoint.main([str(at)])
  finished.is_finished(location(str(at), "workdir"))


def job_of(at: Path) -> None:
  supervisor.Supervisor(supervisor.Policy(1, 1), [], at, Path("x"), None, Here(1, 1))


def class_names(path: Path) -> None:
  import pyarrow as pa
  import pyarrow.parquet as pq

  own = path.with_name("rows")
  pq.write_table(pa.table({"label": [1]}).replace_schema_metadata({"huggingface": path.read_bytes()}), own)
  rows.class_names(file_of(own, "parquet"), "label")


def prepared(name: str) -> tuple[Callable[[], bytes], Read]:
  """A cache in which this file is replaced: what the user of another machine, or `cache_owner`, has prepared.

  For files of the folder itself, what is written beside it fits them, so that they are read.
  """

  keys: dict[Path, str] = {}

  def at(path: Path) -> Path:
    return path.with_name("cache")

  def load(path: Path) -> Path:
    text = path.with_name("text.txt")
    if not text.exists():
      text.write_bytes(b"".join(b"some words %d\n" % i for i in range(99)))
    fields = {"data.path": str(text), "data.cache_dir": str(at(path)), "model.seq_len": 16, "model.vocab_size": 0}
    config = make.base.get_config()
    config.update_from_flattened_dict(fields)
    make.data.text.load(config)
    (folder,) = at(path).glob("text-*")
    return folder

  def file(folder: Path) -> Path:
    return folder / name if name else sealed.beside(folder)

  def first() -> bytes:
    with tempfile.TemporaryDirectory() as there:
      content = file(load(Path(there) / "a")).read_bytes()
    return content if name else content.replace(json.loads(content)["key"].encode(), b"KEY")

  def read(path: Path) -> None:
    if not at(path).exists():
      made = load(path)
      keys[made] = json.loads(sealed.beside(made).read_bytes())["key"]
    (folder,) = at(path).glob("text-*")
    file(folder).write_bytes(path.read_bytes().replace(b"KEY", keys[folder].encode()))
    if name:
      sealed.seal(folder, folder, keys[folder])
    load(path)

  return first, read


def index_of_memory(path: Path) -> None:
  with contextlib.suppress(store.Damaged):
    content = path.read_bytes()
    store.parsed(content, store.zlib.crc32(content))


def surveyed(path: Path) -> None:
  root = path.with_name("cache")
  file = survey._file(str(root), str(path.parent))
  file.parent.mkdir(parents=True, exist_ok=True)
  file.write_bytes(path.read_bytes().replace(b"PATH", str(path.parent).encode()))
  survey._kept(str(root), str(path.parent))


TEMPLATE = (
  "{% for m in messages %}{{ '<|' + m['role'] + '|>' ~ m.content|trim }}{% if loop.last %}!{% endif %}{% endfor %}"
)
READERS: dict[str, tuple[Callable[[], bytes], Read]] = {
  "recognition": (parquet, lambda path: content.look(str(path), path.stat().st_size)),
  "recognition_gz": (lambda: gzip.compress(lines(), mtime=0), lambda p: content.look(str(p), p.stat().st_size)),
  "json": (lines, rows_of("json")),
  "json_ids": (lines, rows_of("json", text="ids")),
  "json_values": (lambda: json.dumps(ROWS).encode(), rows_of("json_values")),
  "csv": (lambda: b'text,n\n"a ""b"", c",1\nd,2\n', rows_of("csv")),
  "parquet": (parquet, rows_of("parquet")),
  "parquet_ids": (parquet, rows_of("parquet", text="ids")),
  "arrow": (lambda: arrow(None, False), rows_of("arrow")),
  "arrow_zstd": (lambda: arrow("zstd", False), rows_of("arrow")),
  "arrow_stream": (lambda: arrow("lz4", True), rows_of("arrow", text="ids")),
  "mds": (mds, rows_of("mds")),
  "npz": (npz, lambda path: arrays.Arrays(path, "data.path").open().train.encoded(0, 1)),
  "png": (lambda: image("PNG"), lambda path: decode.pixels(str(path), str(path), 3, limit=LIMIT)),
  "jpeg": (lambda: image("JPEG"), lambda path: decode.pixels(path.read_bytes(), "a", 1, 4, limit=LIMIT)),
  "npy": (lambda: b"", lambda path: headers.npy(path)),
  "megatron": (index, megatron_index),
  "tokenizer": (trained, tokenizer),
  "config": (lambda: golden("config.json"), model("config.json")),
  "safetensors": (lambda: golden("model.safetensors"), model("model.safetensors")),
  "record": workdir(RECORD, listed, resumed, opened),
  "config_json": workdir("config.json", step_of, shared_page),
  "journal": workdir("journal.jsonl", page, shared_page),
  "metrics": workdir("metrics.jsonl", page),
  "heartbeat": workdir("heartbeats/0.json", page),
  "note": workdir(tier.NOTE, tier.note_of, tier.newest),
  "supervisor": workdir(supervisor.STATE, job_of),
  "sent": workdir("checkpoints/sent.json", listed),
  "manifest": prepared(""),
  "meta": prepared("meta.json"),
  "memory": (lambda: json.dumps({"entries": [[["a", [[0, 2]], "float32"], 0, 5]], "record": {}}).encode(),
             index_of_memory),
  "survey": (lambda: json.dumps({"version": [survey.VERSION, "PATH"], "files": ["a"], "sizes": [1], "changed": [1],
                                 "kinds": ["json"], "compressions": [""]}).encode(), surveyed),
  "class_names": (lambda: b'{"info": {"features": {"label": {"names": ["a", "b"]}}}}', class_names),
  "choices": (lambda: b'{"question": "a", "choices": ["b", "c"], "answer": "b"}\n' * 2,
              lambda path: choices.read(str(path))),
  "template": (lambda: json.dumps({"chat_template": TEMPLATE, "eos_token": "</s>"}).encode(), template),
}  # fmt: skip


def npy() -> bytes:
  out = io.BytesIO()
  np.save(out, np.arange(9, dtype="<u2"))
  return out.getvalue()


READERS["npy"] = (npy, READERS["npy"][1])


WORDS = (
  b"\xff\xff\xff\xff", b"\0\0\0\x80", b"\xff" * 8, b"[" * 3000, b"null", b"-1", b"1e999", b"4294967295", b'"', b"{}",
  b"\0",
)  # fmt: skip
VALUES = (
  None, True, -1, 0, 2, 1 << 31, 1 << 32, 1 << 65, 1e300, -0.5, math.nan, "", "é", "\ud800", "../x",
  [], {}, [[]], {"": 0},
)  # fmt: skip


def shrinking(seed: bytes) -> Any:
  """A strategy of Hypothesis: the seed with some changes, of which it finds the fewest that fail."""
  from hypothesis import strategies as st

  piece = st.one_of(st.binary(max_size=4), st.sampled_from(WORDS))
  change = st.tuples(st.integers(0, max(1, len(seed))), st.integers(0, 8), piece)
  plain = st.lists(change, min_size=1, max_size=4).map(lambda changes: _apply(seed, changes))
  lines, places = _values(seed)
  if not places:
    return st.one_of(plain, st.integers(0, len(seed)).map(lambda size: seed[:size]))
  atoms = st.one_of(st.integers(-(1 << 65), 1 << 65), st.floats(), st.text(max_size=5), st.sampled_from(VALUES))
  edit = st.lists(st.tuples(st.sampled_from(places), atoms), min_size=1, max_size=3)
  return st.one_of(plain, edit.map(lambda edits: _edited(lines, edits)))


def changing(seed: bytes) -> Callable[[random.Random], bytes]:
  """The same changes by a plain generator, which makes a hundred files in the time that Hypothesis needs for one."""
  lines, places = _values(seed)

  def some(chance: random.Random) -> bytes:
    if places and chance.random() < 0.5:
      edits = [(chance.choice(places), chance.choice(VALUES)) for _ in range(chance.randint(1, 3))]
      return _edited(lines, edits)
    if chance.random() < 0.1:
      return seed[: chance.randint(0, len(seed))]
    piece = lambda: chance.choice(WORDS) if chance.random() < 0.5 else chance.randbytes(chance.randint(0, 4))
    at = lambda: chance.randint(0, min(len(seed), 64) if chance.random() < 0.3 else len(seed))
    return _apply(seed, [(at(), chance.randint(0, 8), piece()) for _ in range(chance.randint(1, 4))])

  return some


def _values(seed: bytes) -> tuple[list[Any], list[tuple[Any, ...]]]:
  """The values of JSON, or of JSON lines, and the paths of what is in them; none for other files."""
  for parts in ([seed], seed.splitlines()):
    try:
      lines = [json.loads(part) for part in parts]
    except ValueError:
      continue
    return lines, list(_places(lines))
  return [], []


def _apply(seed: bytes, changes: list[tuple[int, int, bytes]]) -> bytes:
  for at, length, new in changes:
    seed = seed[:at] + new + seed[at + length :]
  return seed


def _places(value: Any, path: tuple[Any, ...] = ()) -> Any:
  if path:
    yield path
  for key in (
    list(value)[:30] if isinstance(value, dict) else range(min(8, len(value))) if isinstance(value, list) else ()
  ):
    yield from _places(value[key], (*path, key))


def _edited(lines: list[Any], edits: list[tuple[tuple[Any, ...], Any]]) -> bytes:
  lines = json.loads(json.dumps(lines))
  for path, new in edits:
    place: Any = lines
    try:
      for key in path[:-1]:
        place = place[key]
      place[path[-1]] = copy.deepcopy(new)
    except (LookupError, TypeError):
      continue
  return b"\n".join(json.dumps(line).encode() for line in lines)


def fuzz(name: str, cases: int, seconds: float, folder: Path) -> int:
  """Gives a reader so many files, or as many as fit into the seconds. Raises what it raises, but for a ConfigError of
  one line. Returns the number of files."""
  from hypothesis import HealthCheck, Phase, given, seed, settings

  first, read = READERS[name]
  whole, path, end = first(), folder / "a", time.monotonic() + seconds
  path.write_bytes(whole)
  read(path)  # the file itself is read
  slow = min(cases, SHRINKING)

  @settings(
    max_examples=slow, deadline=None, database=None, suppress_health_check=list(HealthCheck),
    phases=(Phase.generate, Phase.shrink),
  )  # fmt: skip
  @seed(0)
  @given(shrinking(whole))
  def each(content: bytes) -> None:
    check(read, path, content)

  each()
  change, chance = changing(whole), random.Random(0)
  for done in range(slow, cases):
    if time.monotonic() > end:
      return done
    content = change(chance)
    try:
      check(read, path, content)
    except BaseException:
      print(f"{name} fails for {content!r}", file=sys.stderr)
      raise
  return cases


def check(read: Read, path: Path, content: bytes) -> str:
  """Raises what reading such a file raises, but for a sentence. Returns the sentence; "" if the file is read."""
  path.write_bytes(content)
  found = None
  try:
    read(path)
  except ConfigError as error:
    found = str(error)
  assert found is None or (found and "\n" not in found)  # what acts on terminals is escaped where it is printed
  return found or ""


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--cases", type=int, default=10_000)
  parser.add_argument("--seconds", type=float, default=math.inf, help="for each reader, at most")
  parser.add_argument("--only", default="", help="readers, with commas")
  given = parser.parse_args()
  warnings.simplefilter("ignore")
  for name in given.only.split(",") if given.only else READERS:
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
      done = fuzz(name, given.cases, given.seconds, Path(folder))
    print(f"{name}: {done:,} cases in {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
  main()
