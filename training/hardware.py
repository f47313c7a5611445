"""What a device can do at best. A kind that is not listed has no peak here, and then no MFU is printed."""

import jax

# Dense bfloat16 FLOP/s of one device, as its maker states it: NVIDIA's data sheets (without sparsity) and Google
# Cloud's "TPU architecture" pages. Keys are beginnings of `jax.Device.device_kind`; the longest match counts.
PEAK_BFLOAT16_FLOPS = {
  "NVIDIA A100": 312e12,
  "NVIDIA L4": 121e12,
  "NVIDIA H100": 989e12,  # SXM; the PCIe card has its own line
  "NVIDIA H100 PCIe": 756e12,
  "NVIDIA H200": 989e12,
  "NVIDIA B200": 2250e12,
  "TPU v4": 275e12,
  "TPU v5 lite": 197e12,  # v5e
  "TPU v5e": 197e12,
  "TPU v5": 459e12,  # v5p
  "TPU v6 lite": 918e12,  # v6e
  "TPU v6e": 918e12,
  "TPU7x": 2307e12,
}


def peak_flops(device: jax.Device, dtype: str) -> float | None:
  """FLOP/s of the device in the compute dtype, or None where it is not known."""
  known = [kind for kind in PEAK_BFLOAT16_FLOPS if device.device_kind.startswith(kind)]
  if not known or dtype not in ("bfloat16", "float16"):
    return None
  return PEAK_BFLOAT16_FLOPS[max(known, key=len)]


def memory_in_use(device: jax.Device) -> dict[str, float]:
  """`memory_gib` and `memory_peak_gib` of the device, where its backend reports them."""
  stats = device.memory_stats() or {}
  names = {"memory_gib": "bytes_in_use", "memory_peak_gib": "peak_bytes_in_use"}
  return {name: stats[key] / 2**30 for name, key in names.items() if key in stats}
