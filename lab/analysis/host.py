"""Offloaded activations and the optimizer's state in the host's memory: their sizes, and the time to move them."""

from lab.analysis import update
from lab.analysis.case import Case
from lab.analysis.saved import bytes_per_example
from runtime.hardware import Chip

IN_FLIGHT = 2  # the blocks whose offloaded values are on the device: the one at work, and the one that comes or goes


def offloaded(case: Case, layers: int) -> int:
  """Bytes of one example that so many blocks of a device move to its host."""
  if case.sizes.remat != "offload":
    return 0
  return bytes_per_example(case.sizes, *case.pieces, layers, host=True, sharers=case.sharers)


def to_host(case: Case) -> tuple[float, float]:
  """Bytes that go from a device to its host in a step, and come back: saved activations, and the optimizer's state."""
  activations = case.batch_parts * case.examples * offloaded(case, case.layers)
  return activations, update.state_bytes(case) if case.optimizer.on_host else 0.0


def host_times(case: Case, chip: Chip) -> dict[str, float]:
  """Seconds in which the link to the host is busy: `Roofline.host` and `Roofline.update`. 0 if its rate is not known.

  Activations go in the forward pass and come back in the backward pass. The state goes and comes at the same time.
  """
  activations, state = (size / chip.host if chip.host else 0.0 for size in to_host(case))
  return {"host": 2 * activations + state, "update": state}
