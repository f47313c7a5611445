"""What is said about a training step before it runs, to stand beside what was measured."""

from typing import Any

from strategies import Strategy


def predicted(strategy: Strategy, batch_size: int, peaks: dict[str, Any] | None) -> dict[str, float | None] | None:
  """Bytes a device and seconds a step, as foretold from the layout and the model; None where nothing foretells it.

  Args:
    batch_size: of the global batch.
    peaks: of the machine, as it measured them itself at the start of the run: `flops` and `copy_bandwidth` a second,
      of one device, or of all cores where devices are simulated. None if that failed.
  """
  del strategy, batch_size, peaks
  return None
