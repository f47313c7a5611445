"""Peak figures of each kind of device. For a kind that is not listed, a run prints no MFU."""

import dataclasses
from collections.abc import Sequence

import jax

# Hours between two failures of a host: 6.50 of them in a thousand days of a host, on Meta's RSC-1 (arXiv:2410.21680).
HOURS_OF_A_HOST = 1000 * 24 / 6.50


@dataclasses.dataclass(frozen=True)
class Chip:
  """The figures of one device, as its maker states them. Bandwidths are in one direction.

  Attributes:
    flops: dense bfloat16 FLOP/s.
    memory: bytes.
    bandwidth: bytes/s to and from its memory.
    link: bytes/s to other devices: over each link of a torus, or over all links together if a switch connects them.
    torus: the number of dimensions of the torus that connects the devices; 0 if a switch connects them.
    wraps: a dimension of the torus is closed to a ring if its size is a multiple of this.
    network: bytes/s to devices that the switch does not connect, in the maker's own systems; 0 if unknown.
    hosts: how many hosts the switch connects.
    host: bytes/s to, and at the same time from, the memory of its host; 0 if unknown.
  """

  flops: float
  memory: float
  bandwidth: float
  link: float
  torus: int = 0
  wraps: int = 0
  network: float = 0.0
  hosts: int = 1
  host: float = 0.0

  def closed(self, shape: Sequence[int]) -> list[bool]:
    """Which dimensions of a slice are rings: in three dimensions all or none, in two each by itself."""
    rings = [self.torus > 0 and size % self.wraps == 0 for size in shape]
    return [all(rings)] * len(rings) if self.torus == 3 else rings


_V4 = Chip(275e12, 32 * 2**30, 1200e9, 50e9, torus=3, wraps=4, host=16e9)
_V5E = Chip(197e12, 16 * 2**30, 819e9, 50e9, torus=2, wraps=16, host=15e9)
_V5P = Chip(459e12, 95 * 2**30, 2765e9, 100e9, torus=3, wraps=4, host=15e9)
_V6E = Chip(918e12, 32 * 2**30, 1638e9, 100e9, torus=2, wraps=16, host=32e9)

# TPUs: Google Cloud's pages on each version, docs.cloud.google.com/tpu/docs/v4, /v5e, /v5p, /v6e and /tpu7x, which give
# the interconnect in both directions over all of a chip's links (4 in a 2D torus, 6 in 3D), and memory in GiB, in v5e's
# case under the name of GB. A TPU7x chip shows as two devices, so half of each figure. NVIDIA: the data sheets of each
# product (FLOP/s without sparsity, NVLink both ways, so half of it; cards have PCIe ×16 alone, since their NVLink
# bridges join pairs). The network is that of DGX systems by their data sheets: an adapter of 200 (A100) or 400 Gb/s for
# each GPU. A GB200's figures are a 72nd of a GB200 NVL72's. To the host: for NVIDIA PCIe ×16 of the data sheet's
# generation, and for a GB200 half of the NVLink that joins two GPUs to a CPU; for TPUs what the scaling book says
# (jax-ml.github.io/scaling-book/tpus: about 15 GB/s for a chip, v4 16, v6e 32). Keys are the first words, or parts of
# words up to a hyphen, of `jax.Device.device_kind`; the longest match counts, and None is a kind whose figures are not
# known here.
CHIPS: dict[str, Chip | None] = {
  "NVIDIA A100": Chip(312e12, 40e9, 1555e9, 300e9, network=25e9, host=32e9),
  "NVIDIA A100-SXM4-80GB": Chip(312e12, 80e9, 2039e9, 300e9, network=25e9, host=32e9),
  "NVIDIA A100-PCIE": Chip(312e12, 40e9, 1555e9, 32e9, host=32e9),
  "NVIDIA A100 80GB PCIe": Chip(312e12, 80e9, 1935e9, 32e9, host=32e9),
  "NVIDIA L4": Chip(121e12, 24e9, 300e9, 32e9, host=32e9),
  "NVIDIA H100": Chip(989e12, 80e9, 3350e9, 450e9, network=50e9, host=64e9),  # SXM; the PCIe card has its own line
  "NVIDIA H100 PCIe": Chip(756e12, 80e9, 2000e9, 64e9, host=64e9),
  "NVIDIA H100 NVL": None,
  "NVIDIA H200": Chip(989e12, 141e9, 4800e9, 450e9, network=50e9, host=64e9),
  "NVIDIA H200 NVL": None,
  "NVIDIA B200": Chip(2250e12, 180e9, 7700e9, 900e9, network=50e9, host=64e9),
  "NVIDIA GB200": Chip(2500e12, 186e9, 8000e9, 900e9, network=50e9, hosts=18, host=225e9),
  "TPU v4": _V4,
  "TPU v5 lite": _V5E,
  "TPU v5e": _V5E,
  "TPU v5": _V5P,
  "TPU v5p": _V5P,
  "TPU v6 lite": _V6E,
  "TPU v6e": _V6E,
  "TPU7x": Chip(1153.5e12, 96 * 2**30, 3690e9, 50e9, torus=3, wraps=4),
}


def chip(kind: str) -> Chip | None:
  """The figures of a kind of device, by its `device_kind`; None if unknown, as for a part of a GPU (MIG)."""
  if " MIG " in kind:
    return None
  known = [name for name in CHIPS if kind.startswith(name) and kind[len(name) :][:1] in ("", " ", "-")]
  return CHIPS[max(known, key=len)] if known else None


def peak_flops(device: jax.Device, dtype: str) -> float | None:
  """FLOP/s of the device in the compute dtype. None if it is not known."""
  known = chip(device.device_kind)
  return known.flops if known and dtype == "bfloat16" else None


def memory_in_use(devices: list[jax.Device]) -> dict[str, float]:
  """`memory_gib` and `memory_peak_gib` of this process's fullest device, where its backend reports them."""
  stats = [device.memory_stats() or {} for device in devices if device.process_index == jax.process_index()]
  names = {"memory_gib": "bytes_in_use", "memory_peak_gib": "peak_bytes_in_use"}
  return {
    name: max(s[key] for s in stats) / 2**30 for name, key in names.items() if stats and all(key in s for s in stats)
  }
