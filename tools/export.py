"""Writes a trained model as a folder that the library transformers loads: weights, tokenizer and a model card.

    python -m tools.export WORKDIR --out=DIR [--step=N] [--dtype=bfloat16]

WORKDIR is that of a run, under any strategy, or one of its checkpoints. Needs no accelerator, and only as much memory
as the largest weight of all layers.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from checkpointing import restore
from checkpointing.quiet import quiet
from errors import ConfigError, one_of
from models.config import ModelConfig
from models.settings import model_config
from pretrained.export import DTYPES, export
from reporting.summary import TOKENIZER
from runtime import command_line
from tools.source import checkpoint_of, config_of

CARD = """---
library_name: transformers
pipeline_tag: text-generation
---

# A language model trained with Meshwright

| | |
|---|---|
{table}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = AutoModelForCausalLM.from_pretrained("."), AutoTokenizer.from_pretrained(".")
```
"""


def reader(folder: Path, saved: dict[str, Any]) -> Callable[[str], np.ndarray]:
  """A function that reads a weight of a checkpoint by its name."""

  def read(name: str) -> np.ndarray:
    found, is_whole = restore.read_array(folder, saved, f"params/{name}")
    if not is_whole:
      raise ConfigError(f"workdir={str(folder)!r} is damaged: {name} is not what was saved; use another checkpoint")
    return np.asarray(found)

  return read


def card(model: ModelConfig, saved: dict[str, Any]) -> str:
  """README.md of the folder: what the model is, and how it was made."""
  size = sum(int(np.prod(shape)) for name, (shape, *_) in saved["arrays"].items() if name.startswith("params/"))
  loss = "not evaluated" if saved.get("loss") is None else f"{saved['loss']:.4f}"
  names = ", ".join(f"`{name or 'the Python standard library'}`" for name in saved["data"]["names"])
  rows = {
    "Parameters": f"{size:,}",
    "Context": f"{model.seq_len:,} tokens",
    "Data": names,
    "Steps": f"{saved['loop']['step']:,} with {saved['data']['batch_size']} sequences each",
    "Validation loss": f"{loss}{'' if saved.get('loss') is None else ' nats per token'}",
    "Strategy": saved["strategy"],
    "Command": f"`{saved['command']}`" if saved.get("command") else "not recorded",
    "Software": ", ".join(f"{name} {version}" for name, version in saved["versions"].items()),
  }
  return CARD.format(table="\n".join(f"| {name} | {value} |" for name, value in rows.items()))


def main(arguments: list[str]) -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("workdir", type=Path, help="of a run, or one of its checkpoints")
  parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder to write")
  parser.add_argument("--step", type=int, help="the step of the checkpoint (default: the newest)")
  parser.add_argument("--dtype", default="float32", help=f"of the weights: {', '.join(DTYPES)}")
  options = parser.parse_args(arguments)
  one_of("dtype", options.dtype, DTYPES)
  quiet()
  jax.config.update("jax_platforms", "cpu")  # a run may be using the accelerators
  folder, saved = checkpoint_of(options.workdir.expanduser(), options.step)
  model = model_config(config_of(saved), "cpu")
  workdir = folder.parent.parent
  files = {file.name: file.read_text() for file in sorted((workdir / TOKENIZER).glob("*"))}
  end = json.loads(files["generation_config.json"])["eos_token_id"] if files else None
  files["README.md"] = card(model, saved)
  export(options.out.expanduser(), model, reader(folder, saved), files, dtype=options.dtype, end=end)
  print(f"wrote {options.out}: step {saved['loop']['step']}, {options.dtype}")


if __name__ == "__main__":
  with command_line.bad_input_ends_the_program():
    main(sys.argv[1:])
