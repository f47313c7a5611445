"""Makes golden/mds: small data sets in the form MDS, as mosaicml-streaming 0.13 writes them, and what their rows hold.

    pip install mosaicml-streaming==0.13.0
    python tests/golden/make_mds.py

`rows.jsonl` has the rows. Each folder has them in another form: a column of text (`str`, `bytes`, `json`), or of token
ids (arrays with and without a fixed type and shape), in two shards or one, plain or compressed.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from streaming import MDSWriter

FOLDER = Path(__file__).parent / "mds"
COUNT = 60
ROWS = [
  {"text": f"row {i}, of größe {i * i}", "label": i % 3, "ids": [(i * j) % 300 for j in range(1 + i % 7)]}
  for i in range(COUNT)
]
SETS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
  "plain": ({"text": "str", "label": "int", "score": "float32", "picture": "pkl"}, {"size_limit": 3000}),
  "zstd": ({"text": "bytes", "label": "uint8", "name": "str"}, {"size_limit": 2000, "compression": "zstd"}),
  "gz": ({"text": "json", "label": "str_int"}, {"compression": "gz"}),
  "bz2": ({"text": "str", "label": "int16"}, {"compression": "bz2:9"}),
  "br": ({"text": "str"}, {"compression": "br"}),
  "ids": ({"ids": "ndarray", "label": "int8"}, {"size_limit": 1500}),
  "ids-typed": ({"ids": "ndarray:uint16"}, {"compression": "zstd:7"}),
  "ids-shaped": ({"ids": "ndarray:int32:8", "text": "str"}, {}),
}


def sample(row: dict[str, Any], columns: dict[str, str]) -> dict[str, Any]:
  """A row as the writer takes it."""
  ids = np.array(
    row["ids"], {"ndarray:uint16": np.uint16, "ndarray:int32:8": np.int32}.get(columns.get("ids", ""), np.int64)
  )
  if columns.get("ids") == "ndarray:int32:8":
    ids = np.resize(ids, 8)
  text = row["text"].encode() if columns.get("text") == "bytes" else row["text"]
  values = {
    "text": text,
    "label": row["label"],
    "ids": ids,
    "score": 0.5,
    "picture": {"a": 1},
    "name": "x" * row["label"],
  }
  return {name: values[name] for name in columns}


def main() -> None:
  shutil.rmtree(FOLDER, ignore_errors=True)
  FOLDER.mkdir()
  (FOLDER / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
  for name, (columns, options) in SETS.items():
    with MDSWriter(out=str(FOLDER / name), columns=columns, **options) as writer:
      for row in ROWS:
        writer.write(sample(row, columns))


if __name__ == "__main__":
  main()
