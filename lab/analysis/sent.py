"""What devices send in a step, for one purpose: a row of theory.py."""

from typing import NamedTuple


class Sent(NamedTuple):
  """Bytes that each device sends in a step, by one kind of collective over some mesh axes, for one purpose.

  Attributes:
    what: the purpose.
    waits: whether the next computation needs the result, so that nothing can hide the collective.
    edges: the part of `bytes` that is sent where little can hide it: before or after the blocks run, or in ticks of a
      pipeline in which all units wait for it.
  """

  kind: str
  axes: tuple[str, ...]
  bytes: float
  what: str
  waits: bool = False
  edges: float = 0.0
