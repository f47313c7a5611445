"""Compiler options for the training step on GPUs and TPUs: they let communication run while kernels do.

Compilers do much of this by default: XLA's GPU compiler, for example, hides latency without an option. The options here
are those that helped FSDP most in compiled programs; docs/explain.md shows what remains exposed with them and without.
Larger thresholds for combining collectives left more exposed, so they are not here. The sources are
https://docs.jax.dev/en/latest/gpu_performance_tips.html and the flags that MaxText sets for its TPU runs.

They are passed with the program, not in XLA_FLAGS. So other options in the user's environment stay as they are.
"""

import jax

CHOICES = ("recommended", "default")
_KINDS = ("all_gather", "reduce_scatter", "all_reduce")
_RENAMED = jax.__version_info__ >= (0, 12)  # with XLA's options for pipelined collectives

# Moves the collectives of a scan over blocks by one round, so that they run beside another block.
GPU: dict[str, str | bool] = (
  {f"xla_gpu_pipeline_{kind}": "COLLECTIVE_PIPELINING_MODE_ON" for kind in _KINDS}
  if _RENAMED
  else {f"xla_gpu_enable_pipelined_{kind}": True for kind in _KINDS}
)
# Runs all-gathers, and a little of all-reduces, in pieces beside products. On other TPUs libtpu 0.0.50 refuses this
# fusion: it "might lead to" incorrect results and hangs. libtpu 0.0.42 accepts it there, but does not say that it is
# safe. Without the fusion the first two and the last option change nothing.
V5E: dict[str, str | bool] = {
  "xla_enable_async_all_gather": True,
  "xla_enable_async_all_reduce": True,
  "xla_tpu_enable_async_collective_fusion": True,
  "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
  "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": True,
  "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
  "xla_tpu_overlap_compute_collective_tc": True,
}


def options(choice: str, device: jax.Device) -> dict[str, str | bool]:
  """The options of one of CHOICES for a device, by its platform and kind: none for CPUs and for TPUs but v5e."""
  if choice == "default":
    return {}
  if device.platform == "gpu":
    return GPU
  is_v5e = device.device_kind in ("TPU v5 lite", "TPU v5e")
  return V5E if is_v5e else {}
