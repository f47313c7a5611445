"""What XLA's compilers do where theory leaves them a choice, and constants fitted to their memory and traffic.

theory.py asks a `Compiler` at each choice. The base class chooses what sends least; `XlaCpu`, `LibTpu` and `XlaGpu`
override it with what their compiled programs show (XLA of jax 0.10.2 and 0.12.0.1, libtpu 0.0.42 and 0.0.50). Tests
compare all three with compiled programs, so a new version that behaves differently fails a test and needs a change
here.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from analysis.case import Case, Weight
from strategies.pipeline.stage import UNROLL

LANES = 128  # elements along one dimension of a tile in a TPU's memory


class Fitted(NamedTuple):
  """Constants fitted to the compilers' `memory_analysis` and to the text of compiled programs.

  Attributes:
    block: working memory of a block's backward pass, in units of one block's values, by remat policy. It holds values,
      their cotangents and copies; what never leaves a kernel does not count.
    sums: the same unit: extra memory where tensor parallelism all-reduces activations.
    cast: the share of the weights that exist in the compute dtype as well, as a whole.
    head: copies of the gathered head that exist beside the logits.
    passes: how often a block's values are read or written, by remat policy.
  """

  block: Mapping[str, float]
  sums: float
  passes: Mapping[str, float]
  cast: float = 1.0
  head: float = 0.0


@dataclasses.dataclass(frozen=True)
class Compiler:
  """The choices of a compiler. The methods of this class are the choices that theory expects; subclasses differ."""

  fitted: Fitted

  def scatters(self, case: Case, weight: Weight) -> bool:
    """Whether a weight's gradient is reduce-scattered along `embed`. Otherwise it is all-reduced and then sliced."""
    return True

  def reduces_tied_gradients_apart(self, case: Case) -> bool:
    """Whether a tied embedding's gradients, as table and as head, are reduced separately."""
    return False

  def scatters_tables(self, case: Case) -> bool:
    """Whether the gradient of an embedding table is reduced as those of other weights are, not all-reduced."""
    return False

  def hides(self, kind: str) -> bool:
    """Whether collectives of this kind, for the weights of blocks, are sent while kernels run."""
    return False

  def gathers_rows(self, case: Case) -> bool:
    """Whether an embedding's gradient is all-gathered as rows, not all-reduced as a table.

    All compilers do so in a pipeline's units and nowhere else. They do not compare the sizes of rows and table.
    """
    return case.schedule is not None

  def cotangent_sums(self, products: int) -> int:
    """How many all-reduces the cotangents of an input take if `products` matrix products share this input."""
    return 1

  def block_gathers(self, case: Case) -> int:
    """How often a block's weights are gathered in a step: for the forward and the backward pass of each part."""
    return 2 * case.units

  def gathered_item(self, case: Case, weight: Weight) -> int:
    """Bytes of an element of a weight when it is gathered."""
    return case.item_of(weight)

  def edge_gathers(self, case: Case, weight: Weight) -> int:
    """How often a pipeline gathers a weight outside the blocks in a step.

    Such weights do not change from part to part, so one gather could serve all parts. But only the first stage uses the
    embedding, so its gather stays in this stage's units.
    """
    times = {"embedding": case.units, "head": self.head_gathers(case)}
    return sum(times[role] for role in weight.roles)

  def head_gathers(self, case: Case) -> int:
    """How often a pipeline gathers the head."""
    return 1

  def maximum_bytes(self, case: Case) -> float:
    """Bytes that the loss all-reduces for each prediction to find the largest logit.

    The loss takes two maxima: over all logits, and over all but the target's. In a pipeline's unit both are
    all-reduced; elsewhere compilers all-reduce only one.
    """
    return 2 * 4 if case.schedule else 4


@dataclasses.dataclass(frozen=True)
class XlaCpu(Compiler):
  """XLA's CPU backend."""

  def scatters(self, case: Case, weight: Weight) -> bool:
    """Never: XLA:CPU does not turn an all-reduce and a slice into a reduce-scatter."""
    return False

  def reduces_tied_gradients_apart(self, case: Case) -> bool:
    """It reduces both gradients as soon as they exist, unless the strategy sums gradients by hand after adding them."""
    return not case.reduces_once

  def cotangent_sums(self, products: int) -> int:
    """It all-reduces each product's cotangent separately, and adds them up afterwards."""
    return products

  def block_gathers(self, case: Case) -> int:
    """If a pipeline's chunks are so short that they are unrolled, it gathers their weights before the loop, once."""
    if case.schedule and case.model.depth / case.layout.shards("layers") / case.schedule.chunks <= UNROLL:
      return 2
    return super().block_gathers(case)


@dataclasses.dataclass(frozen=True)
class LibTpu(Compiler):
  """The TPU compiler."""

  def scatters(self, case: Case, weight: Weight) -> bool:
    """It all-reduces the gradients of small weights, and in pipelines those whose pieces are one tile wide.

    The same holds for all weights if `embed` is also over a mesh axis that does not split the batch.

    Small weights are those that only `embed` can split, such as those of an image's patches and of classes. It scatters
    some of them, but theory counts none. A piece is one tile wide if `embed` is the innermost dimension of the gradient
    and the piece has `LANES` elements along it. Outside of pipelines `MeshSharding.gather` avoids this layout, but in a
    pipeline's unit the compiler transposes the gradient back.
    """
    dims = [dim for dim in weight.dims if dim != "layers"]
    if set(dims) == {"embed", None} or not set(case.axes("embed")) <= set(case.axes("batch")):
      return False
    if not case.schedule or dims[0] != "embed":
      return True
    return weight.shape[weight.dims.index("embed")] / case.layout.shards("embed") != LANES

  def head_gathers(self, case: Case) -> int:
    """The gather of the head stays in the unit that uses it."""
    return case.units

  def gathered_item(self, case: Case, weight: Weight) -> int:
    """A classifier's head too: products round float32 operands to bfloat16, so it gathers them rounded."""
    return case.item

  def hides(self, kind: str) -> bool:
    """It hides little of all-reduces."""
    return kind in ("all-gather", "reduce-scatter")

  def maximum_bytes(self, case: Case) -> float:
    """Outside of pipelines it all-reduces the maximum in the dtype that the logits had before their cast to float32."""
    return super().maximum_bytes(case) if case.schedule else case.item


@dataclasses.dataclass(frozen=True)
class XlaGpu(Compiler):
  """XLA's GPU backend."""

  def scatters_tables(self, case: Case) -> bool:
    """It scatters them except in a pipeline's units, where all compilers gather rows instead."""
    return not self.gathers_rows(case)

  def hides(self, kind: str) -> bool:
    return True

  def head_gathers(self, case: Case) -> int:
    """The gather of the head stays in the unit that uses it."""
    return case.units


COMPILERS: dict[str, Compiler] = {
  "cpu": XlaCpu(
    Fitted(
      block={"minimal": 0.85, "dots": 0.85, "full": 1.0},
      sums=0.0,
      passes={"minimal": 10.2, "dots": 10.0, "full": 9.5},
    )
  ),
  "tpu": LibTpu(
    Fitted(
      block={"minimal": 1.3, "dots": 1.45, "full": 0.85},
      sums=0.2,
      passes={"minimal": 5.2, "dots": 4.6, "full": 4.1},
    )
  ),
  "gpu": XlaGpu(
    Fitted(
      block={"minimal": 0.35, "dots": 1.3, "full": 1.1},
      sums=0.0,
      passes={"minimal": 7.0, "dots": 6.2, "full": 7.0},
      cast=0.0,
      head=1.0,
    )
  ),
}
