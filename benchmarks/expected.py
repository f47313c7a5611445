"""What theory expects of a training step. The throughput table shows it beside the measured figures."""

from typing import Any

from analysis import links, memory, predict
from analysis.case import Case
from runtime.hardware import chip, peak_flops
from strategies import Strategy


def expected_step(strategy: Strategy, batch_size: int, peaks: dict[str, Any] | None) -> dict[str, float | None]:
  """The expected `bytes` of a device and `seconds` of a step, from the layout and the model alone.

  On accelerators the seconds are those at the maker's peaks, plus the communication that nothing is expected to hide.
  On simulated devices they are the arithmetic of all devices at the speed that the machine measured. None if the speed
  is unknown.

  Args:
    batch_size: the size of the global batch.
    peaks: what the machine measured at the start of the run: `flops` and `copy_bandwidth`, both a second, of one device
      or, with simulated devices, of all cores. None if that failed.
  """
  device = strategy.mesh.devices.flat[0]
  case = Case.of(strategy, batch_size, device.platform)
  figures = chip(device.device_kind)
  seconds = None
  if figures and peak_flops(device, case.sizes.dtype):
    between = links.of_devices(figures, strategy.mesh)
    seconds = predict.times(case, figures, between).seconds if between else None
  elif peaks:
    real = strategy.layout.device_count if device.platform != "cpu" else 1
    seconds = batch_size * strategy.program.sizes.train_flops_per_example() / peaks["flops"] / real
  return {"bytes": memory.of(case).total, "seconds": seconds}
