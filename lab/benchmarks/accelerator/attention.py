"""Step `attention`: the kernels that training uses, in bfloat16, against `plain` in float32.

Each kernel also reads a text in pieces, by the code of devices that share its positions.
"""

import dataclasses
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from configs import base
from lab.benchmarks.accelerator.step import (
  NO_TIME,
  RESERVE,
  Measurement,
  Values,
  Verdict,
  Where,
  difference,
  largest,
  reason,
  say,
)
from models.ops import context, halo, pieces, positions
from models.ops.attention import BEST, PIECES, of_text, plain
from models.ops.gradients import with_gradient
from runtime.devices import start_jax
from strategies.execution.constraints import NOTHING, Constraints
from strategies.layout import Layout

BATCH, LENGTH, DOCUMENTS = 4, 2048, 4
SHARERS = 4  # devices that share a text, all simulated by the one that runs it
ROUNDS, CALLS = 9, 5  # each round times each kernel once, over so many calls
LONGEST = 40  # seconds that a case may take; on an H100 one takes about 20
PARTS = ("output", "query gradient", "key gradient", "value gradient", "sink gradient")  # the last if there are sinks
# The largest error allowed, relative to the largest entry. A bfloat16 has 8 bits, so one rounding is up to 0.4% of a
# value, and a few add up. A key that is wrongly seen or hidden, or a wrong scale, changes entries by tens of percents.
BOUND = 0.03


@dataclasses.dataclass(frozen=True)
class Kind:
  """A kind of attention."""

  heads: int
  kv_heads: int
  head_dim: int
  causal: bool
  segments: bool
  window: int = 0
  sinks: bool = False

  @property
  def name(self) -> str:
    words = ["causal" if self.causal else "bidirectional", f"{self.heads}/{self.kv_heads} heads of {self.head_dim}"]
    words += [f"a window of {self.window:,}"] if self.window else []
    return ", ".join([*words, *(["documents"] if self.segments else []), *(["sinks"] if self.sinks else [])])


# 8 of the 16 combinations. For any three of the four choices, all 8 combinations occur.
CASES = [
  Kind(16, (16, 4)[(wide + causal + segments) % 2], (64, 128)[wide], causal, segments)
  for wide, causal, segments in itertools.product((False, True), (True, False), (False, True))
]
# What only some models have: heads of 256 and local layers as Gemma 3, windows and sinks as gpt-oss.
CASES += [
  Kind(8, 4, 256, True, False),
  Kind(8, 4, 256, True, False, window=512),
  Kind(16, 4, 128, True, True, window=256),
  Kind(16, 2, 64, True, False, window=128, sinks=True),
  Kind(16, 2, 64, True, True, sinks=True),
]
# What a window saves: a text of so many positions, read by one example's heads with each window; 0: without one.
LONG, WINDOWS = Kind(16, 4, 128, True, False), (0, 4096, 1024)
LONG_TEXT = 16_384

Attention = Callable[..., jax.Array]  # an implementation, as models/ops/attention.py has them


def kernels(platform: str) -> dict[str, Attention]:
  """The implementations to check on a platform. One is `plain` in bfloat16, whose time the others are compared with."""
  best = BEST[platform]
  return {best: functools.partial(of_text, best), f"{best} in pieces": by_sharers(best), "plain": plain}


def by_sharers(name: str) -> Attention:
  """Attention as `SHARERS` devices that share a text compute it with an implementation's kernel for pieces.

  In a ring; with a window, by halos. One device simulates them by `jax.vmap`, which has no permutes of some devices
  alone, so halos come from gathered ends.
  """
  sharding = Constraints(NOTHING, own=Layout({"context": SHARERS}, positions="context"))
  on_each_device, kernel = functools.partial(jax.vmap, axis_name="context"), as_one_batch(PIECES[name])

  def own_positions(x: jax.Array) -> jax.Array:
    """[B, T, ...] → those of each device [devices, B, t, ...]."""
    return on_each_device(lambda device: positions.of_device(x, device, SHARERS))(jnp.arange(SHARERS))

  def in_order(x: jax.Array) -> jax.Array:
    """The way back."""
    early, late = (jnp.moveaxis(chunk, 0, 1) for chunk in jnp.split(x, 2, axis=2))
    return positions.join(early, late[:, ::-1]).reshape(x.shape[1], -1, *x.shape[3:])

  def run(
    *arrays: jax.Array, causal: bool, segments: jax.Array | None, window: int = 0, sinks: jax.Array | None = None
  ) -> jax.Array:
    def attend(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None) -> jax.Array:
      if window:
        return halo.attend(kernel, q, k, v, segments, sinks, sharding, window, permutes=False)
      return context.attend("ring", plain, kernel, q, k, v, segments, sinks, sharding, causal)

    # The gradient is taken on each device: JAX runs the backward pass of a `vmap` where its axis has no name.
    def forward(*given: Any) -> tuple[jax.Array, Any]:
      *arrays, sinks = given
      everywhere = None if sinks is None else jnp.broadcast_to(sinks, (SHARERS, *sinks.shape))
      out, vjp = on_each_device(lambda *own: jax.vjp(attend, *own))(*map(own_positions, arrays), everywhere)
      return in_order(out), vjp

    def backward(vjp: Any, g: jax.Array) -> tuple[Any, ...]:
      *of_arrays, of_sinks = on_each_device(lambda vjp, g: vjp(g))(vjp, own_positions(g))
      return *map(in_order, of_arrays), None if of_sinks is None else of_sinks.sum(axis=0)

    return with_gradient(forward, backward, *arrays, sinks)

  return run


def as_one_batch(kernel: pieces.Kernel) -> pieces.Kernel:
  """The kernel, for `jax.vmap`: the examples of all devices become one batch.

  JAX's own rule for cuDNN's attention refuses a mask that all heads share (jax 0.12.0).
  """

  def one(run: Callable[..., Any]) -> Callable[..., Any]:
    def called(q: Any, k: Any, v: Any, segments: Any, causal: bool, *read: Any, window: int = 0) -> Any:
      mapped = jax.custom_batching.custom_vmap(lambda q, k, v, s, *read: run(q, k, v, s, causal, *read, window=window))

      @mapped.def_vmap
      def _(devices: int, split: Any, *arrays: Any) -> tuple[Any, Any]:
        whole = lambda x, split: x if split else jnp.broadcast_to(x, (devices, *x.shape))
        join = lambda x, split: whole(x, split).reshape(-1, *x.shape[1 + split :])
        found = mapped(*jax.tree.map(join, arrays, tuple(split)))
        return jax.tree.map(lambda x: x.reshape(devices, -1, *x.shape[1:]), found), jax.tree.map(lambda _: True, found)

      return mapped(q, k, v, segments, *read)

    return called

  return pieces.Kernel(one(kernel.forward), one(kernel.backward))


def inputs(case: Kind, batch: int, length: int) -> tuple[list[jax.Array], jax.Array | None, jax.Array | None]:
  """Random q, k, v and the output's cotangent [B, T, N or K, H], all exact in bfloat16.

  And segments [B, T], and sinks [N] that take about as much as a few hundred keys; None for each that is not there.
  """
  keys = jax.random.split(jax.random.key(0), 6)
  heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
  arrays = [
    jax.random.normal(key, (batch, length, n, case.head_dim), jnp.bfloat16)
    for key, n in zip(keys[:4], heads, strict=True)
  ]
  starts = jax.random.bernoulli(keys[4], DOCUMENTS / length, (batch, length)).at[:, 0].set(True)
  segments = jnp.cumsum(starts, axis=1, dtype=jnp.int32) if case.segments else None
  return arrays, segments, 5 + jax.random.normal(keys[5], case.heads) if case.sinks else None


def program(kernel: Attention, case: Kind, dtype: Any) -> Callable[..., tuple[jax.Array, ...]]:
  """A jitted function of the inputs that returns the output and the gradients (`PARTS`), computed in `dtype`."""
  options = {"causal": case.causal} | ({"window": case.window} if case.window else {})

  @jax.jit
  def run(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, segments: jax.Array | None, sinks: jax.Array | None
  ) -> tuple[jax.Array, ...]:
    core = lambda arrays, more: kernel(*arrays, segments=segments, **options, **more)
    out, vjp = jax.vjp(core, [x.astype(dtype) for x in (q, k, v)], {} if sinks is None else {"sinks": sinks})
    of_arrays, of_more = vjp(g.astype(dtype))
    return (out, *of_arrays, *of_more.values())

  return run


def check(case: Kind, among: dict[str, Attention], batch: int = BATCH, length: int = LENGTH) -> Values:
  """The errors of each kernel by `PARTS`, and its median seconds for a forward and backward pass.

  `failed` says why a kernel that raised has neither.
  """
  arrays, *masks = inputs(case, batch, length)
  try:
    with jax.default_matmul_precision("highest"):
      exact = jax.device_get(program(plain, case, jnp.float32)(*arrays, *masks))
  except Exception as error:  # one case that fails must not hide the others
    return _failed(case, reason(error))
  errors: dict[str, Values] = {}
  failed: dict[str, str] = {}
  runs: dict[str, Callable[[], Any]] = {}
  for name, kernel in among.items():
    run = program(kernel, case, jnp.bfloat16)
    try:
      got = jax.device_get(run(*arrays, *masks))
    except Exception as error:  # nor one kernel
      failed[name] = reason(error)
      continue
    errors[name] = {part: difference(a, b) for part, a, b in zip(PARTS[: len(exact)], got, exact, strict=True)}
    runs[name] = functools.partial(run, *arrays, *masks)
  return {"case": _named(case), "errors": errors, "failed": failed, "seconds": timed(runs)}


def _failed(case: Kind, why: str) -> Values:
  """The row of a case without a reference."""
  return {"case": _named(case), "errors": {}, "failed": {"the reference": why}, "seconds": {}}


def _named(case: Kind) -> Values:
  return dataclasses.asdict(case) | {"name": case.name}


def timed(runs: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
  """The median seconds of a call of each function. The functions take turns, so that a slow moment slows all."""
  seconds: dict[str, list[float]] = {name: [] for name in runs}
  for turn in range(ROUNDS if runs else 0):
    names = list(runs)[turn % len(runs) :] + list(runs)[: turn % len(runs)]
    for name in names:
      start = time.perf_counter()
      jax.block_until_ready([runs[name]() for _ in range(CALLS)])
      seconds[name].append((time.perf_counter() - start) / CALLS)
  return {name: statistics.median(taken) for name, taken in seconds.items()}


def check_all(
  among: dict[str, Attention], cases: Iterable[Kind] = CASES, left: Callable[[], float] = lambda: math.inf, **sizes: int
) -> list[Values]:
  """A row for each case. Those for which too little time is left fail. `left` gives seconds."""
  rows = []
  for case in cases:
    made = check(case, among, **sizes) if left() >= LONGEST + RESERVE else _failed(case, NO_TIME)
    rows.append(made)
    shown = [f"{name} {_show(worst([made], name))} in {s * 1e3:.2f} ms" for name, s in made["seconds"].items()]
    say(f"{case.name:<50} {'; '.join(shown + [f'{name}: {why}' for name, why in made['failed'].items()])}")
  return rows


def measure(where: Where) -> Values:
  asked = base.get_config("tiny", "single")
  asked.compilation_cache_dir = ""
  devices = start_jax(asked)
  among = kernels(devices[0].platform)
  values = {"batch": BATCH, "length": LENGTH, "bound": BOUND, "rows": check_all(among, left=where.left)}
  if where.left() >= LONGEST + RESERVE:
    values["long"] = windows(next(iter(among.values())))
    say(f"{LONG_TEXT:,} positions: {_show_windows(values['long'])}")
  return values


def windows(kernel: Attention, length: int = LONG_TEXT, among: Sequence[int] = WINDOWS) -> dict[str, float]:
  """The median seconds for a forward and backward pass over one long text, by the window."""
  arrays, *masks = inputs(LONG, 1, length)
  of = lambda window: program(kernel, dataclasses.replace(LONG, window=window), jnp.bfloat16)
  runs = {str(window): functools.partial(of(window), *arrays, *masks) for window in among}
  jax.block_until_ready([run() for run in runs.values()])  # compiles them
  return timed(runs)


def worst(rows: Sequence[Values], kernel: str, parts: Sequence[str] = PARTS) -> float | None:
  """The largest error of a kernel over rows and parts; None if something is not finite."""
  return largest(error for row in rows for part, error in row["errors"][kernel].items() if part in parts)


def judge(values: Values) -> Verdict:
  broken = []
  for row in values["rows"]:
    name = row["case"]["name"]
    broken += [f"{kernel}, {name}: {why}" for kernel, why in row["failed"].items()]
    for kernel in row["errors"]:
      found = worst([row], kernel)
      if found is None or found > values["bound"]:
        broken.append(f"{kernel}, {name}: an error of {_show(found)}, more than {values['bound']:.1%}")
  return Verdict(tuple(broken))


def row(values: Values) -> list[str]:
  """The cells of the table: cases, errors of each kernel, and how many times faster than `plain` the fused one is."""
  ran: dict[str, list[Values]] = {}  # by kernel, the rows in which it has not failed
  for row in values["rows"]:
    for name in row["errors"]:
      ran.setdefault(name, []).append(row)
  shown = [
    f"{name}: output {_show(worst(rows, name, PARTS[:1]))}, gradients {_show(worst(rows, name, PARTS[1:]))}"
    for name, rows in ran.items()
  ]
  fused = [(row["seconds"], name) for name, rows in ran.items() if name in BEST.values() for row in rows]
  faster = [seconds["plain"] / seconds[name] for seconds, name in fused if "plain" in seconds]
  speed = f"{statistics.median(faster):.1f} ({min(faster):.1f}–{max(faster):.1f})" if faster else "–"
  complete = sum(not row["failed"] for row in values["rows"])
  long = _show_windows(values.get("long", {}))
  return [f"{complete} of {len(values['rows'])}", "; ".join(shown) or "–", speed, long or "–"]


def _show_windows(seconds: Mapping[str, float]) -> str:
  words = {"0": "no window"}
  return "; ".join(f"{words.get(name, f'{int(name):,}')}: {1e3 * s:.2f} ms" for name, s in seconds.items())


def _show(value: float | None) -> str:
  return "not finite" if value is None else f"{value:.2%}"


STEP = Measurement(
  name="attention",
  about=(
    f"each attention kernel in bfloat16 against `plain` in float32, on {BATCH} sequences of {LENGTH:,} tokens: output, "
    "gradients and time; causal and not, grouped heads, heads of 64, 128 and 256, documents, windows, sinks; on whole "
    f"texts, and in pieces, as {SHARERS} devices would share them; what windows save in a text of {LONG_TEXT:,}"
  ),
  promise=f"an error is above {BOUND:.0%} of the largest entry, or a kernel fails",
  aim="",
  measure=measure,
  judge=judge,
  columns=(
    "Cases", "Largest errors", "Times faster than plain: median (range)", f"{LONG_TEXT:,} positions, by the window",
  ),
  row=row,
  uses_devices=True,
)  # fmt: skip
