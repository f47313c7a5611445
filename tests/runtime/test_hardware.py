"""The figures of devices, once more in the units of the makers' pages, and what follows from them."""

import types

import jax
import pytest
from helpers import relative_difference

from runtime import hardware
from runtime.hardware import CHIPS, Chip

# NVIDIA: dense TFLOP/s in bfloat16 and in float8 (0: no faster), GB/s of memory, GB/s of NVLink or PCIe in both
# directions, Gb/s of a GPU's network adapter, GB/s of PCIe to the host in both directions, watts.
SHEETS = {
  "NVIDIA A100": (312, 0, 1555, 600, 200, 64, 400),
  "NVIDIA A100-SXM4-80GB": (312, 0, 2039, 600, 200, 64, 400),
  "NVIDIA A100-PCIE": (312, 0, 1555, 64, 0, 64, 250),
  "NVIDIA A100 80GB PCIe": (312, 0, 1935, 64, 0, 64, 300),
  "NVIDIA L4": (121, 242, 300, 64, 0, 64, 72),
  "NVIDIA H100": (989, 1979, 3350, 900, 400, 128, 700),
  "NVIDIA H100 PCIe": (756, 1513, 2000, 128, 0, 128, 350),
  "NVIDIA H200": (989, 1979, 4800, 900, 400, 128, 700),
  "NVIDIA B200": (2250, 4500, 7700, 1800, 400, 128, 1000),
  "NVIDIA GB200": (2500, 5000, 8000, 1800, 400, 450, 1200),
}
# TPUs: TFLOP/s, GB/s of memory, GB/s over all links in both directions, links, GB/s to the host, watts, GiB as libtpu
# says. A device of TPU7x is half of a chip: 2307 TFLOP/s, 7380 GB/s, 1200 GB/s over 6 links.
PAGES = {
  "TPU v4": (275, 1200, 600, 6, 16, 192, 30.75),
  "TPU v5 lite": (197, 819, 400, 4, 15, 0, 15.75),
  "TPU v5e": (197, 819, 400, 4, 15, 0, 15.75),
  "TPU v5": (459, 2765, 1200, 6, 15, 0, 95.74),
  "TPU v5p": (459, 2765, 1200, 6, 15, 0, 95.74),
  "TPU v6 lite": (918, 1638, 800, 4, 32, 0, 31.25),
  "TPU v6e": (918, 1638, 800, 4, 32, 0, 31.25),
  "TPU7x": (2307 / 2, 7380 / 2, 1200 / 2, 6, 0, 0, 94.75),
}


@pytest.mark.parametrize("kind", SHEETS)
def test_figures_of_gpus_are_those_of_the_data_sheets(kind: str):
  chip, (flops, float8, memory, link, network, host, watts) = CHIPS[kind], SHEETS[kind]
  ours = [chip.flops, chip.float8, chip.bandwidth, chip.link, chip.network, chip.host, chip.watts]
  assert ours == [1e12 * flops, 1e12 * float8, 1e9 * memory, 1e9 * link / 2, 1e9 * network / 8, 1e9 * host / 2, watts]
  assert (chip.torus, chip.wraps) == (0, 0)
  assert chip.hosts == (18 if kind == "NVIDIA GB200" else 1)  # a rack of 72 GPUs, 4 in a host


@pytest.mark.parametrize("kind", PAGES)
def test_figures_of_tpus_are_those_of_their_pages(kind: str):
  chip, (flops, memory, links, count, host, watts, gib) = CHIPS[kind], PAGES[kind]
  ours = [chip.flops, chip.bandwidth, chip.link, chip.host, chip.watts, chip.memory]
  assert ours == [1e12 * flops, 1e9 * memory, 1e9 * links / count / 2, 1e9 * host, watts, gib * 2**30]
  assert (chip.torus, chip.wraps) == ((3, 4) if count == 6 else (2, 16))
  assert (chip.network, chip.hosts, chip.float8) == (0, 1, 2307e12 if kind == "TPU7x" else 0)


def test_every_device_with_figures_is_above():
  assert {kind for kind, chip in CHIPS.items() if chip} == {*SHEETS, *PAGES}


def test_a_run_asks_for_nine_tenths_of_a_gpus_memory():
  """In GiB, the least that CUDA was seen to report of each card."""
  least = {
    "NVIDIA A100": 39.25, "NVIDIA A100-SXM4-80GB": 79.14, "NVIDIA A100-PCIE": 39.25, "NVIDIA A100 80GB PCIe": 79.14,
    "NVIDIA L4": 22.03, "NVIDIA H100": 79.1, "NVIDIA H100 PCIe": 79.1, "NVIDIA H200": 139.72, "NVIDIA B200": 178.35,
    "NVIDIA GB200": 184.3,
  }  # fmt: skip
  assert least.keys() == SHEETS.keys()
  for kind, gib in least.items():
    assert relative_difference(CHIPS[kind].memory, 0.9 * gib * 2**30) < 1e-9, kind


@pytest.mark.parametrize(
  "kind, name",
  [
    ("NVIDIA A100-SXM4-40GB", "NVIDIA A100"), ("NVIDIA A100-PCIE-40GB", "NVIDIA A100-PCIE"),
    ("NVIDIA H100 80GB HBM3", "NVIDIA H100"), ("NVIDIA H100 NVL", None), ("NVIDIA H1000", None),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None), ("TPU v5 lite", "TPU v5 lite"), ("TPU v5litepod", None),
    ("TPU v5", "TPU v5"), ("cpu", None), ("", None),
  ],
)  # fmt: skip
def test_the_longest_name_counts_and_ends_where_a_word_does(kind: str, name: str | None):
  assert hardware.chip(kind) == (CHIPS[name] if name else None)
  if name:
    assert hardware.chip(kind) is CHIPS[name]


def test_products_of_float8_take_their_own_time():
  """10 FLOP, of which 4 in float8: 6 at 2 FLOP/s and 4 at 8 FLOP/s, or all at 2 FLOP/s."""
  both = Chip(flops=2.0, memory=1.0, bandwidth=1.0, link=1.0, float8=8.0)
  assert both.seconds(10.0) == 5.0
  assert both.seconds(10.0, 4.0) == 3.5
  assert Chip(flops=2.0, memory=1.0, bandwidth=1.0, link=1.0).seconds(10.0, 4.0) == 5.0


def test_a_dimension_is_a_ring_if_its_size_is_a_multiple():
  three, two = (Chip(1.0, 1.0, 1.0, 1.0, torus=n, wraps=w) for n, w in ((3, 4), (2, 16)))
  assert three.closed([4, 8, 12]) == [True, True, True]
  assert three.closed([4, 8, 2]) == [False, False, False]  # all or none
  assert two.closed([16, 8]) == [True, False]
  assert Chip(1.0, 1.0, 1.0, 1.0).closed([4]) == [False]


def test_hours_of_a_host_are_a_thousand_days_over_the_failures():
  assert pytest.approx(24_000 / 6.5) == hardware.HOURS_OF_A_HOST


def device(kind: str, process: int = 0, **stats: float) -> types.SimpleNamespace:
  return types.SimpleNamespace(device_kind=kind, process_index=process, memory_stats=lambda: stats or None)


def test_the_peak_is_that_of_bfloat16():
  assert hardware.peak_flops(device("NVIDIA L4"), "bfloat16") == 121e12
  assert hardware.peak_flops(device("NVIDIA L4"), "float32") is None
  assert hardware.peak_flops(device("cpu"), "bfloat16") is None


def test_memory_in_use_is_that_of_the_fullest_device_of_this_process():
  of = lambda gib, peak, process=0: device("a", process, bytes_in_use=gib * 2**30, peak_bytes_in_use=peak * 2**30)
  assert hardware.memory_in_use([of(1, 7), of(3, 4), of(9, 9, process=1)]) == {"memory_gib": 3, "memory_peak_gib": 7}
  assert hardware.memory_in_use([of(1, 7), device("a")]) == {}  # one does not report it
  assert hardware.memory_in_use([of(9, 9, process=1)]) == {}
  assert hardware.memory_in_use(jax.devices()) == {}
