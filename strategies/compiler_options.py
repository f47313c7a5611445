"""Compiler options for the training step on GPUs: they let communication run while kernels do.

XLA's GPU compiler has a scheduler that starts a collective early and awaits it where its result is needed. With these
options it may do so with several collectives, and across the rounds of the scan over blocks. docs/explain.md shows what
remains exposed with them and without. Larger thresholds for combining collectives left more exposed, so they are not
here. The sources are https://docs.jax.dev/en/latest/gpu_performance_tips.html and the comments of
https://github.com/openxla/xla/blob/main/xla/xla.proto; for OVERLAP_LIMIT, https://github.com/openxla/xla/pull/17749.

TPUs get none. The options that ran gathers in pieces beside products hid nothing more on v5e. On other TPUs libtpu
0.0.50 refuses them: they might lead to incorrect results and hangs.

They are passed with the program, not in XLA_FLAGS. So other options in the user's environment stay as they are.
"""

import jax

CHOICES = ("recommended", "default")
_KINDS = ("all_gather", "reduce_scatter", "all_reduce")
_RENAMED = jax.__version_info__ >= (0, 12)  # XLA's options for pipelined collectives have new names

# Moves the collectives of a scan over blocks by one round, so that they run beside another block.
PIPELINED: dict[str, str | bool] = (
  {f"xla_gpu_pipeline_{kind}": "COLLECTIVE_PIPELINING_MODE_ON" for kind in _KINDS}
  if _RENAMED
  else {f"xla_gpu_enable_pipelined_{kind}": True for kind in _KINDS}
)
# How many collectives may be started before the first is awaited. With 1, the default, a block's weights are gathered
# one after another, and only the last gather runs beside products. With more than 4, tensor parallelism hides less.
# They share one stream, so devices send them one after another and in the same order.
OVERLAP_LIMIT = 4
GPU: dict[str, str | bool | int] = PIPELINED | {
  "xla_gpu_enable_latency_hiding_scheduler": True,  # the default for H100 and later, but not for A100
  "xla_gpu_experimental_parallel_collective_overlap_limit": OVERLAP_LIMIT,
  # Removes more copies. Without it, jax 0.10 copied gathered weights in each round, and in one schedule also all saved
  # activations of 70 billion parameters. On jax 0.12 it saved no memory, and FSDP on 1,024 GPUs hid less.
  "xla_gpu_copy_insertion_use_region_analysis": not _RENAMED,
}


def options(choice: str, device: jax.Device) -> dict[str, str | bool | int]:
  """The options of one of CHOICES for a device: none but for GPUs."""
  return GPU if choice == "recommended" and device.platform == "gpu" else {}
