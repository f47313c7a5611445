"""What a mixture of experts sends, computes and needs, if all experts have equal loads (models/ops/experts.py).

With unequal loads, the busiest device has more to do, and `exchange` needs more rounds, which all send equally much.
"""

import math

from lab.analysis.case import Case, Product, ring_share
from lab.analysis.compilers import COMPILERS
from lab.analysis.hlo import Each
from lab.analysis.sent import Sent
from lab.analysis.weights import trained
from models.ops.exchange import ROUNDS, round_rows
from models.ops.expert_rows import most_rows
from models.ops.grouped import BLOCKS, block_size

INDEX = 4  # bytes of a number of an expert, of a count of rows, and of the gradient of a scale


def sent(case: Case) -> list[Sent]:
  """What devices that share experts send: tokens and results, and in the backward pass tokens again, and gradients.

  `gather` sends them to all, and `exchange` and `ragged` a row for each of a token's experts. A pipeline's weight units
  send tokens and the gradients of results once more.
  """
  return [*_always(case), *_shared(case)] if case.sizes.experts else []


def _always(case: Case) -> list[Sent]:
  """Gradients of tokens' weights, and of halves of adapters that have no hidden units: devices that share hidden units
  have parts of these. And the sums of routers.
  """
  sizes, layout = case.sizes, case.layout
  layers = case.mixtures
  numbers = case.tokens * case.experts.per_token * layers
  loads = sizes.mixtures * case.experts.count + 3 + bool(sizes.expert_limit)
  batch = case.ordered((*layout.axes("batch"), *layout.axes("positions"), *case.transfers.by_hand))
  parts = 1 if case.transfers.by_hand else case.batch_parts
  of_texts = case.rows * (layers * case.experts.count + 1)
  halves = [weight for weight in trained(sizes) if "experts" in weight.dims and "mlp" not in weight.dims]
  in_parts = sum(case.used(weight) for weight in halves) * case.item / INDEX
  times = 1 if sizes.remat == "minimal" else 2  # again in the backward pass
  summed = lambda axes, size, what, **more: Sent(
    "all-reduce", axes, 2 * ring_share(case.devices(axes)) * size * INDEX, f"experts: {what}", **more
  )
  return [
    summed(case.axes("mlp"), case.batch_parts * numbers, "gradients of weights", waits=True),
    summed(case.axes("mlp"), case.batch_parts * in_parts, "gradients of adapters"),
    summed(case.axes("positions"), times * case.batch_parts * of_texts, "loads of texts", waits=True),
    summed(batch, parts * loads, "loads"),
    *_chunks(case, times * layers),
  ]


def _chunks(case: Case, times: float) -> list[Sent]:
  """How often experts were chosen in the chunks of a text that devices share, if experts have a capacity."""
  size = case.rows * 2 * case.experts.count * INDEX * (case.sharers - 1)
  times *= case.batch_parts * bool(case.sizes.expert_limit)
  return [Sent("all-gather", case.axes("positions"), times * size, "experts: loads of chunks", waits=True)]


def _shared(case: Case) -> list[Sent]:
  sizes, m, axes = case.sizes, case.layout.shards("experts"), case.axes("experts")
  if m == 1:
    return []
  times, k = case.batch_parts * case.mixtures, case.experts.per_token
  token, counts = sizes.width * case.item, case.experts.count * INDEX * ring_share(m)
  later = case.splits
  send = lambda kind, size, what: Sent(kind, axes, times * size, f"experts: {what}", waits=True)
  if _repeats(case):
    numbers = case.tokens * (2 * token + k * INDEX)
    return [send("all-reduce", 2 * ring_share(m) * numbers, "sums of results and gradients")]
  if case.experts.transport == "gather":
    to_all = (m - 1) * case.tokens
    return [
      send(
        "all-gather",
        to_all * ((3 + 2 * later) * token + (2 + later) * k * (INDEX + case.item)),
        "tokens and gradients, to all",
      ),
      send("reduce-scatter", to_all * 2 * token, "sums of results and gradients"),
      send("all-to-all", to_all * k * INDEX, "gradients of scales"),
    ]
  row = lambda size: size
  if case.experts.transport == "ragged":
    compiler, of_all = COMPILERS[case.compiler], (m - 1) * case.experts.count * INDEX
    rows, kind, row = case.tokens * k * ring_share(m), "ragged-all-to-all", compiler.ragged_row
    gather = ("all-gather", of_all) if compiler.gathers_counts else ("all-reduce", 2 * of_all)
    again = [send(gather[0], (2 + later) * gather[1], "how many rows go where")]
  else:
    rows, kind = rounds(case) * (m - 1) * _round_rows(case), "all-to-all"
    again = [
      send("all-to-all", (2 + later) * counts, "how many rows go where"),
      send("all-reduce", (2 + later) * 2 * INDEX * ring_share(m), "how many rounds there are"),
    ]
  numbers = (5 + 2 * later) * row(token) + (2 + later) * row(case.item) + row(INDEX)
  return [send(kind, rows * numbers, "rows, results and gradients"), *again]


def _round_rows(case: Case) -> int:
  return round_rows(int(case.tokens), case.experts.per_token, case.layout.shards("experts"), _limit(case))


def _limit(case: Case) -> int:
  """The rows that a device has for the experts of one device because of their capacity, at most; 0: no limit."""
  own = case.experts.count // case.layout.shards("experts")
  return own * case.sizes.expert_limit * case.rows


def _most(case: Case) -> int:
  """The rows of a device for the experts of one device, at most."""
  own = case.experts.count // case.layout.shards("experts")
  return most_rows(int(case.tokens), case.experts.per_token, own, _limit(case) // own)


def rounds(case: Case) -> int:
  """The rounds of `exchange`."""
  return math.ceil(_rows(case) / case.layout.shards("experts") / _round_rows(case))


def _repeats(case: Case) -> bool:
  """Whether devices that share experts all have the same tokens."""
  return not set(case.axes("experts")) & set(case.axes("batch"))


def _rows(case: Case) -> int:
  """The rows that experts of a device work on."""
  m = case.layout.shards("experts")
  return min(int(case.tokens * case.experts.per_token), m * _most(case)) // (m if _repeats(case) else 1)


def blocks(case: Case) -> tuple[int, int]:
  """The blocks of rows in a layer, and the rows of each."""
  own = case.experts.count // case.layout.shards("experts")
  size = block_size(_rows(case), own, _rows(case))
  return own * math.ceil(_rows(case) / own / size), size


def loops(case: Case) -> dict[str, int]:
  """How many rounds the loops of experts have, by the name of their scope."""
  if not case.sizes.experts:
    return {}
  return {ROUNDS: Each(rounds(case)), BLOCKS: Each(blocks(case)[0])}


def products(case: Case) -> list[Product]:
  """The products of the experts and of the router of one of the blocks that have them, of one device.

  The backward pass has two for each of the forward pass, and computes hidden units again. A pipeline's weight units
  compute them and their gradients once more. Blocks that are not full count as full.
  """
  sizes = case.sizes
  if not sizes.experts:
    return []
  count, size = blocks(case)
  padded = count * size / int(case.tokens * case.experts.per_token)
  forward = 6 * sizes.width * case.experts.per_token * case.experts.width / case.layout.shards("mlp")
  router = 2 * sizes.width * case.experts.count
  return [
    Product(padded * ((2 if sizes.lora else 3) + 2 / 3 + _later(case)) * forward, ("mlp",)),
    *_adapters(case, padded),
    Product((2 + case.repeats * (1 + case.splits)) * router, ()),
    Product(router / case.layout.shards("sequence"), ("sequence",)),  # the gradient of the stream
  ]


def _later(case: Case) -> float:
  """What weight units compute again of the experts' products, relative to those of a forward pass."""
  adapters = case.sizes.lora
  if not case.splits or (adapters and not adapters.of_expert):
    return 0.0
  reads = not adapters or {"gate", "up"} & set(adapters.targets)
  return 1.0 if reads else 2 / 3  # an adapter of `down` alone needs no gradients of hidden units


def _adapters(case: Case, padded: float) -> list[Product]:
  """The products of experts' adapters: the half on the side of the stream, and the other half.

  The forward pass has one with each half, and the backward pass one for each gradient of a half, of what goes between
  the halves, and of the input. Both halves of `gate` and `up`, and the first of `down`, are multiplied again. Weight
  units multiply with both halves once more, and with the gradients of results.
  """
  sizes, adapters = case.sizes, case.sizes.lora
  if not adapters or not adapters.of_expert:
    return []
  reading, writing = len({"gate", "up"} & set(adapters.targets)), len({"down"} & set(adapters.targets))
  each = padded * 2 * adapters.rank * case.experts.per_token
  stream = (4 + case.splits) * reading + (3 + case.splits) * writing
  hidden = (4 + 2 * case.splits) * reading + (4 + bool(case.splits and reading)) * writing
  width = case.experts.width / case.layout.shards("mlp")
  return [Product(each * stream * sizes.width, ()), Product(each * hidden * width, ("mlp",))]


def working(case: Case) -> float:
  """Bytes of the experts of a block in its backward pass: rows, what is gathered, and gradients in float32.

  How often each exists is fitted to the compiler's figures (tests/lab/analysis/test_experts.py).
  """
  sizes, m = case.sizes, case.layout.shards("experts")
  if not sizes.experts:
    return 0.0
  token, k = sizes.width * case.item, case.experts.per_token
  rows, most = case.tokens * k * token, m * _most(case) * token
  if m == 1:
    found = 5 * rows
  elif case.experts.transport == "gather":
    found = 3 * most + 1.5 * m * case.tokens * token
  else:
    found = 5 * (rows + (most if case.experts.transport == "ragged" else m * _round_rows(case) * token))
  own = sum(case.used(weight) for weight in trained(sizes) if "experts" in weight.dims) / sizes.mixtures
  return found + (0 if case.schedule else 2.9 * 4 * own)  # a stage adds them to its sums at once


def traffic(case: Case) -> float:
  """Bytes that one device reads and writes for the experts of a block in one part of the batch, forward and backward.

  Each block of rows reads the weights of its expert: all three forward, and five times one of them backward. It adds to
  their gradients, in float32, which are zeros at first and are cast in the end.
  """
  sizes, fitted, m = case.sizes, COMPILERS[case.compiler].fitted, case.layout.shards("experts")
  if not sizes.experts:
    return 0.0
  (count, size), width = blocks(case), case.experts.width / case.layout.shards("mlp")
  layers = case.mixtures
  own = sum(case.used(weight) for weight in trained(sizes) if "experts" in weight.dims) / layers
  backward = 1 + case.splits  # weight units compute hidden units again
  read = 1 + backward * 5 / 3 + fitted.expert_copies * (1 + backward)
  of_block = case.item * (read * 3 * sizes.width * width + fitted.expert_rows * size * (sizes.width + width))
  of_block += 4 * fitted.expert_sums * own / (case.experts.count // m)
  return count * of_block + (4 + 4 + case.item) * own + _moved(case) * sizes.width * case.item


def _moved(case: Case) -> float:
  """How many rows are read and written, forward and backward, to sort rows, send them and add up results."""
  m, k, tokens = case.layout.shards("experts"), case.experts.per_token, case.tokens
  rows, way = tokens * k, case.experts.transport
  if m == 1:
    return 5 * rows + (5 + 2 * k) * tokens
  if _repeats(case):
    return 5 * _most(case) + (9 + 2 * k) * tokens
  again = 7 / 5 if case.splits else 1
  if way == "gather":
    return again * (5 * m * _most(case) + m * (10 + 2 * k) * tokens + 5 * tokens)
  if way == "exchange":
    return again * (28 * rounds(case) * m * _round_rows(case) + 13 * rows + 5 * tokens)
  return again * (15 * m * _most(case) + 17 * rows + 5 * tokens)
