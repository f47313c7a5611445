"""What a device can do at best. A kind that is not listed has no peak here, and then no MFU is printed."""

import jax

# Dense bfloat16 FLOP/s of one device, as its maker states it: NVIDIA's data sheets (without sparsity) and Google
# Cloud's "TPU architecture" pages; a TPU7x chip shows as two devices. Keys are the first words, or parts of words up to
# a hyphen, of `jax.Device.device_kind`; the longest match counts, and None is a kind whose peak is not known here.
PEAK_BFLOAT16_FLOPS: dict[str, float | None] = {
  "NVIDIA A100": 312e12,
  "NVIDIA L4": 121e12,
  "NVIDIA H100": 989e12,  # SXM; the PCIe card has its own line
  "NVIDIA H100 PCIe": 756e12,
  "NVIDIA H100 NVL": None,
  "NVIDIA H200": 989e12,
  "NVIDIA H200 NVL": None,
  "NVIDIA B200": 2250e12,
  "TPU v4": 275e12,
  "TPU v5 lite": 197e12,  # v5e
  "TPU v5e": 197e12,
  "TPU v5": 459e12,  # v5p
  "TPU v5p": 459e12,
  "TPU v6 lite": 918e12,  # v6e
  "TPU v6e": 918e12,
  "TPU7x": 1153.5e12,
}


def peak_flops(device: jax.Device, dtype: str) -> float | None:
  """FLOP/s of the device in the compute dtype, or None where it is not known."""
  name = device.device_kind
  known = [kind for kind in PEAK_BFLOAT16_FLOPS if name.startswith(kind) and name[len(kind) :][:1] in ("", " ", "-")]
  if not known or dtype != "bfloat16":
    return None
  return PEAK_BFLOAT16_FLOPS[max(known, key=len)]


def memory_in_use(devices: list[jax.Device]) -> dict[str, float]:
  """`memory_gib` and `memory_peak_gib` of this process's fullest device, where its backend reports them."""
  stats = [device.memory_stats() or {} for device in devices if device.process_index == jax.process_index()]
  names = {"memory_gib": "bytes_in_use", "memory_peak_gib": "peak_bytes_in_use"}
  return {
    name: max(s[key] for s in stats) / 2**30 for name, key in names.items() if stats and all(key in s for s in stats)
  }
