"""What XLA's compilers do where theory leaves them a choice, and constants fitted to their memory and traffic.

theory.py asks a `Compiler` at each choice. The base class chooses what sends least; `XlaCpu`, `LibTpu` and `XlaGpu`
override it with what their compiled programs show (XLA of jax 0.10.2 and 0.12.0.1, libtpu 0.0.42 and 0.0.50). Tests
compare all three with compiled programs, so a new version that behaves differently fails a test and needs a change
here.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from lab.analysis.case import Case
from lab.analysis.weights import Weight
from runtime import hardware
from runtime.hardware import Chip
from strategies.execution.collectives import LANES, fills_tiles, is_small
from strategies.execution.stages.stage import UNROLL

TILE_ROW = 4 * LANES  # bytes of a row of a TPU's tile


class Fitted(NamedTuple):
  """Constants fitted to the compilers' `memory_analysis` and to the text of compiled programs.

  Attributes:
    block: working memory of a block's backward pass, in units of one block's values, by remat policy. It holds values,
      their cotangents and copies; what never leaves a kernel does not count.
    scores: the same unit: what `plain` attention computes for every pair of positions; 0 if as all other values.
    score_passes: how often that is read or written; 0 if as often as all other values.
    sums: the same unit: extra memory where tensor parallelism all-reduces activations.
    whole: how many residual streams with all positions exist beside these values, where positions are split.
    whole_passes: how often such a stream is read or written in a block.
    gathered: how many times the gathered weights of a block exist: with those of the next, and with their gradients.
    cast: the share of the weights that exist in the compute dtype as well, as a whole.
    head: copies of the gathered head that exist beside the logits.
    head_later: copies of it, or of its gradient, that still exist beside a block's backward pass.
    part: the share of the gradients that exists twice if the batch runs in parts: the part's, beside the sum so far.
    passes: how often a block's values are read or written, by remat policy.
    expert_copies: how often an expert's weights are read or written because a loop over blocks of rows copies them.
    expert_sums: how often such a block reads or writes numbers of the size of its expert's gradients.
    expert_rows: how often it reads or writes its rows, and its hidden units, in both passes.
  """

  block: Mapping[str, float]
  sums: float
  whole: float
  whole_passes: float
  passes: Mapping[str, float]
  gathered: float = 0.0
  cast: float = 1.0
  head: float = 0.0
  head_later: float = 0.0
  part: float = 1.0
  scores: float = 0.0
  score_passes: float = 0.0
  expert_copies: float = 0.0
  expert_sums: float = 2.0
  expert_rows: float = 17.0


@dataclasses.dataclass(frozen=True)
class Compiler:
  """The choices of a compiler. The methods of this class are the choices that theory expects; subclasses differ."""

  fitted: Fitted
  sums_positions_together = True  # whether a gradient is summed over batch and positions in one all-reduce
  gathers_counts = True  # whether a few numbers are all-gathered. Otherwise they are all-reduced, with zeros

  def scatters(self, case: Case, weight: Weight) -> bool:
    """Whether a weight's gradient is reduce-scattered along `embed`. Otherwise it is all-reduced and then sliced."""
    return True

  def scatters_stream(self, case: Case) -> bool:
    """Whether sums of activations are reduce-scattered to where the positions are. Otherwise they are all-reduced."""
    return True

  def scatters_adapters(self, case: Case) -> bool:
    """Whether sums between the halves of adapters are reduce-scattered, too. These arrays are narrow."""
    return self.scatters_stream(case)

  def sums_positions_first(self, case: Case, weight: Weight) -> bool:
    """Whether the gradient of an adapter is summed over positions before it is summed over the batch and split."""
    return False

  def reduces_tied_gradients_apart(self, case: Case) -> bool:
    """Whether a tied embedding's gradients, as table and as head, are reduced separately."""
    return False

  def scatters_tables(self, case: Case) -> bool:
    """Whether the gradient of an embedding table is reduced as those of other weights are, not all-reduced."""
    return False

  def scatters_over(self, devices: int) -> bool:
    """Whether it reduce-scatters over so many devices. Otherwise it all-reduces, which sends twice the bytes."""
    return True

  def beside_one(self, chip: Chip) -> bool:
    """Whether a block's weights and gradients are each sent beside one of its products (predict.times)."""
    return False

  def hides(self, case: Case, kind: str) -> bool:
    """Whether collectives of this kind, for the weights of blocks or between stages, are sent while kernels run."""
    return False

  def hides_exchanges(self, case: Case) -> bool:
    """Whether stages of a pipeline exchange while units run, if there are units of the other kind in the tick."""
    return True

  def edge_gathers(self, case: Case) -> int:
    """How often weights outside the blocks are gathered. They do not change from part to part, so once can do."""
    return 1

  def attention_again(self, case: Case) -> float:
    """How often the backward pass repeats a block's attention besides what remat says."""
    return 0

  def gathered_item(self, case: Case, weight: Weight) -> int:
    """Bytes of an element of a weight when it is gathered."""
    return case.item_of(weight)

  def ragged_row(self, size: int) -> int:
    """Bytes that a ragged all-to-all sends of a row of so many bytes."""
    return size


@dataclasses.dataclass(frozen=True)
class XlaCpu(Compiler):
  """XLA's CPU backend. It does not turn an all-reduce and a slice into a reduce-scatter."""

  sums_positions_together = False

  def scatters(self, case: Case, weight: Weight) -> bool:
    return False

  def scatters_stream(self, case: Case) -> bool:
    return False

  def reduces_tied_gradients_apart(self, case: Case) -> bool:
    """It reduces both gradients as soon as they exist, unless the strategy sums gradients by hand after adding them."""
    return not case.transfers.by_hand

  def sums_positions_first(self, case: Case, weight: Weight) -> bool:
    """Those that it computes together, of adapters that read the stream, if remat repeats the forward pass."""
    return case.repeats and weight.is_beside_stream and weight.dims[1] == "embed"


@dataclasses.dataclass(frozen=True)
class LibTpu(Compiler):
  """The TPU compiler, with the recommended options (strategies/execution/options.py)."""

  gathers_counts = False

  def scatters(self, case: Case, weight: Weight) -> bool:
    """It all-reduces the gradients of small weights, and all if they are split over an axis that is not the batch's.

    Small weights are those that only `embed` can split, such as those of an image's patches and of classes. It scatters
    some of them, but theory counts none.
    """
    return not is_small(weight.dims) and set(case.transfers.scattered_each_part) <= set(case.axes("batch"))

  def scatters_stream(self, case: Case) -> bool:
    """Only if the positions of a device fill tiles."""
    return fills_tiles(case.sizes.positions // case.sharers // case.layout.shards("sequence"), case.sizes.dtype)

  def scatters_adapters(self, case: Case) -> bool:
    return False

  def scatters_tables(self, case: Case) -> bool:
    """Only if it need not sum the pieces over other axes of the batch, too."""
    return set(case.transfers.scattered_each_part) == set(case.axes("batch"))

  def edge_gathers(self, case: Case) -> int:
    """For each part, where the program says so by hand."""
    return case.batch_parts if case.transfers.by_hand else 1

  def gathered_item(self, case: Case, weight: Weight) -> int:
    """A classifier's head too: products round float32 operands to bfloat16, so it gathers them rounded."""
    return case.item_of(weight) if weight.in_blocks else case.item

  def ragged_row(self, size: int) -> int:
    """It fills whole rows of tiles. So the scale of a row, a single number, takes 512 bytes."""
    return -(-size // TILE_ROW) * TILE_ROW

  def scatters_over(self, devices: int) -> bool:
    """It all-reduces over more than 1,024."""
    return devices <= 1024

  def beside_one(self, chip: Chip) -> bool:
    """TPU7x has cores that send several at a time."""
    return chip != hardware.chip("TPU7x")

  def hides(self, case: Case, kind: str) -> bool:
    """It hides little of all-reduces."""
    return kind in ("all-gather", "reduce-scatter", "collective-permute")


@dataclasses.dataclass(frozen=True)
class XlaGpu(Compiler):
  """XLA's GPU backend."""

  def scatters_tables(self, case: Case) -> bool:
    return True

  def hides(self, case: Case, kind: str) -> bool:
    """Of all-reduces that wait for a scatter in the same block (hsdp) it hides little: in one case two thirds."""
    return kind != "all-reduce" or not case.transfers.scattered_each_part

  def hides_exchanges(self, case: Case) -> bool:
    """Only if the units have no collectives of their own. It starts none while a loop with others is under way."""
    return not any(case.axes(dim) for dim in ("heads", "mlp", "vocab"))

  def edge_gathers(self, case: Case) -> int:
    """For each part."""
    return case.batch_parts

  def attention_again(self, case: Case) -> float:
    """With the recommended options it starts the gathers of a scan's next round early, with all that they depend on.

    If remat repeats the forward pass, the positions that the MLP gathers depend on attention.
    """
    if "attention_output" in case.saved_names or case.layout.shards("sequence") == 1:
      return 0
    in_round = case.layout.shards("layers") * (case.schedule.chunks * UNROLL if case.schedule else 1)
    rounds = [stack.layers / in_round for stack in case.sizes.stacks]
    return sum(max(of_stack - 1, 0) for of_stack in rounds) / sum(rounds)


COMPILERS: dict[str, Compiler] = {
  "cpu": XlaCpu(
    Fitted(
      block={"minimal": 1.7, "dots": 1.7, "full": 1.85},
      sums=0.0,
      whole=3.5,
      whole_passes=45.0,
      passes={"minimal": 16.4, "dots": 17.3, "full": 16.3},
    )
  ),
  "tpu": LibTpu(
    Fitted(
      block={"minimal": 0.2, "dots": 0.9, "full": 1.1},
      sums=0.0,
      whole=2.0,
      whole_passes=20.0,
      passes={"minimal": 8.5, "dots": 7.6, "full": 7.0},
      gathered=1.0,
      cast=0.5,
      scores=0.35,
      score_passes=4.2,
    )
  ),
  "gpu": XlaGpu(
    Fitted(
      block={"minimal": 0.2, "dots": 0.7, "full": 0.9},
      sums=0.0,
      whole=6.0,
      whole_passes=50.0,
      passes={"minimal": 7.0, "dots": 6.2, "full": 7.0},
      gathered=1.0,
      cast=0.0,
      head=1.0,
      head_later=2.0,
      part=0.25,
      expert_copies=2.0,
      expert_sums=4.0,
      expert_rows=40.0,
    )
  ),
}
