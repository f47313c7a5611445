"""The page on pmap: every step shows what its text claims, and docs/pmap.md shows what the steps print."""

import jax
import numpy as np
import pytest
from helpers import PARITY, relative_difference
from jax.sharding import PartitionSpec as P
from lesson_pages import Shown, check_page, run_steps

from lab.lessons import three_ways

pytestmark = pytest.mark.full  # test_debugging_page.py is the page of `make test`


@pytest.fixture(scope="module")
def shown() -> Shown:
  return run_steps("pmap")


def test_the_page_shows_what_the_steps_print(shown: Shown):
  check_page("pmap", shown)


@pytest.mark.parametrize("way", ["with_pmap", "with_jit", "with_shard_map"])
def test_each_of_the_three_ways_equals_one_device_with_one_all_reduce(way: str, shown: Shown):
  data, w, (x, y) = shown[way].data, np.zeros(4), three_ways.examples()
  for value in data["losses"]:
    expected, gradient = jax.value_and_grad(three_ways.loss)(w, x, y)
    assert np.allclose(value, expected, rtol=PARITY)
    w = w - 0.1 * gradient
  assert np.allclose(data["w"], w, rtol=PARITY)
  assert [(one.kind, one.bytes) for one in data["sent"]] == [("all-reduce", 4 * 4 + 4)]
  assert data["w"].shape == ((8, 4) if way == "with_pmap" else (4,))
  assert "(32, 4), P('data',)" in shown[way].output or way == "with_pmap"


def test_pmap_is_a_jit_of_a_shard_map():
  traced = str(jax.make_jaxpr(jax.pmap(lambda x: 2 * x))(np.ones(8)))
  assert "shard_map[" in traced
  assert "check_vma=False" in traced
  assert not hasattr(jax.config, "jax_pmap_shmap_merge")


def test_only_stacked_results_have_the_leading_dimension(shown: Shown):
  data = shown["leading_dimension"].data
  assert (data["stacked"].shape, data["once"].shape) == ((8, 4), (4,))
  assert data["stacked"][0].tolist() == data["once"].tolist() == [8] * 4
  assert [one.kind for one in data["sent"]] == ["all-reduce"]  # the first row is sent to all
  assert data["once"].is_fully_replicated


def test_pmap_believes_that_devices_agree_and_shard_map_does_not(shown: Shown):
  data = shown["unchecked_replication"].data
  assert len({float(shard.data) for shard in data["drifted"].addressable_shards}) == 8
  assert data["drifted"].is_fully_replicated
  assert "replicated" in str(data["error"])


def test_a_psum_of_the_gradient_counts_it_eight_times_in_shard_map(shown: Shown):
  data = {name: np.asarray(value).tolist() for name, value in shown["sums_and_gradients"].data.items()}
  total = sum(range(8))
  assert data == {
    "pmap, psum of the gradient": [total] * 8,
    "pmap, gradient of the psum": [8.0 * x for x in range(8)],
    "jit, no psum": total,
    "shard_map, psum of the gradient": 8 * total,
    "shard_map, gradient of the psum": total,
  }
  assert "unbound axis name" in shown["sums_and_gradients"].output


def test_random_numbers_depend_on_the_devices_with_pmap_alone(shown: Shown):
  data = shown["random_numbers"].data
  assert not np.array_equal(*data["pmap"])
  assert data["jit"].tolist() == jax.random.uniform(jax.random.key(0), (16,)).tolist()
  assert data["jit"].sharding.spec == P("data")
  assert data["sent"] == []
  assert data["kept"].reshape(16).tolist() == data["pmap"][0].tolist()


def test_uneven_batches_and_arrays_elsewhere_are_errors_or_run_on_fewer_devices(shown: Shown):
  data = shown["batches"].data
  assert len(data["five"].devices()) == 5
  assert len(data["jit, placed again"].devices()) == 8
  for name in ("jit, five rows", "pmap, placed on device 3", "jit, placed on device 3"):
    assert isinstance(data[name], ValueError), name
  for gone in ("device_put_sharded", "device_put_replicated"):
    assert not hasattr(jax, gone)


def test_a_donated_buffer_is_used_again_only_in_the_same_sharding(shown: Shown):
  data = shown["donated_and_static"].data
  assert (data["whole again"], data["split"]) == (True, False)
  assert data["static"].tolist() == [3] * 8


def test_two_mesh_axes_replace_nested_pmaps(shown: Shown):
  data = shown["nested"].data
  assert isinstance(data["error"], ValueError)
  grid = np.arange(8).reshape(4, 2)
  assert data["rows"].tolist() == grid.sum(axis=0, keepdims=True).tolist()
  assert data["columns"].tolist() == grid.sum(axis=1, keepdims=True).tolist()
  assert data["rows", "columns"].tolist() == [[28]]


def test_a_process_supplies_its_own_rows(shown: Shown):
  data = shown["processes"].data
  assert sorted(data["own"]) == list(range(32))
  assert data["batch"].shape == (32, 4)


def test_a_run_goes_on_with_jit_where_pmap_stopped(shown: Shown):
  both, jit = shown["begin_and_go_on"].data.values()
  assert relative_difference(both["losses"], jit["losses"]) < PARITY
  assert both["shapes"] == [(8, 2, 33)] * 2 + [(16, 33)] * 2
  assert "equal: True" in shown["begin_and_go_on"].output
