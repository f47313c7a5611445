"""The roofline of a step: the time of its arithmetic, memory traffic and communication at the device's peaks.

Arithmetic and memory traffic overlap, so the larger of the two is a lower bound, and shows what binds (Williams et al.
2009, doi:10.1145/1498765.1498785). Communication adds what nothing hides: overlap.py reads it from a compiled program,
predict.py estimates it.
"""

import dataclasses

from runtime.hardware import Chip


@dataclasses.dataclass(frozen=True)
class Roofline:
  """Seconds that each part of a step takes alone, at the peak.

  Attributes:
    communication: in which the links are busy.
    exposed: the part of it in which the device only waits.
    idle: the share of time in which a pipeline's stages wait.
    host: in which the link to the host's memory is busy.
    update: the part of it for the optimizer's state, which comes and goes when all else is done.
    attention: the part of `compute` for pairs of positions, which attention's kernels compute.
  """

  compute: float
  memory: float
  communication: float
  exposed: float = 0.0
  idle: float = 0.0
  host: float = 0.0
  update: float = 0.0
  attention: float = 0.0

  @property
  def seconds(self) -> float:
    """The least time of a step."""
    beside = max(self.compute / (1 - self.idle), self.memory, self.host - self.update)
    return beside + self.exposed + self.update

  @property
  def binds(self) -> str:
    """What takes the most of that time: compute, memory, communication or the link to the host."""
    times = {"compute": self.compute / (1 - self.idle), "memory": self.memory, "communication": self.exposed}
    times["link to the host"] = self.host
    return max(times, key=lambda name: times[name])

  def mfu(self, model_flops: float, chip: Chip) -> float:
    """Model FLOPs utilization of a step that takes the least time, for `Case.model_flops` or `Case.palm_flops`."""
    return model_flops / (self.seconds * chip.flops)
