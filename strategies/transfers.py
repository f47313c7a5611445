"""Transfers: what a layout makes move between devices in a step.

A layout says where arrays are. This value says what must therefore be sent, over which mesh axes, how often, and by
whom. It is decided here and nowhere else: the runners (runner.py) carry it out, and analysis/ reads it to predict
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

from strategies.layout import Layout

Axes = tuple[str, ...]  # mesh axes
GATHER = ("part", "step")  # the values of the config field `gather`


@dataclasses.dataclass(frozen=True)
class Transfers:
  """What moves between devices in a step, and over which mesh axes.

  Attributes:
    parts: the parts of a batch that a device runs one after another.
    gather: the config's field, one of GATHER.
    by_hand: axes over which the program itself sends, inside a `shard_map`. Over the others the compiler does.
    gathered_each_part: weights are gathered for each part, in the forward and again in the backward pass.
    gathered_once: weights are gathered once a step, and whole weights are kept until its end.
    scattered_each_part: gradients are scattered after each part.
    scattered_once: the sums of gradients are scattered once a step.
    reduced_each_part: gradients are all-reduced after each part.
    reduced_once: the sums of gradients are all-reduced once a step.
    gathered_updated: new weights are gathered after the update, because each device updates only a piece of them.
  """

  parts: int
  gather: str
  by_hand: Axes
  gathered_each_part: Axes
  gathered_once: Axes
  scattered_each_part: Axes
  scattered_once: Axes
  reduced_each_part: Axes
  reduced_once: Axes
  gathered_updated: Axes

  @staticmethod
  def of(layout: Layout, *, parts: int = 1, gather: str = "part", by_hand: bool = False) -> "Transfers":
    """The transfers of a resolved layout.

    Gradients are summed by hand, once a step, if there are several parts and some of these sums can wait. They cannot
    wait if each part scatters its gradients over all axes of the batch. Nor can they if each part scatters gradients
    of whole weights: by hand, JAX has no gradient that is smaller than its weight.

    Args:
      parts: accumulation parts × microbatches.
      gather: whether weights that the batch's devices share in pieces are gathered, and their gradients scattered, for
        each "part" or once a "step". The stages of a pipeline do so once a step in any case.
      by_hand: whether gradients are summed by hand even if there is only one part.
    """
    stages = tuple(axis for axis in layout.axes("layers") if layout.mesh[axis] > 1)
    batch = tuple(axis for axis, size in layout.mesh.items() if size > 1 and axis in layout.axes("batch"))
    embed, state = layout.axes("embed"), layout.axes("state")
    once = gather == "step" or bool(stages)
    can_wait = once or (layout.axes("gradients") == embed and set(batch) - set(embed))
    manual = batch if can_wait and (parts > 1 or by_hand or stages) else ()
    within = lambda axes: tuple(axis for axis in axes if axis in manual)

    gathered_once = within(embed) if once else ()
    by_part = () if once else within(embed)  # which the program scatters for each part
    # With a single part, the compiler scatters gradients to where the optimizer needs them.
    finest = state if parts == 1 else layout.axes("gradients")
    scattered = tuple(axis for axis in finest if axis in by_part or axis not in manual)
    reduced = tuple(axis for axis in batch if axis not in (state if manual else scattered))
    return Transfers(
      parts=parts,
      gather=gather,
      by_hand=(*stages, *manual),
      gathered_each_part=tuple(axis for axis in embed if axis not in gathered_once),
      gathered_once=gathered_once,
      scattered_each_part=scattered,
      scattered_once=within(state)[len(by_part) :],
      reduced_each_part=() if manual else reduced,
      reduced_once=reduced if manual else (),
      gathered_updated=tuple(axis for axis in state if axis not in embed),
    )

  def described(self, mesh: Mapping[str, int]) -> list[str]:
    """What moves, in words: a line for each field with mesh axes of several devices."""
    found = {name: [axis for axis in getattr(self, name) if mesh[axis] > 1] for name in DESCRIBED}
    return [f"{DESCRIBED[name]} over {' × '.join(axes)}" for name, axes in found.items() if axes]


DESCRIBED = {
  "gathered_each_part": "weights gathered for each part of the batch",
  "gathered_once": "weights gathered once a step",
  "scattered_each_part": "gradients scattered after each part of the batch",
  "scattered_once": "gradients scattered once a step",
  "reduced_each_part": "gradients all-reduced after each part of the batch",
  "reduced_once": "gradients all-reduced once a step",
  "gathered_updated": "new weights gathered",
  "by_hand": "sent by hand, not by the compiler,",
}
