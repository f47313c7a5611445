"""Shared by the tests: small configs, the objects made from them, and comparisons with their tolerances."""

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params
from ml_collections import ConfigDict

import strategies
from configs import base
from data.batches import HostBatch, id_words
from errors import ConfigError
from models.generate import run_cached
from models.ops import attention
from models.sizes import ModelSizes
from models.transformer import Transformer
from reporting import metrics
from runtime import command_line
from strategies.execution.mesh import make_mesh, resolve
from strategies.layout import Layout
from training import settings
from training.program import Params, Program, TrainState
from training.transformer import TransformerProgram

ROOT = Path(__file__).parents[1]

# The largest relative difference allowed between a strategy and a single device. Summing float32 numbers in another
# order changes the result by a few units in the last place, 6e-8 each; these tests see at most 2e-6.
PARITY = 1e-5


def config(strategy: str = "single", preset: str = "tiny", **fields: Any) -> ConfigDict:
  """A preset with some fields changed. Names have two underscores for each dot."""
  changed = base.get_config(preset, strategy)
  changed.compilation_cache_dir = "auto"  # keeps the cache of conftest.py, which holds all programs
  changed.data.cache_dir = "~/.cache/meshwright/tests"
  changed.update_from_flattened_dict({name.replace("__", "."): value for name, value in fields.items()})
  return changed


def in_full(cases: Iterable[Any], *in_each: Any) -> list[Any]:
  """Cases of a parametrized test. Those of `in_each` are in `make test`, all are in `make test-all`."""
  values = lambda case: case if isinstance(case, tuple) else (case,)
  return [case if case in in_each else pytest.param(*values(case), marks=pytest.mark.full) for case in cases]


def each_once(first: Iterable[Any], second: Iterable[Any], *chosen: tuple[Any, Any]) -> list[Any]:
  """All pairs, as cases of a parametrized test. In `make test` are so few that each value is in at least one of them.

  The pairs of `chosen` are among them. Each other value takes the partner that the fewest pairs have so far.
  """
  sides, pairs = (list(first), list(second)), list(chosen)
  for side in (0, 1):
    uses = lambda value, side=side: sum(pair[side] == value for pair in pairs)
    for value in sides[side]:
      if not uses(value):
        other = min(sides[1 - side], key=functools.partial(uses, side=1 - side))
        pairs.append((value, other) if side == 0 else (other, value))
  return in_full([(x, y) for x in sides[0] for y in sides[1]], *pairs)


def in_every_way(
  alone: Iterable[str], others: Iterable[str], ways: Sequence[str], variants: Iterable[str]
) -> list[tuple[str, str, str]]:
  """Cases of a layout, one of three ways, and a variant: a Latin square of them.

  Each variant runs once with one of the layouts of a single axis (`alone`), the next one with another and in another
  way. Each of the other layouts runs a third of the variants, so that each variant runs in every way.
  """
  one, named = list(alone), list(enumerate(variants))
  cases = [(one[j % len(one)], ways[(j + j // 3) % 3], variant) for j, variant in named]
  for i, name in enumerate(others):
    cases += [(name, ways[(1 + i // 3 + j // 3) % 3], variant) for j, variant in named if (i + j) % 3 == 0]
  return cases


CORES = {
  "plain": attention.plain, "blockwise": attention.blockwise,
  "splash": functools.partial(attention.splash, interpret=True),  # the TPU's kernel, on a CPU
}  # fmt: skip
IMAGES = {
  "model__inputs": "images", "model__objective": "class", "data__name": "synthetic",
  "model__image_size": 32, "model__channels": 3, "model__classes": 10,
}  # fmt: skip


def program(**fields: Any) -> TransformerProgram:
  return settings.program(config(**fields), "cpu")


def model_sizes(**fields: Any) -> ModelSizes:
  return program(**{f"model__{name}": value for name, value in fields.items()}).sizes


def strategy(name: str, program: Program, devices: int = 8, **fields: Any) -> strategies.Strategy:
  return strategies.create(config(name, **fields), program, jax.devices()[:devices])


def laid_out(
  layout: Layout, program: Program, devices: Sequence[jax.Device] | None = None, **fields: Any
) -> strategies.Strategy:
  """A strategy with a layout that the registry need not have, on these devices or on this machine's."""
  layout = resolve(layout, layout.device_count)
  mesh = make_mesh(layout, list(devices or jax.devices())[: layout.device_count])
  return strategies.build(config(**fields), layout, program, mesh)


def step_and_evaluation(runner: strategies.Strategy, state: TrainState, size: int) -> tuple[Any, Params, Any]:
  """The metrics and the gradients of a step, and the sums of an evaluation of five examples and padding."""
  batch, padded = random_batch(runner.program, size), random_batch(runner.program, size)
  padded["mask"][5:] = False
  found = runner.gradients(state, runner.shard(batch, size))
  return jax.device_get((*found, runner.eval_step(state, runner.shard(padded, size))))


def trained(runner: strategies.Strategy, steps: int, size: int) -> dict[str, np.ndarray]:
  """The metrics of some steps, each with a batch of its own: [steps]."""
  state, found = initial_state(runner), []
  for step in range(steps):
    batch = random_batch(runner.program, size, seed=step)
    state, metrics = runner.train_step(state, runner.shard(batch, size))
    found.append(metrics)
  found = jax.device_get(found)
  return {name: np.array([metrics[name] for metrics in found]) for name in found[0]}


def assert_writes_as(ours: strategies.Strategy, single: strategies.Strategy, texts: int = 8) -> None:
  """Checks that texts, whose length no mesh divides, have the same scores, and are continued in the same way."""
  tokens = np.random.default_rng(0).integers(0, ours.program.sizes.vocab_size, (texts, 19), np.int32)
  counted, found = np.ones(tokens.shape, bool), []
  for runner in (ours, single):
    params, writing = initial_state(runner).params, runner.writing
    texts = writing.generate(params, tokens[:1, :7], length=5, seed=0, temperature=0.0)
    found.append(jax.device_get((writing.log_likelihoods(params, tokens, counted), texts)))
  np.testing.assert_allclose(found[0][0], found[1][0], rtol=PARITY)
  np.testing.assert_array_equal(found[0][1], found[1][1])


def initial_state(runner: strategies.Strategy, seed: int = 1) -> TrainState:
  """A state like that of `runner.init(seed)`, drawn without a program. test_parity.py tests `init` itself."""
  params, rule = random_params(runner.program.sizes, seed), runner.program.rule
  shapes = jax.eval_shape(rule.transform.init, runner.program.trained(params))
  opt_state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
  return placed(TrainState(np.zeros((), np.int32), params, opt_state), runner)


def placed(state: TrainState, runner: strategies.Strategy) -> TrainState:
  """A state of NumPy arrays as a strategy stores it: with padding, on its devices."""

  def padded(x: np.ndarray, like: jax.ShapeDtypeStruct) -> np.ndarray:
    return np.pad(x, [(0, new - old) for old, new in zip(x.shape, like.shape, strict=True)]) if x.ndim else x

  return jax.device_put(jax.tree.map(padded, state, runner.abstract_state()), runner.state_sharding)


def unpadded(tree: Any, shapes: Any) -> Any:
  """Stored arrays without their padding, on the host. Checks that it is zeros."""

  def cut(x: jax.Array, like: Any) -> np.ndarray:
    whole = np.asarray(jax.device_get(x))
    inside = whole[tuple(map(slice, like.shape))]
    assert np.count_nonzero(whole) == np.count_nonzero(inside)
    return inside

  return jax.tree.map(cut, tree, shapes)


def params_of(sizes: ModelSizes) -> Params:
  """`random_params` on the default device."""
  return jax.device_put(random_params(sizes))


def assert_copies_equal(tree: Any) -> None:
  """Checks that devices that hold the same piece of an array hold the same bits."""
  for path, x in jax.tree.leaves_with_path(tree):
    copies: dict[str, bytes] = {}
    for shard in x.addressable_shards:
      bits = np.asarray(shard.data).tobytes()
      assert copies.setdefault(str(shard.index), bits) == bits, f"{jax.tree_util.keystr(path)} on {shard.device}"


@functools.cache
def random_params(sizes: ModelSizes, seed: int = 1) -> Params:
  """Parameters as large as initial ones. Biases and adapters are not zero, because that would hide their gradients."""
  random, initial = np.random.default_rng(seed), dataclasses.replace(program(), sizes=sizes).init

  def draw(path: tuple[Any, ...], w: jax.ShapeDtypeStruct) -> np.ndarray:
    name = path[-1].key
    std = {"scale": 0.0, "embedding": sizes.reads.embedding()[2], "b": 0.1}.get(name, sizes.width**-0.5)
    return ((name == "scale") + std * random.standard_normal(w.shape)).astype(w.dtype)

  return jax.tree.map_with_path(draw, jax.eval_shape(lambda: initial(jax.random.key(0)).params))


def measured(workdir: Path) -> list[dict[str, Any]]:
  """The lines of a run's metrics.jsonl, without the speeds, and without those about the time of its job."""
  timing = ("tokens_per_second", "images_per_second", "step_ms", "data_wait", "tflops_per_second")
  lines = [line for line in metrics.read(workdir / "metrics.jsonl") if line["split"] != "job"]
  return [{k: v for k, v in line.items() if k not in timing} for line in lines]


def logits_in_parts(model: Transformer, tokens: np.ndarray) -> jax.Array:
  """The logits of texts [B, 24] that are read in three parts, with a cache of what was read before."""

  @jax.jit
  def in_parts(tokens: jax.Array) -> jax.Array:
    cache, parts = model.sizes.mixes.empty_cache(model.sizes, jnp.full(*tokens.shape), tokens.shape[1]), []
    for start, stop in ((0, 10), (10, 11), (11, 24)):
      x, cache = run_cached(model, model.embed(tokens[:, start:stop]), cache, start)
      parts.append(model.logits(x))
    return jnp.concatenate(parts, axis=1)

  return in_parts(tokens)


def random_batch(program: Program, size: int, seed: int = 0) -> HostBatch:
  """A batch of random examples in the shapes that a program takes, with distinct example ids."""
  random = np.random.default_rng(seed)
  batch = {
    name: (
      random.standard_normal((size, *field.shape), field.dtype)
      if field.below is None
      else random.integers(0, field.below, (size, *field.shape)).astype(field.dtype)
    )
    for name, field in program.fields().items()
  }
  if "segments" in batch:
    batch["segments"] = random_segments(random, *batch["segments"].shape)
  return batch | {"id": id_words(random.permutation(1000)[:size]), "mask": np.ones(size, np.bool_)}


def random_segments(random: np.random.Generator, size: int, length: int) -> np.ndarray:
  """Rows of up to four documents and padding [size, length]. The first row is a single document."""
  is_first = np.zeros((size, length), np.int32)
  np.put_along_axis(is_first, random.integers(0, length, (size, 3)), 1, axis=1)
  is_first[:, 0] = 1
  used = random.integers(length // 2, length + 1, (size, 1))
  segments = np.where(np.arange(length) < used, np.cumsum(is_first, axis=1, dtype=np.int32), 0)
  segments[0] = 1
  return segments


def relative_difference(a: Any, b: Any) -> float:
  """The largest difference between two arrays of the same shape, relative to the largest entry of `b`."""
  a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
  assert a.shape == b.shape, f"arrays of the shapes {a.shape} and {b.shape}"
  for name, x in (("first", a), ("second", b)):
    assert np.isfinite(x).all(), f"{np.sum(~np.isfinite(x))} of {x.size} numbers of the {name} array are not finite"
  return float(np.abs(a - b).max() / max(np.abs(b).max(), np.finfo(np.float32).tiny))


def assert_trees_close(a: Any, b: Any, tolerance: float) -> None:
  """Checks that each leaf of `a` is within `tolerance` of its leaf in `b`, relative to that leaf's largest entry."""
  assert jax.tree.structure(a) == jax.tree.structure(b)
  pairs = list(zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True))
  apart = {jax.tree_util.keystr(path): relative_difference(x, y) for (path, x), y in pairs}
  shown = [f"{name} by {difference:.1e}" for name, difference in apart.items() if difference > tolerance]
  assert not shown, f"{len(shown)} of {len(pairs)} arrays differ: {', '.join(shown)}"


def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
  """All equations of a jaxpr and of the jaxprs inside it."""
  for equation in jaxpr.eqns:
    yield equation
    for inner in jaxprs_in_params(equation.params):
      yield from equations(inner)


def command_line_of(define: Callable[[flags.FlagValues], None], *arguments: str) -> flags.FlagValues:
  """The flags of a tool, parsed from a user's arguments."""
  values = flags.FlagValues()
  command_line.define_config(values)
  define(values)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sys, "argv", ["tool", *arguments])  # where ml_collections looks for fields
    values(sys.argv)
  return values


@contextlib.contextmanager
def one_sentence(*parts: str, kind: type[Exception] = ConfigError) -> Iterator[None]:
  """Expects an error of one line that contains all the parts: the field, its value and the fix."""
  with pytest.raises(kind) as caught:
    yield
  message = str(caught.value)
  assert "\n" not in message
  for part in parts:
    assert part in message, f"{part!r} is not in {message!r}"
