"""What devices send to share the products of a block: sums, and positions of the residual stream. Part of theory.py."""

import functools

from lab.analysis.case import Case, ring_share
from lab.analysis.compilers import COMPILERS
from lab.analysis.sent import Sent
from lab.analysis.weights import weights
from models import lora
from models.ops.positions import chunks

STATE_ITEM = 4  # bytes of a number of a state, in float32


def activations(case: Case) -> list[Sent]:
  """Sums over the devices that share a matrix product, and gathers of positions. The next computation waits for each.

  A block has two sums in the forward pass, after attention and the MLP, and two in the backward pass, for the
  cotangents of their inputs. Query, key and value share an input, and so do gate and up. If remat repeats the forward
  pass, then attention's sum too, unless it is saved; the MLP's would only make the block's output, which the backward
  pass does not need, unless a norm follows.
  If the positions are split, they are gathered where the sums' gradients come from: before attention and the MLP, again
  for the backward pass, and the cotangents of their outputs. A pipeline's weight units gather these cotangents again,
  and repeat the forward pass, too. Without gradients of these weights, only remat needs the positions again.
  Shared experts are one more MLP beside the experts: they have sums of their own, and gather positions for themselves.
  The first stage runs the embedding and the whole forward pass of its dense blocks twice.
  """
  compiler, sizes = COMPILERS[case.compiler], case.sizes
  numbers = case.examples * sizes.positions  # [b, T]
  stream = numbers * sizes.width * case.item  # [b, T, D]
  layers, first = case.layers, case.first
  again = 0 if "attention_output" in case.saved_names else 1 + case.splits
  heads = 2 + again + compiler.attention_again(case)
  mlp = 2 + (sizes.norms != "before" and case.repeats)  # the gradient of a norm needs what the MLP returned
  has_table = any(weight.is_table for weight in weights(sizes))
  has_logits = "vocab" in sizes.predicts.head()[1]
  vocab = ["embedding"] * has_table + ["head"] * has_logits  # rows that a device does not hold are zero; the cotangent
  for_weights = 2 if not sizes.lora or case.repeats else 0
  shared = case.mixtures if sizes.experts and sizes.experts.shared else 0  # blocks
  each = 4 + for_weights + (0 if sizes.lora else 2 * case.splits) + 2 * max(again - 1, 0)
  gathers = (layers + shared / 2) * each
  if case.splits and not again:  # both units of experts read the positions; else remat gathers them for each
    gathers += case.mixtures
  gathers += first * (6 if sizes.lora else 8)
  gathers += (has_table and not sizes.lora) + has_logits  # the cotangent of that sum, and the head's input
  loss = numbers * 3 * 4 if has_logits else 0  # the largest logit, the target's, and the sum
  mean = 0 if has_logits else case.examples * sizes.width * 4  # over the positions, for a class
  summed = functools.partial(_sum, case, scatters=compiler.scatters_stream(case))
  return [
    summed("heads", layers * heads * stream, f"activations: {heads:.3g} sums a block for the heads"),
    summed("mlp", layers * mlp * stream, f"activations: {mlp} sums a block for the mlp"),
    summed("mlp", shared * 2 * stream, "activations: 2 sums a block for the shared experts"),
    *(summed(dim, first * 3 * stream, f"activations: 3 sums a dense block for the {dim}") for dim in ("heads", "mlp")),
    summed("vocab", (len(vocab) + (has_table and first > 0)) * stream, " and ".join(vocab)),
    _waits(case, "all-reduce", "heads", _norms_over_heads(case), "norms of queries and keys"),
    _waits(case, "all-gather", "sequence", gathers * stream, "activations: positions for products"),
    _waits(case, "all-reduce", "vocab", loss, "loss"),
    _waits(case, "all-reduce", "sequence", mean, "mean over positions"),
    *_mean_over_positions(case),
    *(_handed_on(case) if case.sizes.mixes.state(case.sizes) else _positions(case)),
  ]


def _norms_over_heads(case: Case) -> float:
  """Bytes of the means by which queries and keys are normalized over all heads, and of those in their gradients."""
  sizes = case.sizes
  if not sizes.qk_norm or sizes.qk_norm_over != "width" or not sizes.mixes.per_pair(sizes):
    return 0.0
  passes = (2 + (sizes.remat != "minimal")) * case.layers + 3 * case.first
  return 2 * passes * case.examples * sizes.positions * 4


def _handed_on(case: Case) -> list[Sent]:
  """What a recurrence sends if devices share the positions of an example (models/ops/recurrence.py).

  It gathers the total decay and the state of every chunk in the forward pass, in the backward pass, and again if remat
  repeats the forward pass.
  """
  sizes, n = case.sizes, case.sharers
  of_device = chunks(1) * 2 * case.rows * sizes.mixes.state(sizes) / case.layout.shards("heads") * STATE_ITEM
  passes = (2 if case.saves_attended else 3) * case.layers + 3 * case.first
  size = passes * of_device * (n - 1) * case.batch_parts
  return [Sent("all-gather", case.axes("positions"), size, f"{sizes.mixer}: the states of chunks", waits=True)]


def _mean_over_positions(case: Case) -> list[Sent]:
  """The all-reduces of the sum over the positions and of its gradient, for what is predicted of an example."""
  sizes, n = case.sizes, case.sharers
  if sizes.predicts.predictions() > 1:
    return []
  mean = 2 * case.examples * n * sizes.width * 4 * case.batch_parts
  return [Sent("all-reduce", case.axes("positions"), 2 * ring_share(n) * mean, "mean over positions")]


def _positions(case: Case) -> list[Sent]:
  """What attention sends if devices share the positions of an example (models/ops/context.py).

  Keys and values go to all other devices in the forward and in the backward pass; their gradients come back. The ring
  adds these up in float32 on their way, and then sends them home. If remat repeats the forward pass, then it all but
  the first and the last permute, which the backward pass needs anyway. `exchange` moves queries and what was read, too,
  and moves them again unless everything is saved.
  """
  sizes, n, axes = case.sizes, case.sharers, case.axes("positions")
  if n == 1 or not sizes.mixes.per_pair(sizes):
    return []
  layers, first, heads = *(blocks - local for blocks, local in local_blocks(case)), case.layout.shards("heads")
  numbers = case.examples * sizes.positions * sizes.head_dim * case.batch_parts  # of one head
  keys = sizes.kv_heads / heads * numbers
  sent = lambda kind, size, what, waits=True: Sent(kind, axes, size, what, waits=waits)
  rows = list(_halos(case))
  if not layers + first:
    return rows
  if sizes.attention_context == "exchange":
    rows.append(_exchange(case, layers, first, "attention"))
  elif sizes.attention_context == "ring":
    again = 0 if case.saves_attended else max(n - 2, 0)
    size = layers * 2 * keys * ((2 * n - 1 + again) * case.item + (n - 1) * 4)
    rows.append(sent("collective-permute", size, "attention: a ring of keys, values and their gradients", waits=False))
  else:
    size = 2 * keys * case.item * (n - 1)
    rows.append(sent("all-gather", (2 * layers + 3 * first) * size, "attention: keys and values"))
    rows.append(sent("reduce-scatter", (layers + first) * size, "attention: gradients of keys and values"))
  return rows


def _exchange(case: Case, layers: float, first: float, what: str) -> Sent:
  """The all-to-alls of so many blocks: queries, keys and values for heads, and what was read back."""
  sizes, n, heads = case.sizes, case.sharers, case.layout.shards("heads")
  numbers = case.examples * sizes.positions * sizes.head_dim * case.batch_parts  # of one head
  copies = max(1.0, n * heads / sizes.kv_heads)
  times = (2 if sizes.remat == "minimal" else 3) * layers + 3 * first
  size = times * 2 * (sizes.heads / heads * numbers + copies * (sizes.kv_heads / heads * numbers))
  why = f"{what}: positions for heads, and back"
  return Sent("all-to-all", case.axes("positions"), size * case.item * ring_share(n), why, waits=True)


def local_blocks(case: Case) -> tuple[tuple[int, int], tuple[int, int]]:
  """The blocks of one device, and those that a pipeline's first stage runs before: how many, and how many local."""
  before, own = case.sizes.windowed[: case.first], case.sizes.windowed[case.first :]
  return (case.layers, round(sum(own) * case.layers / len(own))), (case.first, sum(before))


def _halos(case: Case) -> list[Sent]:
  """What local layers send: keys and values of the `window` - 1 positions before each of two chunks (ops/halo.py).

  Once in the forward pass, again if remat repeats it, and their gradients come back. The early chunk's go up from the
  device before; the late chunk's go down, but for the last device, and across the middle if a halo is longer than a
  chunk. In the stages of a pipeline all devices gather the ends of all chunks, and scatter the gradients.
  """
  sizes, n, axes = case.sizes, case.sharers, case.axes("positions")
  (_, layers), (_, first) = local_blocks(case)
  if not layers + first:
    return []
  if sizes.local_way == "exchange":
    return [_exchange(case, layers, first, "local layers")]
  per_row = 2 * sizes.kv_heads / case.layout.shards("heads") * sizes.head_dim * case.item  # keys and values
  halo, chunk = sizes.shown - 1, sizes.positions // chunks(n)
  positions = case.rows * halo * case.batch_parts
  times = (2 + (sizes.remat != "minimal")) * layers + 3 * first
  if sizes.local_way == "halo":
    across = case.rows * max(halo - chunk, 0) * case.batch_parts  # the middle of the text
    size = times * (2 * positions + across) * per_row
    return [Sent("collective-permute", axes, size, "local layers: halos and their gradients")]
  gathers, scatters = times - layers - first, layers + first
  size = (n - 1) * 2 * positions * per_row
  return [
    Sent("all-gather", axes, gathers * size, "local layers: the ends of all chunks", waits=True),
    Sent("reduce-scatter", axes, scatters * size, "local layers: gradients of these ends", waits=True),
  ]


def adapters(case: Case) -> list[Sent]:
  """What goes between the two halves of adapters: R numbers for each position.

  An adapter of a weight that reads the stream gathers them, again if remat does not save them, and sums their
  cotangents. One of a weight that writes to it sums them, again if they are not saved, and gathers their cotangents.
  """
  sizes, repeats, scatters = case.sizes, case.repeats, COMPILERS[case.compiler].scatters_adapters(case)
  if not sizes.lora:
    return []
  low = case.examples * sizes.positions * sizes.lora.rank * case.item
  gathers, rows = 0, []
  for dim, reading, writing in lora.groups(sizes.lora, sizes.sides):
    sums = len(reading) * (case.layers + case.first) + len(writing) * ((1 + repeats) * case.layers + 2 * case.first)
    rows.append(_sum(case, dim, sums * low, f"adapters: sums for the {dim}", scatters))
    gathers += ((1 if sizes.remat == "minimal" else 2) * case.layers + 2 * case.first) * len(reading)
    gathers += (case.layers + case.first) * len(writing)
  return [*rows, _waits(case, "all-gather", "sequence", gathers * low, "adapters: positions")]


def _sum(case: Case, dim: str, size: float, what: str, scatters: bool) -> Sent:
  """The sum of activations over the devices that split a dimension. Those that also split positions keep their own.

  Args:
    scatters: whether the compiler sends these devices only their own positions.
  """
  split = case.axes(dim) == case.axes("sequence") and scatters
  return _waits(case, "reduce-scatter" if split else "all-reduce", dim, size, what)


def _waits(case: Case, kind: str, dim: str, size: float, what: str) -> Sent:
  """A collective over the devices that split a dimension, in each part of the batch. `size` is the whole in bytes."""
  times = case.batch_parts * (2 if kind == "all-reduce" else 1)
  return Sent(kind, case.axes(dim), times * ring_share(case.layout.shards(dim)) * size, what, waits=True)
