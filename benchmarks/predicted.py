"""What is said about a training step before it runs, to stand beside what was measured."""

import collections
from typing import Any

from analysis import predict, roofline, theory
from analysis.case import Case
from strategies import Strategy
from training.hardware import chip, peak_flops


def predicted(strategy: Strategy, batch_size: int, peaks: dict[str, Any] | None) -> dict[str, float | None]:
  """Bytes a device and seconds a step, as foretold from the layout and the model; None where nothing foretells it.

  Seconds are a bound that no program beats: on accelerators the largest of arithmetic, memory traffic and messages at
  the peaks of the device; where devices are simulated the arithmetic of all of them at the machine's own speed.

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
    sent: collections.Counter = collections.Counter()
    for row in theory.sent(case):
      sent[row.axes] += row.bytes
    seconds = roofline.Roofline(
      compute=predict.flops(case) / figures.flops,
      memory=predict.traffic(case) / figures.bandwidth,
      communication=roofline.seconds_to_send(figures, strategy.mesh, sent),
    ).seconds
  elif peaks:
    real = strategy.layout.device_count if device.platform != "cpu" else 1
    seconds = batch_size * strategy.program.model.train_flops_per_example() / peaks["flops"] / real
  return {"bytes": predict.memory(case).total, "seconds": seconds}
