"""Predicts a step's FLOPs, memory traffic and time on each device, by formula, from the layout and the model alone.

tools/explain.py prints the predictions beside the compiler's figures. tools/plan.py ranks layouts by them and compiles
nothing.
"""

import functools
from collections.abc import Sequence

import jax.numpy as jnp

from lab.analysis import experts, splash, theory, update
from lab.analysis.case import Case, Product, ring_share
from lab.analysis.compilers import COMPILERS
from lab.analysis.host import host_times, to_host
from lab.analysis.links import Links
from lab.analysis.memory import cotangents
from lab.analysis.pairs import computed, computed_of_others, in_pieces, mean
from lab.analysis.roofline import Roofline
from lab.analysis.saved import block_values
from lab.analysis.weights import trained, weights
from models import lora
from models.dimensions import FIRST_LAYERS
from models.mlps import MLPS
from models.ops.attention import KERNELS
from models.stacks import STACKS
from runtime.hardware import Chip


def flops(case: Case) -> float:
  """FLOPs of one device in a step, including what remat repeats. In a pipeline: of the busiest stage."""
  return update.flops(case) + _positions(case) * sum(p.flops for p in _products(case))


def attention_flops(case: Case) -> float:
  """The part of `flops` for pairs of a query and a key."""
  return _positions(case) * sum(p.flops for p in _products(case) if p.kind == "pairs")


def block_flops(case: Case) -> float:
  """The part of `flops` for products with the weights of blocks, those of experts included."""
  return _positions(case) * sum(p.flops for p in _products(case) if p.kind == "block")


def float8_flops(case: Case) -> float:
  """The part of `flops` whose operands are float8 numbers: `block_flops` without those of routed experts."""
  if case.sizes.products != "float8":
    return 0.0
  of_experts = sum(case.mixtures * product.flops for product in experts.products(case))
  return block_flops(case) - _positions(case) * of_experts


def _positions(case: Case) -> float:
  """Positions of one device in a step."""
  return case.examples * case.batch_parts * case.sizes.positions


def repeated_flops(case: Case) -> float:
  """The part of `flops` that is redundant: work that several devices do, divided by the devices that do it.

  Devices repeat a product if they differ only along mesh axes that split none of its dimensions. A layout may do so by
  design: if `model` splits only `vocab`, its devices repeat the blocks. Without repetition, all devices together run
  `flops` × devices, and with it they run (`flops` − `repeated_flops`) × devices of different work.
  """
  layout, positions = case.layout, _positions(case)
  repeated = update.repeated_flops(case)
  for product in _products(case):
    axes = {axis for dim in ("batch", "positions", "layers", *product.dims) for axis in layout.axes(dim)}
    copies = layout.device_count / case.devices(tuple(axes))
    repeated += positions * product.flops * (1 - 1 / copies)
  return repeated


def _products(case: Case) -> list[Product]:
  """The products of one device: forward, backward and again with remat.

  The backward pass has two for each of the forward pass, or one for that of a weight that is not trained.
  """
  sizes, layout = case.sizes, case.layout
  t = sizes.positions
  layers, first, mixtures = case.layers, case.first, case.mixtures
  each = 2 if sizes.lora else 3
  projections = 2 * sum(sizes.mixes.products(sizes).values()) / layout.shards("heads")
  per_pair = 2 * sizes.mixes.per_pair(sizes) / layout.shards("heads") / t
  stacks = {stack.name for stack in sizes.stacks if not (first and stack.dim == FIRST_LAYERS)}
  scores, of_others = (per_pair * mean(case, of, stacks) for of in (computed, computed_of_others))
  hidden = mean(case, lambda _, sizes: sizes.dense_width, stacks)  # of these blocks
  mlp = 2 * len(MLPS[sizes.mlp].products) * sizes.width * hidden / layout.shards("mlp")
  projections_again, scores_again, mlp_again = _again(case, projections, scores, mlp)
  if case.splits:  # backward and weight units both compute again what they read
    projections_again *= 2 if case.repeats else 1.5
    scores_again *= 2 if case.repeats else 1.5
    mlp_again *= 2
  # The backward passes of kernels compute the scores again; splash attention in both its kernels, and another product.
  # So does `blockwise`, if remat has not done so just before. Scores of other devices' keys are in a loop of their own.
  scores_again += {"cudnn": scores / 2, "splash": scores * 3 / 2}.get(sizes.attention, 0.0)
  if _saves_logsumexp(case) and case.saves_attended:
    scores_again += scores / 2
  elif _saves_logsumexp(case):
    scores_again += of_others / 2
  compiled_again = COMPILERS[case.compiler].attention_again(case)
  projections_again += compiled_again * projections
  scores_again += compiled_again * scores
  (inputs, _), head = sizes.predicts.head()
  head_flops = 2 * inputs * case.outputs * sizes.predicts.predictions() / t
  return [
    Product(layers * (each * projections + projections_again), ("heads",), "block"),
    Product(layers * (3 * scores + scores_again), ("heads",), "pairs"),
    Product(layers * (each * mlp + mlp_again), ("mlp",), "block"),
    *_first(case, each, projections, per_pair * mean(case, computed, {"dense_blocks"})),
    *(Product(mixtures * product.flops, product.dims, "block") for product in experts.products(case)),
    # The input has no gradient, so the embedding's product has no second backward product.
    Product((each - 1) * 2 * sizes.reads.embedding_products() / layout.shards("sequence"), ("sequence",)),
    # All devices that share an example compute the class that it has.
    Product(
      each * head_flops * (case.sharers if sizes.predicts.predictions() == 1 else 1),
      tuple(dim for dim in head if dim == "vocab"),
    ),
    *_adapters(case, layers),
  ]


def _first(case: Case, each: int, projections: float, scores: float) -> list[Product]:
  """The products of the dense blocks that a pipeline's first stage runs. It runs their forward pass twice.

  Args:
    each: how many passes a product has, if nothing is computed again.
    projections, scores: the FLOPs of attention's products in a forward pass of a block.
  """
  if not case.first:
    return []
  of_kernels = {"cudnn": scores / 2, "splash": scores * 3 / 2}.get(case.sizes.attention, 0.0)
  of_kernels += scores / 2 if _saves_logsumexp(case) else 0.0
  products = len(MLPS[case.sizes.mlp].products)
  mlp = 2 * products * case.sizes.width * case.sizes.mlp_width / case.layout.shards("mlp")
  return [
    Product(case.first * (each + 1) * projections, ("heads",), "block"),
    Product(case.first * (4 * scores + of_kernels), ("heads",), "pairs"),
    Product(case.first * (each + 1) * mlp, ("mlp",), "block"),
  ]


def _adapters(case: Case, layers: float) -> list[Product]:
  """The products of adapters: the half on the side of the stream, for own positions, and the other half.

  With "dots", large results are not saved, and "full" repeats all but what makes the block's output.
  """
  sizes, shards = case.sizes, case.layout.shards
  found = []
  for dim, reading, writing in lora.groups(sizes.lora, sizes.sides) if sizes.lora else []:
    wide = lambda names: sum(sizes.sides[name] for name in names)
    repeats, ends_block = case.repeats, dim == "mlp"
    stream = 3 * len(reading + writing) + repeats * (len(reading) + (0 if ends_block else len(writing)))
    other = 3 * wide(reading + writing) + (case.sizes.remat != "minimal") * wide(reading) + repeats * wide(writing)
    found.append(Product(layers * 2 * sizes.lora.rank * sizes.width * stream / shards("sequence"), ("sequence",)))
    found.append(Product(layers * 2 * sizes.lora.rank * other / shards(dim), (dim,)))
  return found


def _again(case: Case, projections: float, scores: float, mlp: float) -> tuple[float, float, float]:
  """The FLOPs of projections, scores and MLP that remat repeats in a block, of all those of a forward pass.

  Where devices split heads or hidden units, the products of one input are one (`layers.linears`): all are repeated, or
  none.
  """
  sizes, names = case.sizes, set(case.saved_names)
  if sizes.remat == "minimal":
    return 0.0, 0.0, 0.0
  if case.layout.shards("heads") > 1 or case.layout.shards("mlp") > 1:
    for joined in ({"query", "key", "value"}, {"mlp_gate", "mlp_up"}):
      names -= set() if joined <= names else joined
  shares, of_mlp = sizes.mixes.products(sizes), MLPS[sizes.mlp].products
  names |= {"out"} if "attention_output" in names else set()
  share = sum(n for name, n in shares.items() if name not in names) / sum(shares.values())
  read = set(of_mlp if sizes.norms != "before" else of_mlp[:-1])  # the last product makes the block's output
  if (sizes.attention in KERNELS or _saves_logsumexp(case)) and case.saves_attended:
    scores = 0
  elif "attended" in names:
    scores /= 2  # the product with the values is not repeated
  return share * projections, scores, mlp / len(of_mlp) * len(read - names)


def _saves_logsumexp(case: Case) -> bool:
  """Whether attention has the backward pass of `pieces.BLOCKWISE`."""
  if in_pieces(case):
    return case.sizes.attention not in KERNELS
  return case.sizes.attention == "blockwise" and case.sizes.predicts.causal


def traffic(case: Case) -> float:
  """Bytes that one device reads from and writes to its memory in a step.

  A block's values pass through memory several times (`compilers.Fitted`). Each pass reads the weights. Gradients are
  written and read, and the optimizer reads and writes weights and its state.
  """
  sizes, layout = case.sizes, case.layout
  param = jnp.dtype(sizes.param_dtype).itemsize
  layers = case.layers + case.first
  fitted = COMPILERS[case.compiler].fitted
  passes, blocks = fitted.passes[case.policy], 0.0
  for stack in sizes.groups.values():
    values, scores = block_values(stack.sizes, *case.pieces, case.sharers)
    here = -(-stack.layers // layout.shards(stack.dim))
    blocks += here * (passes * values + (fitted.score_passes or passes) * scores)
  whole = fitted.whole_passes * sizes.positions * sizes.width * case.item if layout.shards("sequence") > 1 else 0
  logits = case.logits * 4
  weight_passes = 4 if case.repeats else 3
  used = sum(map(case.used, weights(sizes))) * case.item
  summed, updated = (sum(map(count, trained(sizes))) for count in (case.summed, case.updated))
  summed, updated = summed * case.sum_item, updated * param
  activations = case.examples * (blocks + layers * whole + 6 * logits)
  if sizes.attention == "splash":
    activations += case.examples * layers * _splash_bytes(case)
  if in_pieces(case):
    activations += case.examples * layers * _merged_bytes(case) * mean(case, lambda _, sizes: not sizes.shown, STACKS)
  if case.splits:  # what is kept is written, put into its slot, taken out of it, and read
    activations += case.examples * 4 * layers * cotangents(case)
  activations += case.mixtures * experts.traffic(case)
  state = update.state_bytes(case)
  return case.batch_parts * (activations + weight_passes * used + 2 * summed) + 2 * (
    updated + state + sum(to_host(case))
  )


def _splash_bytes(case: Case) -> float:
  """What the kernels of splash attention read and write for one example in a block."""
  sizes, rows = case.sizes, case.sizes.heads / case.layout.shards("heads")
  kernels = ["fwd", "dq", "dkv"] + ["fwd"] * (not case.saves_attended)  # the forward pass again
  of = functools.partial(
    splash.work, length=sizes.positions, head=sizes.head_dim, item=case.item, causal=sizes.predicts.causal
  )
  each = lambda _, sizes: sum(of(kernel, rows, window=sizes.shown).bytes for kernel in kernels)
  return mean(case, each, STACKS)


def _merged_bytes(case: Case) -> float:
  """What is read and written for one example in a block to add what each other device's keys give, in float32.

  To what queries have read in the forward pass, and to the gradients of queries, keys and values in the backward pass.
  """
  sizes, both = case.sizes, 2 * (4 + case.item)  # a sum is read and written, and what is added, too
  forward, backward = sizes.heads, sizes.heads + 2 * sizes.kv_heads
  numbers = sizes.positions * sizes.head_dim * (forward + backward) / case.layout.shards("heads")
  return (case.sharers - 1) * both * numbers


def times(case: Case, chip: Chip, links: Links, sent: Sequence[theory.Sent] | None = None) -> Roofline:
  """Seconds of a step at a device's peaks.

  Kernels hide what the blocks' weights and gradients send, for as long as they take, if the compiler can hide this kind
  of collective. All other communication is exposed, and so is what takes longer than the product beside it.

  Args:
    sent: `theory.sent(case)`, if it is known already.
  """
  rows, compiler = theory.sent(case) if sent is None else sent, COMPILERS[case.compiler]
  compute = chip.seconds(flops(case), float8_flops(case))
  memory = traffic(case) / chip.bandwidth
  seconds = lambda row, numbers: _passes(case, row.kind, row.axes) * numbers / links.bandwidth(row.kind, row.axes)
  can_hide = lambda row: not row.waits and compiler.hides(case, row.kind)
  hidden = sum(seconds(row, row.bytes - row.edges) for row in rows if can_hide(row))
  hidden = max(hidden - _longer_than_products(case, chip, links), 0.0)
  communication = sum(seconds(row, row.bytes) for row in rows)
  exposed = communication - min(hidden, max(compute, memory))
  return Roofline(
    compute, memory, communication=communication, exposed=exposed, idle=case.idle, **host_times(case, chip),
    attention=attention_flops(case) / chip.flops,
  )  # fmt: skip


def _passes(case: Case, kind: str, axes: tuple[str, ...]) -> int:
  """How often the bytes of a collective are sent: twice if the compiler writes a reduce-scatter as an all-reduce."""
  return 2 if kind == "reduce-scatter" and not COMPILERS[case.compiler].scatters_over(case.devices(axes)) else 1


def _longer_than_products(case: Case, chip: Chip, links: Links) -> float:
  """Seconds in which blocks wait for weights and gradients that are each sent beside one of their products.

  libtpu starts nothing before a block begins. Forward, it gathers a weight beside the product with the one before, and
  the first beside none. Backward, each weight has two products. Gradients are scattered at the end of the block, beside
  the products of attention.
  """
  gathered, scattered = (
    case.ordered(axes) for axes in (case.transfers.gathered_each_part, case.transfers.scattered_each_part)
  )
  if not gathered or not COMPILERS[case.compiler].beside_one(chip):
    return 0.0
  positions = case.examples * case.sizes.positions
  product = lambda weight: 2 * positions * case.used(weight) / chip.flops
  item = lambda weight, kind: case.sent_item(weight) if kind == "all-gather" else case.item
  send = lambda weight, kind, axes: (
    _passes(case, kind, axes)
    * ring_share(case.devices(axes))
    * case.used(weight)
    * item(weight, kind)
    / links.bandwidth(kind, axes)
  )
  longer, blocks = 0.0, sorted((w for w in weights(case.sizes) if w.is_matrix), key=lambda w: "mlp/" in w.name)
  for stack in case.sizes.stacks:
    matrices = [weight for weight in blocks if weight.entry == stack.name]
    gathers = [send(weight, "all-gather", gathered) for weight in matrices]
    products = [product(weight) for weight in matrices]
    beside = [0.0, *products[:-1]]
    longer += sum(
      max(0.0, one - product) + max(0.0, one - 2 * own)
      for one, product, own in zip(gathers, beside, products, strict=True)
    )
    if scattered:
      last = [product(weight) for weight in matrices if f"{case.sizes.mixer}/" in weight.name]
      mean = sum(last) / len(last)
      longer += sum(max(0.0, send(weight, "reduce-scatter", scattered) - mean) for weight in matrices)
  return case.batch_parts * longer
