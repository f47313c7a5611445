"""Writes small artefacts of the program as it is now, which every later commit must still read: tests/test_kept.py.

    python -m tests.kept.make

It makes only what is missing. What exists is never made again, because it stands for files that users have. To keep
more, add an entry to DATA or RUNS (and to `write_sources`), run the command, and commit what it has written. The tests
take every file that they find. The first ones are of commit 148be19, with jax 0.10.2.

- `sources/`: what users have: texts, tables, token files, a tokenizer.json, images.
- `data/NAME.json`: the fields of a config, and what `data.load` made of them: fingerprints, counts, examples.
  `data/NAME.zip` has the prepared folders, under their names in the cache.
- `runs/NAME/`: `workdir.zip` of a run that was stopped at STOP; `run.json` with its fields, and the batches and metrics
  of a run that was not stopped, and with what the tools evaluate and generate found; `export`, written by the tool.

A run leaves paths in some files. There the folder of the sources is AT. Sources are last changed at TIME: the names of
prepared folders depend on it.
"""

import contextlib
import dataclasses
import gzip
import hashlib
import io
import json
import os
import random
import shutil
import struct
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from ml_collections import ConfigDict

import data.images
import data.text
import train
from configs import base
from data import cache
from data.batches import HostBatch
from reporting import metrics
from tools import evaluate, export, generate

FOLDER = Path(__file__).parent
AT = "/kept"
TIME = 1_700_000_000_000_000_000  # ns
STEPS, STOP = 23, 20
MEASURED = ("step", "split", "loss", "grad_norm", "learning_rate", "accuracy", "bits_per_byte", "epochs")
MOST = 40  # numbers of an example that are kept as they are; of all, the digests are

SIZES = {
  "model.width": 8, "model.depth": 2, "model.heads": 4, "model.kv_heads": 2, "model.mlp_width": 16, "model.seq_len": 16,
}  # fmt: skip
COMMON = SIZES | {
  "steps": STEPS, "batch_size": 8, "eval_batch_size": 8, "eval_examples": 16, "log_every": 1, "sample_length": 0,
  "optimizer.warmup": 2, "optimizer.learning_rate": 0.03, "checkpoint.minutes": 0.0, "data.cache_dir": "cache",
  "compilation_cache_dir": "", "simulated_devices": 8, "runtime.heartbeat": 0.0,
}  # fmt: skip
COMPLETIONS = {
  "data.path": "rows.jsonl", "data.validation_path": "held_out.jsonl", "data.prompt_field": "question",
  "data.completion_field": "answer", "data.packing": "documents", "data.tokenizer": "bpe", "model.vocab_size": 272,
}  # fmt: skip
MIXED = {"data.path": {"text.txt": 0.75, "more.txt": 0.25}}
IMAGES = {
  "data.name": "images", "data.path": "images.npz", "model.inputs": "images", "model.objective": "class",
  "model.patch_size": 4, "model.head_dim": 4,
}  # fmt: skip
DATA: dict[str, dict[str, Any]] = {
  "bytes": {"data.path": "text.txt"},
  "bpe": {"data.path": "text.txt", "data.tokenizer": "bpe", "model.vocab_size": 272},
  "tokenizer": {"data.path": "text.txt", "data.tokenizer": "tokenizer.json", "model.vocab_size": 0},
  "mixture": MIXED,
  "folder": {"data.path": "folder", "data.packing": "documents"},
  "saved_dataset": {"data.path": "saved", "data.packing": "documents"},
  "completions": COMPLETIONS,
  "labels": {"data.path": "labels.jsonl", "model.objective": "class"},
  "nanogpt": {"data.path": "nanogpt", "model.vocab_size": 272},
  "nanogpt_documents": {
    "data.path": "nanogpt", "data.tokenizer": "tokenizer.json", "data.packing": "documents", "model.vocab_size": 272,
  },
  "megatron": {"data.path": "megatron/all_text_document", "data.packing": "documents", "model.vocab_size": 272},
  "npz": IMAGES,
  "pictures": IMAGES | {"data.path": "pictures"},
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Run:
  """A run to keep.

  Attributes:
    saver, resumer: the strategy that saves, and the one that goes on.
    exported: whether to keep its export.
    evaluated, generated: what the tools evaluate and generate read: "workdir", "export".
  """

  saver: str
  resumer: str
  fields: dict[str, Any]
  exported: bool = False
  evaluated: tuple[str, ...] = ()
  generated: tuple[str, ...] = ()


EXPERTS = {
  "model.experts": 4, "model.dense_layers": 1, "model.expert_width": 8, "model.qk_norm": True,
  "model.tied_embedding": True, "optimizer.name": "lion", "optimizer.learning_rate": 0.01,
}  # fmt: skip
ADAPTERS = {"init_from": "runs/windows/workdir", "model.lora_rank": 2, "model.lora_targets": "query,down"}
RUNS = {
  "windows": Run("fsdp", "two_d", {"data.path": "text.txt", "model.dropout": 0.1}, generated=("workdir",)),
  "experts": Run(
    "expert_fsdp", "single", COMPLETIONS | EXPERTS, True, evaluated=("workdir", "export"), generated=("export",)
  ),
  "adapters": Run("hsdp", "single", MIXED | ADAPTERS, True),
  "images": Run("data_parallel", "single", IMAGES | {"data.augment": True, "optimizer.name": "sgd"}),
}
EVALUATE = ["--data.path=more.txt", "--data.cache_dir=cache", "--seq-len=16", "--batch-size=8"]
GENERATE = ["--prompt=the sea ", "--length=24", "--temperature=0"]


def config_of(strategy: str, fields: dict[str, Any]) -> ConfigDict:
  """The config of a command that names these fields."""
  config = base.get_config("lm", strategy)
  config.update_from_flattened_dict(fields)
  config.compilation_cache_dir = "auto"  # keeps the cache of conftest.py
  return config


def lay_out(folder: Path) -> None:
  """Copies the sources and the runs to a folder, with the times and the paths that they have there."""
  shutil.copytree(FOLDER / "sources", folder, dirs_exist_ok=True)
  for file in folder.rglob("*"):
    os.utime(file, ns=(TIME, TIME))
  for kept in (FOLDER / "runs").glob("*"):
    run = folder / "runs" / kept.name
    if (kept / "export").exists():
      shutil.copytree(kept / "export", run / "export", dirs_exist_ok=True)
    with zipfile.ZipFile(kept / "workdir.zip") as archive:
      archive.extractall(run / "workdir")
    rename(run, AT, str(folder))


def rename(folder: Path, old: str, new: str) -> None:
  """Replaces one path by another in the files of a folder."""
  for file in folder.rglob("*"):
    if file.is_file() and old.encode() in (content := file.read_bytes()):
      file.write_bytes(content.replace(old.encode(), new.encode()))


def zipped(to: Path, files: dict[str, bytes]) -> None:
  to.parent.mkdir(parents=True, exist_ok=True)
  with zipfile.ZipFile(to, "w") as archive:
    for name, content in files.items():
      archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)


@contextlib.contextmanager
def preparing(folder: Path) -> Iterator[dict[str, Path]]:
  """In this block, the folders that are prepared: by the names that they would have if the sources were in AT."""
  found: dict[str, Path] = {}

  def prepared(root: str, name: str, key: Any, *write: Any) -> Path:
    path = original(root, name, key, *write)
    digest = hashlib.sha256(repr(key).replace(str(folder), AT).encode()).hexdigest()[:16]  # as `prepared` does
    found[f"{name}-{digest}"] = path
    return path

  original = cache.prepared
  with contextlib.ExitStack() as stack:
    for module in [m for m in sys.modules.values() if getattr(m, "prepared", None) is original and m is not cache]:
      stack.enter_context(mock.patch.object(module, "prepared", prepared))
    yield found


def contents(prepared: dict[str, Path], folder: Path) -> dict[str, bytes]:
  """The files of prepared folders, by folder and name."""
  files = [(f"{name}/{file.relative_to(at)}", file) for name, at in prepared.items() for file in sorted(at.rglob("*"))]
  return {name: file.read_bytes().replace(str(folder).encode(), AT.encode()) for name, file in files if file.is_file()}


def digest(x: np.ndarray) -> str:
  return hashlib.sha256(f"{x.dtype.str} {x.shape} ".encode() + np.ascontiguousarray(x).tobytes()).hexdigest()


def digests(batch: HostBatch) -> dict[str, str]:
  return {name: digest(x) for name, x in batch.items()}


def facts(dataset: data.Dataset) -> dict[str, Any]:
  """What a run depends on, as JSON."""
  parts = [
    {
      "name": part.name, "fingerprint": part.fingerprint, "bytes_per_token": part.bytes_per_token,
      "counts": part.counts, "train": examples(part.train), "validation": examples(part.validation),
    }
    for part in dataset.parts
  ]  # fmt: skip
  found = {
    "tokenizer": dataset.tokenizer, "model": dataset.model, "class_names": dataset.class_names,
    "weights": dataset.weights, "parts": parts,
  }  # fmt: skip
  return json.loads(json.dumps(found))


def examples(source: data.Source) -> dict[str, Any]:
  """The number of examples, the digests of all of them, and what is small of the first."""
  batch = source.read(np.arange(len(source)))
  first = {name: x[0].tolist() for name, x in batch.items() if x[0].size <= MOST}
  return {"count": len(source), "first": first, "digests": digests(batch)}


def loaded(fields: dict[str, Any], folder: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
  """What `data.load` makes of the sources in the current folder, and the files that it prepares."""
  config = config_of("single", fields)
  with preparing(folder) as prepared:
    found = facts(data.load(config))
  return found, contents(prepared, folder)


def trained(config: ConfigDict, workdir: Path, after: int) -> dict[str, Any]:
  """Trains. Returns the batches and the lines of metrics of the steps after `after`."""
  batches: dict[int, HostBatch] = {}
  original = data.Batches.read

  def read(self: data.Batches, step: int, *rows: Any) -> HostBatch:
    batches[step] = original(self, step, *rows)
    return batches[step]

  with mock.patch.object(data.Batches, "read", read):
    train.train(config, workdir)
  lines = [line for line in metrics.read(workdir / "metrics.jsonl") if line["split"] != "job" and line["step"] > after]
  return {
    "batches": {str(step): digests(x) | {"id": x["id"].tolist()} for step, x in batches.items() if step >= after},
    "lines": [{name: x for name, x in line.items() if name.partition("/")[0] in MEASURED} for line in lines],
  }


def evaluated(source: str, arguments: list[str]) -> dict[str, Any]:
  """What the tool evaluate finds."""
  with tempfile.TemporaryDirectory() as folder:
    evaluate.main([source, *arguments, f"--json={folder}/found.json"])
    return json.loads(Path(folder, "found.json").read_text())["text"]


def generated(source: str, arguments: list[str]) -> str:
  """What the tool generate writes."""
  with contextlib.redirect_stdout(io.StringIO()) as out:
    generate.main([source, *arguments])
  return out.getvalue()


def export_to(to: Path, workdir: str) -> None:
  """Runs the tool export. The model card is left out, because its words may change."""
  export.main([workdir, f"--out={to}"])
  (to / "README.md").unlink()


def write(file: Path, value: Any) -> None:
  file.parent.mkdir(parents=True, exist_ok=True)
  file.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def main() -> None:
  sys.argv = ["train.py"]  # a record has the command
  write_sources(FOLDER / "sources")
  with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
    folder = Path(name).resolve()
    lay_out(folder)
    keep_tokenizer(folder)
    for name, own in DATA.items():
      fields = COMMON | own
      if not (FOLDER / f"data/{name}.json").exists():
        found, files = loaded(fields, folder)
        write(FOLDER / f"data/{name}.json", {"fields": fields, "found": found})
        zipped(FOLDER / f"data/{name}.zip", files)
    for name, run in RUNS.items():
      if not (FOLDER / "runs" / name).exists():
        keep_run(name, run, folder)
        lay_out(folder)


def keep_tokenizer(folder: Path) -> None:
  """A tokenizer.json among the sources: the BPE of the text."""
  if not (FOLDER / "sources/tokenizer.json").exists():
    _, files = loaded(COMMON | DATA["bpe"], folder)
    (content,) = [files[name] for name in files if name.endswith("/tokenizer.json")]
    (FOLDER / "sources/tokenizer.json").write_bytes(content)
    lay_out(folder)


def keep_run(name: str, run: Run, folder: Path) -> None:
  """Trains a run twice, to its end and to STOP, and keeps what a resume needs of the second."""
  at, kept, fields = Path("runs", name), FOLDER / "runs" / name, COMMON | run.fields
  found: dict[str, Any] = {"saved_under": run.saver, "resumed_under": run.resumer, "fields": fields}
  found |= trained(config_of(run.saver, fields), Path("whole", name), STOP)
  train.train(config_of(run.saver, fields | {"stop_after": STOP}), at / "workdir")
  for file in (at / "workdir").iterdir():
    if file.name not in ("checkpoints", "tokenizer", "metrics.jsonl", "config.json"):
      shutil.rmtree(file) if file.is_dir() else file.unlink()
  if run.exported:
    export_to(at / "export", f"{at}/workdir")
  found["evaluate"] = {"arguments": EVALUATE, "found": {x: evaluated(f"{at}/{x}", EVALUATE) for x in run.evaluated}}
  found["generate"] = {"arguments": GENERATE, "found": {x: generated(f"{at}/{x}", GENERATE) for x in run.generated}}
  rename(at, str(folder), AT)
  files = [file for file in sorted((at / "workdir").rglob("*")) if file.is_file()]
  zipped(kept / "workdir.zip", {str(file.relative_to(at / "workdir")): file.read_bytes() for file in files})
  if run.exported:
    shutil.copytree(at / "export", kept / "export")
  write(kept / "run.json", found)


def write_sources(folder: Path) -> None:
  """What is not there yet of the sources. They stay as they are, even if this function changes."""
  chance = random.Random(0)
  words = [
    "the",
    "sea",
    "a",
    "stone",
    "light",
    "of",
    "and",
    "in",
    "rain",
    "grey",
    "was",
    "came",
    "under",
    "old",
    "hill",
  ]
  words += ["river,", "slowly;", "naïve", "水", "—", "x_1", "=", "20\t"]
  sentence = lambda: " ".join(chance.choices(words, k=chance.randrange(3, 12))).capitalize() + ".\n"
  text = lambda count: "".join(sentence() for _ in range(count))
  rows = lambda values: "".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values)
  questions = [{"question": f"{i} + {i} = ", "answer": f"{2 * i}. {sentence()}"} for i in range(70)]
  files = {
    "text.txt": text(110).encode() + "Ünïcode: 😀\r\nlast line, without an end".encode() + b" \xff.",
    "more.txt": text(40).encode(),
    "rows.jsonl": rows(questions[:60]).encode(),
    "held_out.jsonl": rows(questions[60:]).encode(),
    "labels.jsonl": rows({"text": sentence(), "label": ("rain", "stone", "sea")[i % 3]} for i in range(60)).encode(),
    "folder/.hidden.txt": b"hidden",
    "folder/zeros.dat": bytes(100),
    "folder/notes/deep.md": text(3).encode(),
    "folder/rows.jsonl": rows({"text": sentence()} for _ in range(30)).encode(),
    "folder/small.txt.gz": gzip.compress(text(4).encode(), mtime=0),
    **{f"folder/part-{i:02}.txt": text(2).encode() for i in range(22)},
    **token_files(),
  }
  for name, content in files.items():
    if not (folder / name).exists():
      (folder / name).parent.mkdir(parents=True, exist_ok=True)
      (folder / name).write_bytes(content)
  write_tables(folder, [sentence() for _ in range(60)])
  write_images(folder)


def token_files() -> dict[str, bytes]:
  """nanoGPT's two files, in which 256 ends a document, and Megatron-LM's two: documents of 1 to 9 tokens."""
  ids = lambda count, step: (np.arange(count) * step % 271).astype("<u2")
  sizes = np.arange(60, dtype="<i4") % 9 + 1
  tokens = ids(sizes.sum(), 31)
  pointers = ((np.cumsum(sizes) - sizes) * 2).astype("<i8")
  header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, len(sizes), len(sizes) + 1)
  index = header + sizes.tobytes() + pointers.tobytes() + np.arange(len(sizes) + 1, dtype="<i8").tobytes()
  return {
    "nanogpt/train.bin": ids(900, 7).tobytes(), "nanogpt/val.bin": ids(200, 11).tobytes(),
    "megatron/all_text_document.bin": tokens.tobytes(), "megatron/all_text_document.idx": index,
  }  # fmt: skip


def write_tables(folder: Path, texts: list[str]) -> None:
  """A Parquet file, a compressed file of JSON lines, and a dataset in the form of `datasets`' save_to_disk."""
  import pyarrow as pa
  import pyarrow.parquet as pq

  if (folder / "saved").exists():
    return
  table = lambda some: pa.table({"text": some, "number": list(range(len(some)))})
  pq.write_table(table(texts[:20]), folder / "folder/table.parquet")
  with pa.CompressedOutputStream(str(folder / "folder/lines.jsonl.zst"), "zstd") as out:
    out.write("".join(json.dumps({"text": text}) + "\n" for text in texts[20:40]).encode())
  for split, some in (("train", texts[:45]), ("validation", texts[45:])):
    at = folder / "saved" / split
    at.mkdir(parents=True)
    with pa.OSFile(str(at / "data-00000-of-00001.arrow"), "wb") as file:
      with pa.ipc.new_stream(file, table(some).schema) as out:
        out.write_table(table(some))
    write(at / "state.json", {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_split": split})
    write(at / "dataset_info.json", {"features": {}})
  write(folder / "saved/dataset_dict.json", {"splits": ["train", "validation"]})


def write_images(folder: Path) -> None:
  """Images of 8 pixels a side: 40 in an .npz file, in color; 12 in a folder of two classes, in grey."""
  from PIL import Image

  if (folder / "images.npz").exists():
    return
  chance = np.random.default_rng(0)
  steps = np.arange(8, dtype=np.uint8)
  label = np.arange(40) % 3
  image = np.zeros((40, 8, 8, 3), np.uint8)
  image[np.arange(40), :, :, label] = chance.integers(0, 256, (40, 1, 1)) + steps[:, None] * steps
  np.savez_compressed(folder / "images.npz", image=image, label=label)
  for i in range(12):
    at = folder / "pictures" / ("square", "round")[i % 2]
    at.mkdir(parents=True, exist_ok=True)
    Image.fromarray(steps[:, None] * steps * np.uint8(i + 1)).save(at / f"{i}.png")


if __name__ == "__main__":
  main()
