"""Writes a trained model as a folder that the library transformers loads: weights, tokenizer and a model card.

    python -m tools.export WORKDIR --out=DIR [--step=N] [--dtype=bfloat16] [--merge] [--with-paths]

WORKDIR is that of a run, under any strategy, or one of its checkpoints. Needs no accelerator, and only as much memory
as the largest weight of all layers. A run that trained adapters gives a folder that the library PEFT loads; with
--merge a whole model, to whose weights the adapters are added. The model card shows the names of data and base without
their folders, and no command; --with-paths shows all three in full.
"""

import argparse
import dataclasses
import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import limits
from checkpointing import initial, pretrained, reading, record
from checkpointing.pretrained.export import DTYPES, export, export_adapters
from checkpointing.storage_logs import shorten_storage_logs
from data.text import tokenizer_files
from errors import ConfigError, first_line, inside, one_of, shown, visible
from limits import list_of, whole
from models import lora
from models.sizes import ModelSizes, model_sizes
from reporting.source import checkpoint_of, config_of
from reporting.summary import TOKENIZER
from runtime import command_line
from runtime.storage.bucket import Location, location

CARD = """---
library_name: {library}
pipeline_tag: text-generation
---

# A language model trained with Meshwright

| | |
|---|---|
{table}

```python
{imports}

model, tokenizer = {loader}.from_pretrained("."), AutoTokenizer.from_pretrained(".")
```
"""


WHOLE = {
  "library": "transformers",
  "loader": "AutoModelForCausalLM",
  "imports": "from transformers import AutoModelForCausalLM, AutoTokenizer",
}
ADAPTERS = {
  "library": "peft",
  "loader": "AutoPeftModelForCausalLM",
  "imports": "from peft import AutoPeftModelForCausalLM\nfrom transformers import AutoTokenizer",
}


def reader(folder: Location, saved: dict[str, Any]) -> Callable[[str], np.ndarray]:
  """A function that reads a weight of a checkpoint by its name."""

  def read(name: str) -> np.ndarray:
    found, why = reading.read_array(folder, saved, record.array_of(saved, name))
    if found is None:
      raise ConfigError(f"workdir={str(folder)!r} is damaged: {why}; {reading.instead(folder)}")
    return np.asarray(found)

  return read


def merged(sizes: ModelSizes, saved: dict[str, Any], read: Callable[[str], np.ndarray]) -> Callable[[str], np.ndarray]:
  """A function that reads a weight by its name, with its adapter added to it. `read` reads what was trained."""
  path = saved["base"]["path"]
  if pretrained.is_folder(path):
    of_base = functools.partial(pretrained.read_weight, pretrained.Folder(path), sizes)
  else:
    of_base = reader(*checkpoint_of(Path(path), None))

  def read_merged(name: str) -> np.ndarray:
    w, adapter = of_base(name), lora.names_of(name)
    initial.check_base(path, {f"params/{name}": initial.digest(jnp.asarray(w), w.shape)}, saved["base"])
    has_adapter = f"params/{adapter[0]}" in saved["arrays"]
    return lora.merged(w, *map(read, adapter), sizes.lora.scale) if has_adapter else w

  return read_merged


def card(sizes: ModelSizes, saved: dict[str, Any], whole: bool, with_paths: bool = False) -> str:
  """README.md of the folder: what the model is, and how it was made.

  Args:
    whole: false for adapters alone.
    with_paths: whether to show the command and the full paths of data and base. They say much about a machine.
  """
  named = lambda path: code(path if with_paths else Path(path).name)
  size = sum(int(np.prod(shape)) for name, (shape, *_) in saved["arrays"].items() if name.startswith("params/"))
  loss = "not evaluated" if saved.get("loss") is None else f"{saved['loss']:.4f}"
  names = ", ".join(named(name or "the Python standard library") for name in saved["data"]["names"])
  base = {"Fine-tuned from" if whole else "Adapters of": named(saved["base"]["path"])} if "base" in saved else {}
  rows = base | {
    "Trained parameters" if base else "Parameters": f"{size:,}",
    "Context": f"{saved['context']:,} tokens",
    **({"Window": f"{sizes.window:,} tokens"} if sizes.window else {}),
    "Trained on": f"texts of {sizes.seq_len:,} tokens",
    "Data": names,
    "Steps": f"{saved['loop']['step']:,} with {saved['data']['batch_size']} sequences each",
    "Validation loss": f"{loss}{'' if saved.get('loss') is None else ' nats per token'}",
    "Strategy": cell(saved["strategy"]),
    "Software": cell(", ".join(f"{name} {version}" for name, version in saved.get("versions", {}).items())),
  }
  if with_paths and saved.get("command"):
    rows["Command"] = code(saved["command"])
  table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
  return CARD.format(table=table, **(WHOLE if whole else ADAPTERS))


def cell(text: str) -> str:
  """A text in a cell of a Markdown table, in which it is no markup."""
  return re.sub(r"([\\`*\[\]<>|])", r"\\\1", visible(text))


def code(text: str) -> str:
  """A text as code in a cell of a Markdown table."""
  one_line = visible(" ".join(text.split())).replace("`", "'").replace("|", "\\|")
  return f"`{one_line}`"


def tokenizer_in(workdir: Location) -> tuple[dict[str, str], Any]:
  """The files of a run's tokenizer, and the ids that end a text, as generation_config.json has them; without one, none.

  Raises ConfigError if they are not what a run leaves there. A stranger's workdir may have links, which would put any
  file of this user into what is exported.
  """
  folder, files = workdir / TOKENIZER, dict[str, str]()
  if not folder.is_dir():
    return files, None
  generation = tokenizer_files.CONFIGS[0]
  try:
    for name in (tokenizer_files.TOKENIZER, *tokenizer_files.BESIDE, generation):
      if isinstance(file := folder / name, Path):
        for path in (file.parent, file):
          inside(f"workdir={str(workdir)!r}", str(workdir), path)
      if file.exists():
        files[name] = limits.content(file).decode()
    end = limits.parsed(files[generation].encode())["eos_token_id"]
    if not (whole()(end) or list_of(whole())(end)):
      raise ValueError(f"eos_token_id={shown(end)}")
  except ConfigError:
    raise
  except (OSError, ValueError, LookupError, TypeError) as error:
    raise ConfigError(
      f"{str(folder)!r} holds no tokenizer of a run ({first_line(error)}); copy the workdir again"
    ) from error
  return files, end


def main(arguments: list[str]) -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("workdir", help="of a run, or one of its checkpoints")
  parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder to write")
  parser.add_argument("--step", type=int, help="the step of the checkpoint (default: the newest)")
  parser.add_argument("--dtype", default="float32", help=f"of the weights: {', '.join(DTYPES)}")
  parser.add_argument("--merge", action="store_true", help="add adapters to their model's weights")
  parser.add_argument("--with-paths", action="store_true", help="show the command and full paths in the model card")
  options = parser.parse_args(arguments)
  one_of("dtype", options.dtype, DTYPES)
  shorten_storage_logs()
  jax.config.update("jax_platforms", "cpu")  # a run may be using the accelerators
  folder, saved = checkpoint_of(location(options.workdir, "workdir"), options.step)
  sizes = model_sizes(config_of(saved["config"], repr(str(folder))), "cpu")
  workdir = folder.parent.parent
  files, end = tokenizer_in(workdir)
  if options.merge and not sizes.lora:
    raise ConfigError(f"{options.workdir!r} has no adapters to merge; leave --merge out")
  out, read, is_whole = options.out.expanduser(), reader(folder, saved), options.merge or not sizes.lora
  files["README.md"] = card(sizes, saved, is_whole, options.with_paths)
  if is_whole:
    read = merged(sizes, saved, read) if options.merge else read
    export(
      out, dataclasses.replace(sizes, lora=None), read, files, dtype=options.dtype, end=end, context=saved["context"]
    )
  else:
    export_adapters(out, sizes, read, files, saved["base"]["path"])
  print(f"wrote {options.out}: step {saved['loop']['step']}, {options.dtype if is_whole else 'adapters'}")


if __name__ == "__main__":
  with command_line.bad_input_ends_the_program():
    main(sys.argv[1:])
