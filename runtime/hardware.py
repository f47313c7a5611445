"""Peak figures of each kind of device, and the memory that a program may use. For other kinds, a run prints no MFU."""

import contextlib
import dataclasses
from collections.abc import Sequence

import jax

# Hours between two failures of a host: 6.50 of them in a thousand days of a host, on Meta's RSC-1 (arXiv:2410.21680).
HOURS_OF_A_HOST = 1000 * 24 / 6.50

# The share of a GPU's memory that runs ask for (device_memory.py). JAX alone takes 75%. The rest is for what its
# allocator does not manage: CUDA's context, the code of kernels, NCCL's buffers, the handles of cuBLAS and cuDNN. It is
# 2.4 GB of the smallest card below, and 8.5 GB of an H100.
GPU_SHARE = 0.9


@dataclasses.dataclass(frozen=True)
class Chip:
  """The figures of one device, as its maker states them, except memory. Bandwidths are in one direction.

  Attributes:
    flops: dense bfloat16 FLOP/s.
    memory: the bytes that a program may use, which are less than the device has.
    bandwidth: bytes/s to and from its memory.
    link: bytes/s to other devices: over each link of a torus, or over all links together if a switch connects them.
    torus: the number of dimensions of the torus that connects the devices; 0 if a switch connects them.
    wraps: a dimension of the torus is closed to a ring if its size is a multiple of this.
    network: bytes/s to devices that the switch does not connect, in the maker's own systems; 0 if unknown.
    hosts: how many hosts the switch connects.
    host: bytes/s to, and at the same time from, the memory of its host; 0 if unknown.
    float8: dense FLOP/s of products of float8 numbers; 0 if these are no faster than those of bfloat16.
    watts: the most that the device draws by its data sheet, without its host and the cooling; 0 if unknown.
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
  float8: float = 0.0
  watts: float = 0.0

  def seconds(self, flops: float, of_float8: float = 0.0) -> float:
    """How long products take at the peaks, of which some are of float8 numbers."""
    return (flops - of_float8) / self.flops + of_float8 / (self.float8 or self.flops)

  def closed(self, shape: Sequence[int]) -> list[bool]:
    """Which dimensions of a slice are rings: in three dimensions all or none, in two each by itself."""
    rings = [self.torus > 0 and size % self.wraps == 0 for size in shape]
    return [all(rings)] * len(rings) if self.torus == 3 else rings


def _tpu(gib: float) -> float:
  """What a TPU compiler accepts, as it says in GiB when it refuses a program."""
  return gib * 2**30


def _gpu(gib: float) -> float:
  """The share of a GPU that runs ask for. `gib` is what CUDA says that the card has."""
  return GPU_SHARE * gib * 2**30


_V4 = Chip(275e12, _tpu(30.75), 1200e9, 50e9, torus=3, wraps=4, host=16e9, watts=192)
_V5E = Chip(197e12, _tpu(15.75), 819e9, 50e9, torus=2, wraps=16, host=15e9)
_V5P = Chip(459e12, _tpu(95.74), 2765e9, 100e9, torus=3, wraps=4, host=15e9)
_V6E = Chip(918e12, _tpu(31.25), 1638e9, 100e9, torus=2, wraps=16, host=32e9)

# TPUs: Google Cloud's pages on each version, docs.cloud.google.com/tpu/docs/v4, /v5e, /v5p, /v6e and /tpu7x, which give
# the interconnect in both directions over all of a chip's links (4 in a 2D torus, 6 in 3D). A TPU7x chip shows as two
# devices, so half of each figure; a v4 chip as one, whose two cores work together. NVIDIA: the data sheets of each
# product (FLOP/s without sparsity, NVLink both ways, so half of it; cards have PCIe ×16 alone, since their NVLink
# bridges join pairs). The network is that of DGX systems by their data sheets: an adapter of 200 (A100) or 400 Gb/s for
# each GPU. A GB200's figures are a 72nd of a GB200 NVL72's. To the host: for NVIDIA PCIe ×16 of the data sheet's
# generation, and for a GB200 half of the NVLink that joins two GPUs to a CPU; for TPUs what the scaling book says
# (jax-ml.github.io/scaling-book/tpus: about 15 GB/s for a chip, v4 16, v6e 32). Watts: the data sheets, and for v4 the
# largest in arXiv:2304.01433; Google states none for later TPUs. Keys are the first words, or parts of
# words up to a hyphen, of `jax.Device.device_kind`; the longest match counts, and None is a kind whose figures are not
# known here.
# Memory: of TPUs, what libtpu 0.0.42 names when it refuses a program (0.0.50 names 0.01 GiB less for some); their pages
# say 32, 16, 95, 32 and 96 GiB. Of GPUs, the least that CUDA was seen to report, in XLA's target configurations and in
# PyTorch's messages. Data sheets have other figures, 24 GB for the 23.65 GB of an L4 and 80 GB for an H100's 84.9 GB.
CHIPS: dict[str, Chip | None] = {
  "NVIDIA A100": Chip(312e12, _gpu(39.25), 1555e9, 300e9, network=25e9, host=32e9, watts=400),
  "NVIDIA A100-SXM4-80GB": Chip(312e12, _gpu(79.14), 2039e9, 300e9, network=25e9, host=32e9, watts=400),
  "NVIDIA A100-PCIE": Chip(312e12, _gpu(39.25), 1555e9, 32e9, host=32e9, watts=250),
  "NVIDIA A100 80GB PCIe": Chip(312e12, _gpu(79.14), 1935e9, 32e9, host=32e9, watts=300),
  "NVIDIA L4": Chip(121e12, _gpu(22.03), 300e9, 32e9, host=32e9, float8=242e12, watts=72),
  # SXM; the PCIe card has its own line
  "NVIDIA H100": Chip(989e12, _gpu(79.1), 3350e9, 450e9, network=50e9, host=64e9, float8=1979e12, watts=700),
  "NVIDIA H100 PCIe": Chip(756e12, _gpu(79.1), 2000e9, 64e9, host=64e9, float8=1513e12, watts=350),
  "NVIDIA H100 NVL": None,
  "NVIDIA H200": Chip(989e12, _gpu(139.72), 4800e9, 450e9, network=50e9, host=64e9, float8=1979e12, watts=700),
  "NVIDIA H200 NVL": None,
  "NVIDIA B200": Chip(2250e12, _gpu(178.35), 7700e9, 900e9, network=50e9, host=64e9, float8=4500e12, watts=1000),
  "NVIDIA GB200": Chip(
    2500e12, _gpu(184.3), 8000e9, 900e9, network=50e9, hosts=18, host=225e9, float8=5000e12, watts=1200
  ),
  "TPU v4": _V4,
  "TPU v5 lite": _V5E,
  "TPU v5e": _V5E,
  "TPU v5": _V5P,
  "TPU v5p": _V5P,
  "TPU v6 lite": _V6E,
  "TPU v6e": _V6E,
  "TPU7x": Chip(1153.5e12, _tpu(94.75), 3690e9, 50e9, torus=3, wraps=4, float8=2307e12),
}


def chip(kind: str) -> Chip | None:
  """The figures of a kind of device, by its `device_kind`; None if unknown, as for a part of a GPU (MIG)."""
  if " MIG " in kind:
    return None
  known = [name for name in CHIPS if kind.startswith(name) and kind[len(name) :][:1] in ("", " ", "-")]
  return CHIPS[max(known, key=len)] if known else None


def peak_flops(device: jax.Device, dtype: str) -> float | None:
  """FLOP/s of the device in the compute dtype, also if some products are of float8 numbers. None if it is not known."""
  known = chip(device.device_kind)
  return known.flops if known and dtype == "bfloat16" else None


def usable_memory(devices: Sequence[jax.Device]) -> float | None:
  """The bytes of a device that a program may use; None if they are not known, as for CPUs.

  That is what the backend says of this process's devices, the smallest of them, or else the figure of the table: of
  devices that are not there, and with allocators that have no limit of their own.
  """
  limits = [stats["bytes_limit"] for stats in _stats(devices) if stats.get("bytes_limit")]
  known = chip(devices[0].device_kind)
  return min(limits) if limits else (known.memory if known else None)


def _stats(devices: Sequence[jax.Device]) -> list[dict[str, float]]:
  """What the backend reports of the memory of this process's devices."""
  found = []
  for device in devices:
    if device.process_index == jax.process_index():
      with contextlib.suppress(jax.errors.JaxRuntimeError):  # devices that exist only for a compiler
        found.append(device.memory_stats() or {})
  return found


def memory_in_use(devices: Sequence[jax.Device]) -> dict[str, float]:
  """`memory_gib` and `memory_peak_gib` of this process's fullest device, where its backend reports them."""
  stats = _stats(devices)
  names = {"memory_gib": "bytes_in_use", "memory_peak_gib": "peak_bytes_in_use"}
  return {
    name: max(s[key] for s in stats) / 2**30 for name, key in names.items() if stats and all(key in s for s in stats)
  }
