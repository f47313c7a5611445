"""Prepares data for a run, counts it, and shows some examples.

    python -m tools.prepare PATH... [--config=configs/STRATEGY.py[:PRESET]] [--config.FIELD=VALUE ...] [--picture=FILE]
    python -m tools.prepare PATH... --check
    python -m tools.prepare PATH... --verify

It prints what each file of a text is read as, in which split, and why others are skipped. With --check it prepares
nothing. With --verify it also hashes what is prepared already, and refuses it if it is not what was prepared.

Reads the same fields as train.py, so a run with the same `data.*` finds the data prepared. Without --config it guesses
from the paths whether there are texts or images. Several paths of text are one source.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import data
from data import cache
from data.dataset import sources_of
from errors import ConfigError
from runtime import command_line

EXAMPLES, LETTERS = 3, 240  # texts to show, and the most that is shown of each
GRID, CELL = 8, 64  # images in a row of the picture, and the least pixels of each


def table(dataset: data.Dataset) -> str:
  """What each part holds: one line for each count, with the numbers to train on and to validate on."""
  lines = []
  for part in dataset.parts:
    counts = part.counts | _of_classes(dataset, part)
    rows = {name: tuple(f"{n:,}" for n in both) for name, both in counts.items()}
    if part.bytes_per_token is not None:
      rows["bytes a token"] = ("", f"{part.bytes_per_token:.2f}")
    width = max(len(name) for name in [part.name, *rows])
    lines.append(f"{part.name:<{width}}  {'to train on':>14}  {'to validate on':>14}")
    lines += [f"{name:<{width}}  {train:>14}  {validation:>14}" for name, (train, validation) in rows.items()]
  return "\n".join(lines)


def _of_classes(dataset: data.Dataset, part: data.Part) -> dict[str, tuple[int, int]]:
  """How many examples each class has to train on and to validate on; {} without classes. Leaves out all but 20."""
  if not dataset.model.get("classes"):
    return {}
  train, validation = (
    np.bincount(source.labels.slice(0, len(source)), minlength=dataset.model["classes"])
    for source in (part.train, part.validation)
  )
  return {_label(dataset, i): (int(train[i]), int(validation[i])) for i in range(min(len(train), 20))}


def texts(dataset: data.Dataset, batch: dict[str, np.ndarray]) -> str:
  """The first examples of a batch as text, with their classes."""
  assert dataset.text
  lines = []
  for i, tokens in enumerate(batch["tokens"][:EXAMPLES]):
    first = batch["segments"][i] == 1 if "segments" in batch else np.full(len(tokens), True)  # its first document
    name = f"example {batch['id'][i, 0]}" + (f", {_label(dataset, batch['label'][i])}" if "label" in batch else "")
    lines.append(name)
    learned = batch["completions"][i] if "completions" in batch else first
    own, counted = tokens[first], learned[first]
    borders = np.flatnonzero(np.diff(counted)) + 1  # a dialogue has several answers
    for some, counts in zip(np.split(own, borders), np.split(counted, borders), strict=True):
      shown = dataset.text.decode(some.tolist())
      more = "…" if len(shown) > LETTERS else ""
      lines += [f"  {'|' if counts[0] else 'prompt |'} {line}" for line in (shown[:LETTERS] + more).splitlines()]
  return "\n".join(lines)


def grid(images: np.ndarray) -> Any:
  """Images uint8 [N, S, S, C] in rows of GRID, as a picture of Pillow."""
  from PIL import Image

  scale = -(-CELL // images.shape[1])
  large = images.repeat(scale, axis=1).repeat(scale, axis=2)
  rows = [np.concatenate(list(large[i : i + GRID]), axis=1) for i in range(0, len(large) - len(large) % GRID, GRID)]
  pixels = np.concatenate(rows) if rows else np.concatenate(list(large), axis=1)
  return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)


def main(config: Any, paths: list[str], picture: Path) -> None:
  if picture.suffix.lower() not in (".png", ".jpg", ".jpeg"):
    raise ConfigError(f"picture={str(picture)!r} has no suffix of a picture; use a name such as examples.png")
  if paths:
    config.data.path = ",".join(paths)
  if config.data.name == "text":
    check(config, [])
    print()
  dataset = data.load(config)
  print(f"{dataset.description}\n\n{table(dataset)}")
  found = {name: value for name, value in dataset.model.items() if value}
  if found:
    print("\n" + "\n".join(f"model.{name} = {value}" for name, value in found.items()))
  batch = data.Batches(data.mixture(dataset), GRID * GRID, config.seed).read(0)
  if "image" in batch:
    from runtime import folders

    file = folders.writable_file(picture, "picture")
    grid(batch["image"]).save(file)
    shown = ", ".join(_label(dataset, label) for label in batch["label"][:GRID])
    print(f"\n{GRID * GRID} examples are in {file}; the first row shows {shown}")
  elif dataset.text:
    print(f"\n{texts(dataset, batch)}")


def _label(dataset: data.Dataset, number: int) -> str:
  return dataset.class_names[number] if dataset.class_names else f"class {number}"


def check(config: Any, paths: list[str]) -> None:
  """Prints the verdicts on the files at each source of a text. Opens only files that have changed."""
  from data import recognition  # without JAX, which takes longer to start than this takes
  from data.text import foreign
  from data.text.sources import here

  fields = config.data

  def shown(name: str, field: str, table: Callable[[str], str]) -> str:
    place = here(name, field, config)
    if named := foreign.named(place):
      return f"{name}: token ids of Megatron-LM, in {named.train[0].bin} and {named.train[0].index}"
    return table(place)

  known, held_out = (fields.cache_dir, fields.form), bool(fields.validation_path)
  for name, _ in sources_of(",".join(paths) or fields.path):
    if name.strip():
      print(shown(name.strip(), "data.path", lambda place: recognition.check(place, *known, held_out)))
    else:
      print("no path: the source of the Python standard library")
    if held_out:
      of_other = lambda place: recognition.check_held_out(place, *known)
      print(shown(fields.validation_path, "data.validation_path", of_other))


def guessed(paths: list[str], folder: str = "") -> str:
  """The value of --config for data at these paths. `folder` is data.dir, if it is given."""
  from configs.base import get_config
  from data.images import holds_images

  config = get_config().data
  config.dir = folder
  return "configs/single.py:images" if any(holds_images(path, config) for path in paths) else "configs/single.py"


if __name__ == "__main__":
  # Split by hand: argparse takes an argument with a space, such as a mixture, for a path.
  fields = [argument for argument in sys.argv[1:] if argument.startswith("--config")]
  parser = argparse.ArgumentParser(prog="python -m tools.prepare", description=__doc__.partition("\n")[0])
  parser.add_argument("paths", nargs="*", metavar="PATH", help="files or folders (default: config.data.path)")
  parser.add_argument("--picture", default="examples.png", type=Path, help="where to draw examples of images")
  parser.add_argument("--check", action="store_true", help="print what each file is read as, and prepare nothing")
  parser.add_argument("--verify", action="store_true", help="hash what is prepared already")
  own = parser.parse_args([argument for argument in sys.argv[1:] if argument not in fields])
  if not any(field.startswith("--config=") for field in fields):
    given = dict(field.removeprefix("--config.data.").partition("=")[::2] for field in fields)
    paths = own.paths or [given.get("path", "")]
    config = "configs/single.py" if own.check else guessed(paths, given.get("dir", ""))
    fields.insert(0, f"--config={config}")
  sys.argv[1:] = fields
  cache.verify[0] = own.verify
  command_line.run(lambda config: check(config, own.paths) if own.check else main(config, own.paths, own.picture))
