"""Step `parity`: every strategy on the accelerators against one device, and that device against the CPU.

In float32, and once in bfloat16 with the platform's own kernel for attention, which runs on each device's own heads.
Compares the losses of 20 steps and the gradient of every parameter, as the tests do on simulated devices. On one device
every strategy falls back to the single-device run. Then one model is enough to see that each of them starts.
"""

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

import data
import strategies
from configs import base
from errors import ConfigError
from lab.benchmarks.accelerator.step import Measurement, Values, Verdict, Where, difference, largest, reason, say
from models.dimensions import resized
from runtime.devices import start_jax
from strategies.execution.mesh import fitted
from training import settings

STEPS, EXAMPLES = 20, 16
# The largest relative differences allowed. Between strategies only the order of sums differs, as in the tests. Between
# two kinds of device the last places of exponentials and roots differ too. Products in TF32 would differ by 1e-3.
BETWEEN_STRATEGIES, BETWEEN_KINDS = 1e-5, 1e-4
IN_BFLOAT16 = 5e-2  # a rounding is 0.4%, and sums in another order round differently
CPU, ONE = "the CPU", "one device"  # what a row is compared with

# Without clipping, Adam's first moment after one step is (1 − b1) times the gradient, so no second program is compiled.
SMALL = {
  "data.name": "synthetic", "model.dtype": "float32", "model.attention": "plain", "optimizer.clip_norm": 0.0,
  "steps": STEPS, "pipeline.microbatches": 4,
}  # fmt: skip
TEXT = {"model.mlp_width": 64, "model.vocab_size": 64, "model.seq_len": 16}
IMAGES = {
  "model.inputs": "images", "model.objective": "class", "model.image_size": 16, "model.channels": 3,
  "model.classes": 10, "data.augment": True,
}  # fmt: skip
LOCAL = {
  "model.seq_len": 64, "model.window": 16, "model.layers_pattern": "local:1,global:1", "model.attention_sinks": True,
}  # fmt: skip
KERNEL = {"model.dtype": "bfloat16", "model.attention": "auto"}
VARIANTS: dict[str, dict[str, Any]] = {
  "text": {**TEXT, "model.dropout": 0.1},
  "documents": {
    **TEXT, "data.packing": "documents", "data.prompt_field": "prompt", "model.tied_embedding": True,
    "model.remat": "full", "accumulation": 2,
  },
  "images": {**TEXT, **IMAGES, "model.dropout": 0.1},
  "experts": {**TEXT, "model.experts": 8, "model.expert_width": 32},
  "local": {**TEXT, **LOCAL, "model.rope_base_local": 1e3, "model.norms": "both", "model.qk_norm": True},
  "kernel": {**TEXT, **KERNEL},
  "local kernel": {**TEXT, **LOCAL, **KERNEL},
}  # fmt: skip


def in_bfloat16(variant: str) -> bool:
  return VARIANTS[variant].get("model.dtype") == "bfloat16"


Trained = tuple[np.ndarray, dict[str, np.ndarray]]  # losses, and the first step's gradients by parameter


def train(
  name: str, variant: str, devices: Sequence[jax.Device], start: Any = None, size: int = EXAMPLES
) -> tuple[Trained, Any]:
  """The losses of 20 steps and the first gradients, and the state that it started with, on the host.

  Args:
    start: a state on the host; None to make one.
    size: examples in a global batch.

  Raises ConfigError if the strategy does not fit the devices.
  """
  asked = base.get_config("tiny", name)
  asked.update_from_flattened_dict(SMALL | VARIANTS[variant])
  asked.mesh.update(fitted(strategies.layout_of(name), len(devices)).mesh)
  program = settings.program(asked, devices[0].platform)
  runner = strategies.create(asked, program, devices)
  runner.check_batch("batch_size", size, asked.accumulation)
  start = jax.device_get(runner.init(asked.seed)) if start is None else start
  stored = lambda x, like: jax.device_put(resized(x, like.shape), like.sharding)  # devices may not divide it
  state, shapes = jax.tree.map(stored, start, runner.abstract_state()), runner.shapes.opt_state[0].mu
  losses: list[jax.Array] = []
  gradients: dict[str, np.ndarray] = {}
  batches = data.Batches(data.mixture(data.load(asked)), size, asked.seed)
  for step in range(STEPS):
    state, metrics = runner.train_step(state, runner.shard(batches.read(step, runner.rows(size)), size))
    if not gradients:
      cut = lambda m, like: np.asarray(m)[tuple(map(slice, like.shape))] / (1 - program.optimizer.b1)
      moments = jax.tree.leaves_with_path(jax.tree.map(cut, jax.device_get(state.opt_state[0].mu), shapes))
      gradients = {jax.tree_util.keystr(path, simple=True, separator="/"): m for path, m in moments}
    losses.append(metrics["loss"])
  return (np.array(jax.device_get(losses)), gradients), start


def compare(ours: Trained, reference: Trained) -> Values:
  """The largest relative differences: `loss`, `gradient` and the `parameter` of the latter. None: not finite."""
  apart = {name: difference(ours[1][name], gradient) for name, gradient in reference[1].items()}
  worst = next(name for name in apart if apart[name] == largest(apart.values()))
  return {
    "loss": largest(difference(a, b) for a, b in zip(ours[0], reference[0], strict=True)),
    "gradient": apart[worst],
    "parameter": worst,
  }


def compare_all(
  devices: Sequence[jax.Device],
  cpu: jax.Device,
  names: Iterable[str] | None = None,
  variants: Mapping[str, Any] = VARIANTS,
) -> list[Values]:
  """A row for each comparison. A strategy that does not fit the devices says why in `left_out`.

  Args:
    names: the strategies; None for all. On one device they run the first variant only.
  """
  rows, size = [], EXAMPLES * max(1, len(devices) // 8)
  names = list(names or [name for name in strategies.names() if name != "single"])

  def add(strategy: str, variant: str, against: str, made: Values) -> None:
    bound = IN_BFLOAT16 if in_bfloat16(variant) else {CPU: BETWEEN_KINDS, ONE: BETWEEN_STRATEGIES}[against]
    rows.append({"strategy": strategy, "variant": variant, "against": against, "bound": bound} | made)
    known = made.get("left_out") or made.get("error")
    shown = known or f"losses {_show(made['loss'])}, gradients {_show(made['gradient'])}"
    say(f"{variant:<10} {strategy:<16} against {against:<11} {shown}")

  with jax.default_matmul_precision("highest"):
    for variant in variants:
      host, start = train("single", variant, [cpu], size=size)
      single, _ = train("single", variant, devices[:1], start, size)
      add("single", variant, CPU, compare(single, host))
      for name in names if len(devices) > 1 or variant == next(iter(variants)) else []:
        try:
          made = compare(train(name, variant, devices, start, size)[0], single)
        except ConfigError as error:
          made = {"left_out": str(error)}
        except Exception as error:  # one strategy that fails must not hide the others
          made = {"error": reason(error)}
        add(name, variant, ONE, made)
  return rows


def measure(where: Where) -> Values:
  with tempfile.TemporaryDirectory() as cache:
    asked = base.get_config("tiny", "single")
    asked.compilation_cache_dir = cache  # on one device most strategies are the same program
    devices = start_jax(asked)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    try:
      cpu = jax.devices("cpu")[0]
    except RuntimeError as error:
      raise ConfigError("the CPU is not available to compare with; unset JAX_PLATFORMS") from error
    return {"steps": STEPS, "rows": compare_all(devices, cpu)}


def judge(values: Values) -> Verdict:
  broken, compared = [], 0
  for row in values["rows"]:
    what = f"{row['variant']}, {row['strategy']} against {row['against']}"
    if "error" in row:
      broken.append(f"{what}: {row['error']}")
    elif "left_out" not in row:
      compared += row["against"] == ONE
      place = {"loss": "the losses", "gradient": f"the gradients of {row['parameter']}"}
      for part, name in place.items():
        if row[part] is None or row[part] > row["bound"]:
          broken.append(f"{what}: {name} differ by {_show(row[part])}, more than {row['bound']:.0e}")
  if not compared:
    broken.append("no strategy could be compared")
  return Verdict(tuple(broken))


def row(values: Values) -> list[str]:
  """The cells of the table: strategies, and the largest differences of both comparisons."""
  rows = values["rows"]
  compared = {r["strategy"] for r in rows if "loss" in r and r["against"] == ONE}
  left_out = sorted({r["strategy"] for r in rows if "left_out" in r})
  cells = [f"{len(compared)}" + (f"; left out: {', '.join(left_out)}" if left_out else "")]
  for against in (CPU, ONE):
    for part in ("loss", "gradient"):
      found = [r[part] for r in rows if part in r and r["against"] == against and not in_bfloat16(r["variant"])]
      cells.append(_show(largest(found)) if found else "–")
  return cells


def _show(value: float | None) -> str:
  return "not finite" if value is None else f"{value:.1e}"


STEP = Measurement(
  name="parity",
  about=(
    "every strategy on all devices against one device, and one device against the CPU: "
    f"{STEPS} losses and every gradient, in float32 with exact products, and in bfloat16 with attention's kernel"
  ),
  promise=(
    f"a relative difference is above {BETWEEN_STRATEGIES:.0e} between strategies or {BETWEEN_KINDS:.0e} to the CPU, "
    f"or {IN_BFLOAT16:.0e} in bfloat16"
  ),
  aim="",
  measure=measure,
  judge=judge,
  columns=(
    "Strategies compared", "One device against the CPU: losses", "gradients",
    "Strategies against one device: losses", "gradients",
  ),
  row=row,
  uses_devices=True,
)  # fmt: skip
