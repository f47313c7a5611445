"""The peers of the input pipeline: PyTorch's DataLoader, and grain, on the records that ours reads.

    echo SPEC | python lab/benchmarks/peer_input.py        # SPEC as in input_pipeline.py; needs pip install '.[peer]'

Each is used as its documentation shows for data in memory: numbered examples from memory-mapped files, a global
shuffle, batches made by the library. It imports nothing of this repository, so that any Python with the peers can run
it.
"""

import itertools
import json
import math
import platform
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

import numpy as np

WARM_UP = 20  # batches before the timed ones; by then all workers run


class Records:
  """Numbered examples in memory-mapped files. Each process opens the files when it reads its first example.

  Args:
    fields: for each field its file (`path`, `dtype`, `offset`), the `shape` of a record and its dtype in a batch
      (`as`), and how many numbers after one record the next one begins (`step`).
    count: the number of examples.
    convert: applied to every array.
  """

  def __init__(self, fields: dict[str, Any], count: int, convert: Callable[[np.ndarray], Any] = np.asarray):
    self.fields, self.count, self.convert = fields, count, convert
    self.rows: list[tuple[str, np.ndarray, np.dtype, Callable[[np.ndarray], Any]]] = []

  def __len__(self) -> int:
    return self.count

  def __getitem__(self, number: int) -> dict[str, Any]:
    if not self.rows:
      self.rows = [
        (name, rows(field, self.count), np.dtype(field["as"]), self.convert if field["shape"] else int)
        for name, field in self.fields.items()
      ]
    return {name: convert(rows[number].astype(dtype)) for name, rows, dtype, convert in self.rows}


def rows(field: dict[str, Any], count: int) -> np.ndarray:
  """The records of a field in a memory map, as an array [count, ...]. They may overlap. Reads every page once."""
  file = np.memmap(field["path"], field["dtype"], mode="r", offset=field["offset"]).view(np.ndarray)
  file[:: 4096 // file.itemsize].sum()
  length = math.prod(field["shape"])
  flat = np.lib.stride_tricks.as_strided(file, (count, length), (field["step"] * file.itemsize, file.itemsize))
  return flat[:, 0] if not field["shape"] else flat.reshape(count, *field["shape"]) if field["step"] == length else flat


def torch_loader(spec: dict[str, Any]) -> Iterator[Any]:
  """Batches of `torch.utils.data.DataLoader`, over a map-style dataset of tensors."""
  import torch
  from torch.utils.data import DataLoader

  loader = DataLoader(
    Records(spec["fields"], spec["count"], torch.from_numpy),
    batch_size=spec["batch_size"],
    shuffle=True,
    drop_last=True,
    num_workers=spec["workers"],
    persistent_workers=spec["workers"] > 0,
  )
  return itertools.chain.from_iterable(itertools.repeat(loader))  # one epoch after the other


def grain_loader(spec: dict[str, Any]) -> Iterator[Any]:
  """Batches of `grain.DataLoader`."""
  import grain

  return iter(
    grain.DataLoader(
      data_source=Records(spec["fields"], spec["count"]),
      sampler=grain.samplers.IndexSampler(
        spec["count"], shard_options=grain.sharding.NoSharding(), shuffle=True, num_epochs=None, seed=0
      ),
      operations=[grain.transforms.Batch(spec["batch_size"], drop_remainder=True)],
      worker_count=spec["workers"],
      read_options=_in_memory(),
    )
  )


def grain_dataset(spec: dict[str, Any]) -> Iterator[Any]:
  """Batches of grain's newer interface, `grain.MapDataset`."""
  import grain

  examples = grain.MapDataset.source(Records(spec["fields"], spec["count"])).seed(0).shuffle().repeat()
  batches = examples.batch(spec["batch_size"], drop_remainder=True).to_iter_dataset(_in_memory())
  if spec["workers"]:
    batches = batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=spec["workers"]))
  return iter(batches)


def _in_memory() -> Any:
  """grain's advice for data in memory: no threads."""
  import grain

  return grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)


LOADERS = {"torch": torch_loader, "grain_loader": grain_loader, "grain_dataset": grain_dataset}


def measure(spec: dict[str, Any]) -> dict[str, Any]:
  """Batches that a peer makes in at least so many seconds, and what shows that they hold the right records."""
  batches = LOADERS[spec["peer"]](spec)
  for _ in range(WARM_UP):
    batch = next(batches)
  start, made, taken = time.perf_counter(), 0, 0.0
  while taken < spec["seconds"]:
    next(batches)
    made, taken = made + 1, time.perf_counter() - start
  records = Records(spec["fields"], spec["count"])
  first = [records[i] for i in range(min(8, spec["count"]))]
  return {
    "batches": made,
    "seconds": taken,
    "shapes": {name: list(x.shape) for name, x in batch.items()},
    "sums": {name: int(sum(np.sum(example[name], dtype=np.int64) for example in first)) for name in spec["fields"]},
    "versions": {"python": platform.python_version()}
    | {name: metadata.version(name) for name in ("numpy", spec["peer"].partition("_")[0])},
  }


def main() -> None:
  spec = json.load(sys.stdin)
  try:
    result = measure(spec)
  except ModuleNotFoundError as error:
    result = {"error": f"{error.name} is not installed; pip install '.[peer]', or name a Python with --peer-python"}
  except Exception as error:  # reported in the peer's row of the table
    result = {"error": str(error).strip().partition("\n")[0] or type(error).__name__}
  print(json.dumps(result), flush=True)


if __name__ == "__main__":
  main()
