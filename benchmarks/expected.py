"""What is said about a training step before it runs, to stand beside what was measured."""

from typing import Any

from analysis import predict, roofline
from analysis.case import Case
from runtime.hardware import chip, peak_flops
from strategies import Strategy


def predicted(strategy: Strategy, batch_size: int, peaks: dict[str, Any] | None) -> dict[str, float | None]:
  """Bytes a device and seconds a step, as foretold from the layout and the model; None where nothing foretells it.

  Seconds are those of the best program: on accelerators one in which all overlaps that can, at the peaks of the device;
  where devices are simulated the arithmetic of all of them at the machine's own speed.

  Args:
    batch_size: of the global batch.
    peaks: of the machine, as it measured them itself at the start of the run: `flops` and `copy_bandwidth` a second,
      of one device, or of all cores where devices are simulated. None if that failed.
  """
  device = strategy.mesh.devices.flat[0]
  case = Case.of(strategy, batch_size, device.platform)
  figures = chip(device.device_kind)
  seconds = None
  if figures and peak_flops(device, case.model.dtype):
    to_send = lambda row: roofline.seconds_to_send(figures, strategy.mesh, {row.axes: row.bytes})
    seconds = predict.times(case, figures, to_send).seconds
  elif peaks:
    real = strategy.layout.device_count if device.platform != "cpu" else 1
    seconds = batch_size * strategy.program.model.train_flops_per_example() / peaks["flops"] / real
  return {"bytes": predict.memory(case).total, "seconds": seconds}
