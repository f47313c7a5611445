"""What a run prints at its start and its end."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from clu import parameter_overview
from ml_collections import ConfigDict

from data import Batches, Dataset
from errors import ConfigError
from reporting import metrics, pages
from reporting.evaluation.bigram import Baseline
from reporting.pages.lines import thinned
from reporting.speed import Clock
from runtime import device_memory, folders
from strategies import Strategy
from training.program import Program, TrainState
from training.transformer import TransformerProgram

Points = Sequence[tuple[float, float | None]]  # pairs of a step and a value
POINTS = 4_000  # about the most of a line in a picture: more than it has pixels
TOKENIZER = "tokenizer"  # the tokenizer's folder in a workdir


def prompt(config: ConfigDict, dataset: Dataset, program: Program) -> np.ndarray | None:
  """The token ids [1, P] of the prompt for the sample at the end of a run; None if there is no sample."""
  if dataset.text is None or config.sample_length < 1 or not program.traits.causal:
    return None
  sizes = program.sizes
  if not sizes.mixes.has_cache:
    return None
  ids = np.array([dataset.text.encode(config.sample_prompt)], np.int32)
  if not 0 < ids.shape[1] < sizes.seq_len:
    raise ConfigError(
      f"sample_prompt={config.sample_prompt!r} has {ids.shape[1]} tokens, but model.seq_len={sizes.seq_len} leaves "
      f"room for 1 to {sizes.seq_len - 1}; use another prompt, or sample_length=0 for no sample"
    )
  return ids


def write_config(workdir: Path, config: ConfigDict, dataset: Dataset) -> None:
  """Writes config.json, and into TOKENIZER the files with which others can load the tokenizer."""
  pages.write(workdir / "config.json", config.to_json(indent=2))  # as a whole: a full disk leaves the file before
  if dataset.text:
    (workdir / TOKENIZER).mkdir(exist_ok=True)
    for name, text in dataset.text.files().items():
      pages.write(workdir / TOKENIZER / name, text)


def epochs(dataset: Dataset, batches: Batches, step: int) -> dict[str, float]:
  """How many epochs each part of a mixture has given before a step, as `epochs/NAME`; {} for a single part."""
  if len(dataset.parts) == 1:
    return {}
  given = batches.mixture.epochs(step * batches.size)
  return {f"epochs/{part.name}": float(x) for part, x in zip(dataset.parts, given, strict=True)}


def part_lines(dataset: Dataset, values: dict[str, float]) -> list[str]:
  """A line for each part of a mixture, with the part's values of an evaluation."""
  if len(dataset.parts) == 1:
    return []
  forms = metrics.FORMATS | {"epochs": "{:.2f} epochs"}
  width = max(len(part.name) for part in dataset.parts)
  return [
    f"  {part.name:<{width}}  "
    + "  ".join(
      form.format(values[f"{name}/{part.name}"]) for name, form in forms.items() if f"{name}/{part.name}" in values
    )
    for part in dataset.parts
  ]


def parameter_table(strategy: Strategy) -> str:
  """Name, shape, dtype, size and sharding of every parameter; with adapters, also how many are trained."""
  program, place = strategy.program, strategy.state_sharding.params
  without_padding = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
  params = jax.tree.map(without_padding, strategy.shapes.params, place)
  table = parameter_overview.get_parameter_overview(params, include_stats="sharding")
  if not program.frozen(params):
    return table
  count = lambda tree: sum(w.size for w in jax.tree.leaves(tree))
  what = "statistics are the others" if program.traits.keeps_statistics else "in adapters"
  return f"{table}\ntrained   {count(program.trained(params)):,} of {count(params):,} parameters, {what}"


def about(devices: list[jax.Device], described: str, strategy: Strategy, dataset: Dataset) -> dict[str, str]:
  """What is about to run: its devices, strategy, attention and data; on GPUs also the memory that it may use.

  Args:
    described: `Strategy.describe`.
  """
  return {
    "devices": device_line(devices, jax.process_count()),
    "strategy": described,
    **model_line(strategy),
    "data": dataset.description,
  } | ({"memory": shown} if (shown := device_memory.described(devices)) else {})


def start_lines(described: dict[str, str]) -> list[str]:
  """The lines that show what `about` returns."""
  return [f"{name:<9} " + value.replace("\n", "\n" + 10 * " ") for name, value in described.items()]


def model_line(strategy: Strategy) -> dict[str, str]:
  """The implementation of attention, and why it is not the best of the platform; or what the model has in its place."""
  if not isinstance(strategy.program, TransformerProgram):
    return {"model": strategy.program.traits.name}
  sizes = strategy.program.sizes
  if not sizes.mixes.per_pair(sizes):
    without = "" if sizes.mixes.has_cache else ", which has no cache, so the run writes no sample"
    return {"attention": f"none: the mixer is {sizes.mixer}{without}"}
  whys = [limit.why for limit in strategy.runner.fallbacks if limit.field == "model.attention"]
  why = whys[0] if whys else sizes.attention_why
  return {"attention": f"{sizes.attention}: {why}" if why else sizes.attention}


def device_line(devices: list[jax.Device], processes: int) -> str:
  """The number and kind of the devices, and whether they are simulated."""
  kind, count = devices[0].device_kind, len(devices)
  if devices[0].platform == "cpu":
    kind = "CPU device, simulated" if count > 1 else "CPU"
  return f"{count} × {kind}" + (f" in {processes} processes" if processes > 1 else "")


def baseline_line(baseline: Baseline, bits_per_byte: float) -> str:
  """Compares the model with the byte bigram model, in bits per byte."""
  better = 1 - bits_per_byte / baseline.bits_per_byte
  return (
    f"baseline   byte bigram model: loss {baseline.loss:.4f}  {baseline.bits_per_byte:.3f} bits/byte; "
    f"this model is {abs(better):.1%} {'below' if better >= 0 else 'above'} it"
  )


def wall_time_lines(clock: Clock) -> list[str]:
  """Where the wall time went, largest share first."""
  parts = clock.parts()
  total = sum(parts.values())
  shown = [(name, seconds) for name, seconds in parts.items() if seconds >= 0.05]
  return [f"wall time {total:.1f} s"] + [f"  {name:<13} {s:7.1f} s  {s / total:6.1%}" for name, s in shown]


def sample(config: ConfigDict, strategy: Strategy, dataset: Dataset, state: TrainState) -> str | None:
  """Text that the model writes after the prompt; None if there is no sample."""
  begins = prompt(config, dataset, strategy.program)
  if begins is None or dataset.text is None:
    return None
  length = min(config.sample_length, strategy.program.sizes.seq_len - begins.shape[1])
  how = {"length": length, "seed": config.seed, "temperature": config.sample_temperature}
  tokens = strategy.writing.generate(strategy.averaged(state).params, begins, **how)
  return dataset.text.decode(np.asarray(tokens)[0].tolist())


def plot_loss(path: Path, losses: Mapping[str, Points], baseline: Baseline | None = None) -> None:
  """Plots the losses of each split, and the baseline's loss as a dashed line. None is a loss that was not finite.

  Raises what matplotlib raises: it needs a folder for its caches, and fails without one when it is imported.
  """
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot

  figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
  for split, style in (("train", {"linewidth": 1}), ("validation", {"marker": "o", "linewidth": 1.5})):
    points = thinned([(step, loss) for step, loss in losses.get(split, ()) if loss is not None], POINTS)
    if points:
      axes.plot(*zip(*points, strict=True), label=split, **style)
  if baseline:
    axes.axhline(baseline.loss, color="gray", linestyle="--", label="byte bigram")
  axes.set(xlabel="step", ylabel="loss (nats)")
  axes.grid(alpha=0.3)
  if axes.lines:
    axes.legend()
  picture = io.BytesIO()
  figure.savefig(picture, dpi=120, format="png")
  pyplot.close(figure)
  folders.write(path, picture.getvalue())
