"""Compiler options for the training step on GPUs: they let communication run while kernels do.

Compilers do much of this by default: XLA's GPU compiler, for example, hides latency without an option. The options here
are those that helped FSDP most in compiled programs; docs/explain.md shows what remains exposed with them and without.
Larger thresholds for combining collectives left more exposed, so they are not here. The source is
https://docs.jax.dev/en/latest/gpu_performance_tips.html.

TPUs get none. The options that ran gathers in pieces beside products hid nothing more on v5e. On other TPUs libtpu
0.0.50 refuses them: they might lead to incorrect results and hangs.

They are passed with the program, not in XLA_FLAGS. So other options in the user's environment stay as they are.
"""

import jax

CHOICES = ("recommended", "default")
_KINDS = ("all_gather", "reduce_scatter", "all_reduce")
_RENAMED = jax.__version_info__ >= (0, 12)  # XLA's options for pipelined collectives have new names

# Moves the collectives of a scan over blocks by one round, so that they run beside another block.
GPU: dict[str, str | bool] = (
  {f"xla_gpu_pipeline_{kind}": "COLLECTIVE_PIPELINING_MODE_ON" for kind in _KINDS}
  if _RENAMED
  else {f"xla_gpu_enable_pipelined_{kind}": True for kind in _KINDS}
)


def options(choice: str, device: jax.Device) -> dict[str, str | bool]:
  """The options of one of CHOICES for a device: none but for GPUs."""
  return GPU if choice == "recommended" and device.platform == "gpu" else {}
