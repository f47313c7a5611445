"""What theory predicts of a training step. The throughput table shows it beside the measured figures."""

from lab.analysis import links, memory, predict
from lab.analysis.case import Case
from runtime.hardware import chip, peak_flops
from strategies import Strategy


def predicted_step(strategy: Strategy, batch_size: int) -> dict[str, float | None]:
  """The predicted `bytes` of a device and least `seconds` of a step, from the layout and the model alone.

  The seconds are those at the maker's peaks, plus the communication that nothing is expected to hide. None if the peaks
  are unknown, as those of simulated devices are: `figures` then takes the speed that the machine measured.

  Args:
    batch_size: the size of the global batch.
  """
  device = strategy.mesh.devices.flat[0]
  case = Case.of(strategy, batch_size, device.platform)
  figures = chip(device.device_kind)
  seconds = None
  if figures and peak_flops(device, case.sizes.dtype):
    between = links.of_devices(figures, strategy.mesh)
    seconds = predict.times(case, figures, between).seconds if between else None
  return {"bytes": memory.of(case).total, "seconds": seconds}
