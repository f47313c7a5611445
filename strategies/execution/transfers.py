"""Transfers: what a layout makes move between devices in a step.

A layout says where arrays are. This value says what must therefore be sent, over which mesh axes, how often, and by
whom. It is decided here and nowhere else: the runners (runner.py) carry it out, and lab/analysis/ reads it to predict
bytes, memory and time.

Weights and gradients that are split along `embed` are gathered and scattered:

    gathered    all-gather of a weight, before it is used
    scattered   reduce-scatter of its gradient: summed over devices, and each keeps a piece
    reduced     all-reduce of a gradient, along the axes on which devices hold the same piece

Each happens once a step or for each part of the batch. A device runs several parts one after another with
`accumulation`, and in a pipeline, where they are microbatches.
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, get_type_hints

from strategies.layout import Layout

Axes = tuple[str, ...]  # mesh axes
GATHER = ("part", "step")  # the values of the config field `gather`


@dataclasses.dataclass(frozen=True)
class Transfers:
  """What moves between devices in a step, and over which mesh axes. The annotations are also shown to users."""

  parts: int  # accumulation parts × microbatches, which a device runs one after another
  gather: str  # the config's field, one of GATHER
  gathered_each_part: Annotated[Axes, "weights gathered for each part of the batch"]  # forward, and again backward
  gathered_once: Annotated[Axes, "weights gathered once a step"]  # and kept whole until the step ends
  scattered_each_part: Annotated[Axes, "gradients scattered after each part of the batch"]
  scattered_once: Annotated[Axes, "gradients scattered once a step"]
  reduced_each_part: Annotated[Axes, "gradients all-reduced after each part of the batch"]
  reduced_once: Annotated[Axes, "gradients all-reduced once a step"]
  gathered_updated: Annotated[Axes, "new weights gathered"]  # because each device updates only a piece of them
  by_hand: Annotated[Axes, "sent by hand, not by the compiler,"]  # by the program itself, inside a `shard_map`

  @staticmethod
  def of(layout: Layout, *, parts: int = 1, gather: str = "part", by_hand: bool = False) -> "Transfers":
    """The transfers of a resolved layout, decided in four steps.

    1. Along which axes devices have gradients of different examples or positions, so that gradients must be summed.
    2. Which of these sums the program makes by hand. It does so if there are several parts and some sums can wait until
       the end of the step. They cannot wait if each part scatters its gradients over all axes of the batch. And by
       hand, no part can scatter the gradients of whole weights: JAX has no gradient that is smaller than its weight.
       Devices that share positions or experts always sum by hand: left to the compiler, attention would send far more
       than models/ops/context.py says.
    3. What is gathered and scattered for each part, or once.
    4. Along which axes gradients are left to be all-reduced: devices hold the same piece of the sum along these.

    An expert's gradients are summed over the axes of the batch that do not split experts; those of all other weights,
    over all axes of the batch.

    Args:
      parts: accumulation parts × microbatches.
      gather: whether weights that the batch's devices share in pieces are gathered, and their gradients scattered, for
        each "part" or once a "step". The stages of a pipeline do so once a step in any case.
      by_hand: whether gradients are summed by hand even if there is only one part.
    """
    of_several = lambda axes: tuple(axis for axis in layout.mesh if layout.mesh[axis] > 1 and axis in axes)
    stages, positions = of_several(layout.axes("layers")), of_several(layout.axes("positions"))
    embed, state, once = layout.axes("embed"), layout.axes("state"), gather == "step" or bool(stages)

    batch = of_several((*layout.axes("batch"), *positions))  # 1

    must = bool(positions) or layout.shards("experts") > 1
    can = once or layout.axes("gradients") == embed
    can_wait = once or bool(set(batch) - set(embed))
    manual = batch if must or (can and (by_hand or stages or (can_wait and parts > 1))) else ()  # 2
    within = lambda axes: tuple(axis for axis in axes if axis in manual)

    gathered_once = within(embed) if once else ()
    by_part = () if once else within(embed)  # the program scatters over them for each part
    # With a single part, the compiler scatters gradients to where the optimizer needs them.
    finest = state if parts == 1 else layout.axes("gradients")
    scattered = tuple(axis for axis in finest if axis in by_part or axis not in manual)  # 3

    reduced = tuple(axis for axis in batch if axis not in (state if manual else scattered))  # 4
    return Transfers(
      parts=parts,
      gather=gather,
      gathered_each_part=tuple(axis for axis in embed if axis not in gathered_once),
      gathered_once=gathered_once,
      scattered_each_part=scattered,
      scattered_once=within(state)[len(by_part) :],  # `state` begins with the axes of `embed`, which parts scatter
      reduced_each_part=() if manual else reduced,
      reduced_once=reduced if manual else (),
      gathered_updated=tuple(axis for axis in state if axis not in embed),
      by_hand=(*stages, *manual),
    )

  def described(self, mesh: Mapping[str, int]) -> list[str]:
    """What moves, in words: a line for each field with mesh axes of several devices."""
    hints = get_type_hints(Transfers, include_extras=True)
    words = {name: hint.__metadata__[0] for name, hint in hints.items() if hasattr(hint, "__metadata__")}
    found = {name: [axis for axis in getattr(self, name) if mesh[axis] > 1] for name in words}
    return [f"{words[name]} over {' × '.join(axes)}" for name, axes in found.items() if axes]
