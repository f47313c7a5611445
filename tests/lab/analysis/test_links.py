"""How fast groups of devices can send: over a torus of TPUs, and between GPUs with NVLink and a network."""

import dataclasses
import types

import jax
import numpy as np
import pytest
from helpers import one_sentence

import strategies
from lab.analysis import links
from lab.analysis.links import Switched, Torus, spread
from lab.analysis.topology import machine_of
from runtime.hardware import Chip, chip
from strategies.execution.mesh import make_mesh

TORUS = Chip(flops=1e12, memory=1e9, bandwidth=1e9, link=10.0, torus=3, wraps=4)
SWITCHED = Chip(flops=1e12, memory=1e9, bandwidth=1e9, link=100.0, network=5.0)


@pytest.mark.parametrize(
  "extents, whole, count",
  [
    ([4, 1, 1], [4, 4, 4], 2),  # a closed ring: both directions
    ([2, 1, 1], [4, 4, 4], 1),  # part of a ring
    ([4, 4, 4], [4, 4, 4], 6),
    ([4, 4, 1], [4, 4, 4], 4),
    ([2, 2, 2], [2, 2, 2], 3),  # too small to be closed
    ([1, 4, 4], [2, 4, 4], 2),  # a torus is closed in all dimensions or in none
    ([4, 4, 4], [4, 4, 8], 5),
    ([1, 1, 1], [4, 4, 4], 1),
  ],
)
def test_bandwidth_grows_with_the_dimensions_a_group_spans(extents: list[int], whole: list[int], count: int):
  assert Torus(TORUS, tuple(whole), lambda axes: extents).bandwidth("all-gather", ("data",)) == count * TORUS.link


def test_closed_dimensions_of_a_slice():
  assert TORUS.closed((4, 4, 8)) == [True] * 3
  assert TORUS.closed((2, 4, 4)) == [False] * 3
  flat = chip("TPU v5e")
  assert flat is not None
  assert flat.closed((8, 16)) == [False, True]


@pytest.mark.parametrize(
  "mesh, shape, spans",
  [
    ({"data": 16, "model": 4}, (4, 4, 4), {"model": [4, 1, 1], "data": [1, 4, 4]}),
    ({"data": 64}, (4, 4, 4), {"data": [4, 4, 4]}),
    ({"data": 32, "model": 2}, (4, 4, 4), {"model": [2, 1, 1], "data": [2, 4, 4]}),
    ({"replica": 2, "data": 8}, (4, 4), {"data": [4, 2], "replica": [1, 2]}),
    ({"data": 16, "model": 16}, (4, 4, 16), {"model": [4, 4, 1], "data": [1, 1, 16]}),  # the most dimensions first
  ],
)
def test_mesh_axes_fill_dimensions_of_the_torus(mesh: dict, shape: tuple, spans: dict):
  assert spread(mesh, shape) == spans


def test_a_group_may_span_several_slices():
  arranged = np.array([[types.SimpleNamespace(coords=(x, 0, 0), slice_index=y) for x in range(4)] for y in range(2)])
  mesh = types.SimpleNamespace(devices=arranged, axis_names=("replica", "data"))
  assert not links.spans_slices(mesh, ("data",))
  assert links.spans_slices(mesh, ("replica",))
  assert links.spans_slices(mesh, ("replica", "data"))


def test_the_links_of_tpus_that_are_there_are_read_from_their_coordinates():
  """A slice of 4×2×1 in which `data` goes along the first dimension, closed at 4, and `model` along the second."""
  arranged = np.array([[types.SimpleNamespace(coords=(x, y, 0)) for y in range(2)] for x in range(4)])
  mesh = types.SimpleNamespace(devices=arranged, axis_names=("data", "model"))
  figures = Chip(flops=1e12, memory=1e9, bandwidth=1e9, link=10.0, torus=2, wraps=4)
  found = links.of_devices(figures, mesh)
  assert isinstance(found, Torus)
  assert found.shape == (4, 2, 1)
  assert [found.bandwidth("all-gather", axes) for axes in (("data",), ("model",), ("data", "model"))] == [20, 10, 30]


@pytest.mark.parametrize(
  "network, expected",
  [
    # two hosts of four GPUs: `model` is inside a host, `data` has two GPUs a host, and both together all four
    (5.0, {("model",): 100, ("data",): 10, ("data", "model"): 20, (): 100}),
    # a network that is faster than NVLink does not make NVLink faster
    (60.0, {("model",): 100, ("data",): 100, ("data", "model"): 100, (): 100}),
  ],
)
def test_a_group_leaves_a_host_over_the_adapters_of_its_gpus(network: float, expected: dict):
  domains = np.array([[0, 0], [0, 0], [1, 1], [1, 1]])  # [data, model]
  found = Switched(SWITCHED, domains, ("data", "model"), network)
  assert {axes: found.bandwidth("all-gather", axes) for axes in expected} == expected


def test_the_slowest_group_counts_and_in_a_group_the_host_with_the_fewest_gpus():
  """Three GPUs of one host and one of another share a ring, so it is as fast as a single adapter."""
  uneven = Switched(SWITCHED, np.array([[0, 0, 0, 1], [1, 1, 1, 1]]), ("data", "model"), 5.0)
  assert uneven.bandwidth("all-gather", ("model",)) == 5


def test_a_permute_leaves_a_host_over_one_adapter():
  """Each GPU sends to a single other one. A ring of four GPUs a host enters and leaves it over four adapters."""
  domains = np.repeat([0, 1], 4).reshape(2, 4)  # [stage, data]
  sent = lambda network, kind, *axes: Switched(SWITCHED, domains, ("stage", "data"), network).bandwidth(kind, axes)
  assert sent(5.0, "all-gather", "stage", "data") == 4 * 5
  assert sent(5.0, "collective-permute", "stage", "data") == 5
  assert sent(5.0, "collective-permute", "stage") == 5
  assert sent(5.0, "collective-permute", "data") == SWITCHED.link
  assert sent(200.0, "collective-permute", "stage") == SWITCHED.link


def test_a_permute_uses_the_links_of_a_torus_as_a_ring_does():
  found = Torus(TORUS, (4, 4, 4), lambda axes: [4, 1, 1])
  assert found.bandwidth("collective-permute", ("data",)) == 2 * TORUS.link


def test_groups_of_devices_along_mesh_axes():
  numbers = np.arange(8).reshape(2, 2, 2)
  of = lambda *axes: links.groups(numbers, ("replica", "data", "model"), axes).tolist()
  assert of("model") == [[0, 1], [2, 3], [4, 5], [6, 7]]
  assert of("replica") == [[0, 4], [1, 5], [2, 6], [3, 7]]
  assert of("replica", "model") == [[0, 1, 4, 5], [2, 3, 6, 7]]
  assert of() == [[n] for n in range(8)]


def test_gpus_that_are_there_use_nvlink_within_a_slice_and_the_network_beyond():
  arranged = np.array([[types.SimpleNamespace(slice_index=host) for _ in range(2)] for host in range(2)])
  mesh = types.SimpleNamespace(devices=arranged, axis_names=("data", "model"))
  made = links.of_devices(SWITCHED, mesh)
  assert [made.bandwidth("all-gather", (axis,)) for axis in ("model", "data")] == [100, 5]
  assert links.of_devices(SWITCHED, mesh, network=7.0).bandwidth("all-gather", ("data",)) == 7


def test_gpus_in_several_slices_have_no_links_if_the_network_is_not_known():
  """As cards on PCIe. In one slice nothing crosses the network."""
  card = dataclasses.replace(SWITCHED, network=0.0)
  mesh = lambda *slices: types.SimpleNamespace(
    devices=np.array([types.SimpleNamespace(slice_index=number) for number in slices]), axis_names=("data",)
  )
  assert links.of_devices(card, mesh(0, 0, 1, 1)) is None
  assert links.of_devices(card, mesh(1, 1, 1, 1)).bandwidth("all-gather", ("data",)) == card.link
  assert links.of_devices(card, mesh(0, 0, 1, 1), network=7.0).bandwidth("all-gather", ("data",)) == 2 * 7


def test_devices_without_coordinates_or_slices_are_in_one_domain():
  mesh = make_mesh(strategies.layout_of("two_d").on(data=4, model=2), jax.devices())
  for axes in (("data",), ("model",), ("data", "model")):
    assert links.of_devices(SWITCHED, mesh).bandwidth("all-gather", axes) == SWITCHED.link


@pytest.mark.parametrize(
  "topology, network, mesh, expected",
  [
    # 450 GB/s of NVLink; an adapter of 400 Gb/s is 50 GB/s
    ("h100:2x8", None, {"data": 2, "model": 8}, {"model": 450e9, "data": 50e9}),
    ("h100:2x8", None, {"data": 4, "model": 4}, {"model": 450e9, "data": 2 * 50e9}),
    ("h100:2x8", "100Gb", {"data": 16}, {"data": 8 * 12.5e9}),
    ("h100:2x8", "800Gb", {"data": 16}, {"data": 450e9}),  # eight adapters are faster than NVLink
    ("h100:2x8", None, {"replica": 2, "data": 8}, {"data": 450e9, "replica": 50e9}),
    ("a100:2x8", None, {"data": 2, "model": 8}, {"model": 300e9, "data": 25e9}),
    ("gb200:18x4", None, {"data": 9, "model": 8}, {"model": 900e9, "data": 900e9}),  # one domain of NVLink
    ("gb200:36x4", None, {"data": 18, "model": 8}, {"model": 900e9, "data": 9 * 50e9}),  # two
    ("h100:3x8", None, {"data": 2, "model": 12}, {"model": 4 * 50e9}),  # a group in one and a half hosts
  ],
)
def test_links_of_a_cluster(topology: str, network: str | None, mesh: dict, expected: dict):
  found = machine_of(topology, network).links(mesh)
  assert {axis: found.bandwidth("all-gather", (axis,)) for axis in expected} == expected


@pytest.mark.parametrize(
  "topology, sizes",
  [
    ("h100:3x8", [8, 8, 8]),
    ("gb200:18x4", [72]),
    ("gb200:32x4", [64, 64]),  # not 72 and 56
    ("gb200:19x4", [40, 36]),
    ("gb200:40x4", [56, 56, 48]),  # three racks of at most 18 hosts
    ("gb200:2x3", [6]),
  ],
)
def test_hosts_are_split_evenly_into_domains_of_nvlink(topology: str, sizes: list[int]):
  where = machine_of(topology)
  found = where.links({"data": where.count})
  assert np.bincount(found.domains).tolist() == sizes


@pytest.mark.parametrize("topology, most", [("h100:1x32", 16), ("h100:2x17", 16), ("gb200:2x8", 4)])
def test_a_host_with_too_many_gpus_is_refused(topology: str, most: int):
  with one_sentence(f"topology={topology!r}", f"at most {most}", f"use {topology.split(':')[0]}:HOSTSxGPUS"):
    machine_of(topology)


def test_a_host_may_have_as_many_gpus_as_are_sold():
  assert [machine_of(topology).count for topology in ("h100:2x16", "gb200:2x4")] == [32, 8]


def test_a_cluster_names_its_network_only_if_nvlink_does_not_connect_all():
  assert machine_of("h100:2x8").described == ", each with 400 Gb/s to hosts that NVLink does not connect"
  assert "each with 12.5 Gb/s" in machine_of("gb200:19x4", "12.5Gb").described
  assert [machine_of(name).described for name in ("h100:1x8", "gb200:18x4")] == [", all connected by NVLink"] * 2
  assert machine_of("v5p:4x4x4").described == ""
