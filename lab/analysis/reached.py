"""How long a step will really take: the parts of the roofline at the rates that measured steps have reached.

A device runs its kernels one after another: products, attention, and those that only move memory. So their times add
up, where the roofline takes the longest. What the links send beside kernels costs nothing here, because no measured
row shows a cost. `lab/benchmarks/rates.py` fits the rates to measured and published steps, and tests compare them with
its record. Next: roofline.py, whose parts are weighed here.
"""

from typing import NamedTuple

from lab.analysis.roofline import Roofline


class Rates(NamedTuple):
  """What the devices of a platform reach. Times are in units of those at the peak.

  Attributes:
    products: the time of products with weights.
    attention: the time of attention's products of pairs.
    memory: what each byte adds. Products hide a part of the traffic, so it may be below 1.
    start: seconds until the first step, without a compilation cache.
    kinds: the devices that the rows were measured on.
    rows: how many rows there are.
    median, largest: the errors of rows that are predicted from the others.
  """

  products: float
  attention: float
  memory: float
  start: float
  kinds: tuple[str, ...]
  rows: int
  median: float
  largest: float

  def seconds(self, times: Roofline) -> float:
    """The expected time of a step. It is never below that of the roofline."""
    others = times.compute - times.attention
    kernels = self.products * others + self.attention * times.attention + self.memory * times.memory
    beside = max(kernels / (1 - times.idle), times.host - times.update)
    return max(beside + times.exposed + times.update, times.seconds)

  def described(self, kind: str) -> str:
    """What an expected time rests on, in a sentence for devices of this kind."""
    of = f"{self.rows} measured steps on {', '.join(self.kinds)}"
    error = f"half of them within {self.median:.0%} and all within {self.largest:.0%} if predicted from the others"
    other = "" if any(kind.startswith(known) for known in self.kinds) else f". None was measured on {kind}"
    return f"fitted to {of}, {error}{other}"


RATES: dict[str, Rates] = {
  "gpu": Rates(1.38, 3.46, 0.78, 80.0, ("NVIDIA H100",), 15, 0.07, 0.17),
  "tpu": Rates(1.06, 1.06, 1.10, 66.0, ("TPU v5p", "TPU v5e", "TPU v6e"), 11, 0.04, 0.17),
}
