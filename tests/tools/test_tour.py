"""The tour: every step shows what its text claims, and docs/tour*.md show what the steps print."""

from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
from helpers import PARITY, relative_difference
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from lesson_pages import Shown, check_page, run_steps

from lab.lessons import TOUR, experts, four_ways
from lab.notebook import notebook
from lab.steps import printed
from models.ops.experts import choose
from tools import tour

pytestmark = pytest.mark.full  # test_debugging_page.py is the page of `make test`


@pytest.fixture(scope="module")
def shown() -> Shown:
  return run_steps("tour")


def test_the_page_shows_what_the_steps_print(shown: Shown):
  check_page("tour", shown)


def test_the_notebook_holds_the_same_steps_and_prints_the_same(shown: Shown):
  """If a change is intended, run python -m tools.tour."""
  pytest.importorskip("nbformat", reason="nbformat writes the notebook")
  lessons = [(lesson, [shown[step.__name__] for step in lesson.STEPS]) for lesson in TOUR.lessons]
  assert (tour.DOCS / "tour.ipynb").read_text() == notebook("tour", TOUR, lessons, tour.DEVICES)


@pytest.mark.parametrize("lesson", TOUR.lessons, ids=lambda lesson: lesson.__name__.rpartition(".")[2])
def test_what_a_cell_suggests_to_change_shows_what_it_says(lesson: ModuleType):
  for step in lesson.STEPS:
    found = TOUR.tries[step.__name__]  # every step has something to try
    run = lambda code: printed(lambda: exec(code, dict(vars(lesson))))[0]
    assert found.code.count(found.change[0]) == 1, step.__name__
    before, after = run(found.code), run(found.code.replace(*found.change))
    assert found.shows in after, step.__name__
    assert found.shows not in before, step.__name__


def kinds(sent: list[Any]) -> list[str]:
  return [one.kind for one in sent]


def test_by_default_one_device_does_everything(shown: Shown):
  assert len(shown["devices"].data["devices"]) == 8
  assert shown["devices"].data["used"] == {jax.devices()[0]}


def test_meshes_arrange_all_devices_with_the_last_axis_fastest(shown: Shown):
  assert {n: ids.shape for n, ids in shown["meshes"].data.items()} == {1: (8,), 2: (4, 2), 3: (2, 2, 2)}
  for ids in shown["meshes"].data.values():
    assert ids.ravel().tolist() == list(range(8))


def test_a_sum_along_an_axis_adds_the_devices_that_differ_only_in_it(shown: Shown):
  data = shown["along_an_axis"].data
  assert data["model"].tolist() == [[0 + 1], [2 + 3], [4 + 5], [6 + 7]]
  assert data["data"].tolist() == [[0 + 2 + 4 + 6, 1 + 3 + 5 + 7]]


def test_one_device_runs_the_same_program_and_sends_nothing(shown: Shown):
  data = shown["one_device"].data
  assert {n: dict(one["mesh"]) for n, one in data.items()} == {
    8: {"data": 4, "model": 2}, 4: {"data": 2, "model": 2}, 1: {"data": 1, "model": 1},
  }  # fmt: skip
  assert {n: kinds(one["sent"]) for n, one in data.items()} == {8: ["all-reduce"], 4: ["all-reduce"], 1: []}
  for one in data.values():
    assert one["y"].tolist() == (np.arange(32).reshape(8, 4) ** 2).sum(axis=0).tolist()
  assert "use sizes whose product is 3" in shown["one_device"].output


def test_a_spec_determines_the_pieces_and_the_copies(shown: Shown):
  expected = {  # the shape of a piece, and how many devices hold each
    P("data", None): ((2, 16), 2), P(None, "model"): ((8, 8), 4), P("data", "model"): ((2, 8), 1),
    P("model", "data"): ((4, 4), 1), P(("data", "model")): ((1, 16), 1), P(): ((8, 16), 8),
  }  # fmt: skip
  data = shown["specs"].data
  assert data.keys() == expected.keys()
  for spec, (piece, copies) in expected.items():
    shards = data[spec].addressable_shards
    assert {shard.data.shape for shard in shards} == {piece}
    assert len({shard.device for shard in shards if shard.index == shards[0].index}) == copies
    assert f"of {piece}, " in shown["specs"].output


def test_a_batch_is_split_over_data_and_copied_over_model(shown: Shown):
  data = shown["a_batch"].data
  for shard in data["batch"].addressable_shards:
    row, copy = divmod(shard.device.id, 2)
    assert shard.replica_id == copy
    assert shard.data.tolist() == np.arange(16).reshape(8, 2)[2 * row : 2 * row + 2].tolist()
  assert data["from_processes"].sharding == data["batch"].sharding
  assert data["from_processes"].tolist() == data["batch"].tolist()


def test_the_masked_mean_of_padded_batches_is_the_mean_of_the_examples(shown: Shown):
  data = shown["uneven_batch"].data
  last = data["last"]
  assert data["count"] == 13
  assert data["loss"] / data["count"] == data["mean"] == np.mean(np.arange(13) ** 2)
  assert last["mask"].tolist() == [True] * 5 + [False] * 3
  assert last["x"].mean() != last["x"].mean(where=last["mask"])
  assert "ValueError" in shown["uneven_batch"].output


def test_resharding_keeps_values_and_the_specs_determine_the_collective(shown: Shown):
  found = dict(shown["resharding"].data)
  assert not found.pop("reshard").sharding.is_fully_replicated, "with Auto axes, in jit"
  assert found.pop("with_sharding_constraint").sharding.is_fully_replicated
  sent = [kinds(sent) for _, _, sent in found.values()]
  assert sent == [["all-gather"], [], [], ["all-to-all"], ["collective-permute"]]
  for (before, after), (x, y, _) in found.items():
    assert x.sharding.is_equivalent_to(NamedSharding(x.sharding.mesh, before), 2)
    assert y.sharding.is_equivalent_to(NamedSharding(x.sharding.mesh, after), 2)
    assert x.tolist() == y.tolist()


@pytest.mark.parametrize("way", ["by_the_compiler", "with_constraints", "in_types", "by_hand"])
def test_each_of_the_four_ways_equals_one_device_with_one_all_reduce(way: str, shown: Shown):
  data = shown[way].data
  assert relative_difference(data["y"], data["expected"]) < PARITY
  assert [(one.kind, one.axes) for one in data["sent"]] == [("all-reduce", ("model",))]
  assert data["y"].sharding.is_equivalent_to(NamedSharding(data["y"].sharding.mesh, P("data")), 2)
  assert "equal to one device: True" in shown[way].output


def test_types_show_the_sharding_and_require_a_choice(shown: Shown):
  said = dict(line.split(": ", 1) for line in shown["in_types"].output.splitlines())
  assert said["hidden"] == "float32[16@data,64@model]"
  assert said["hidden @ w2"] == "ShardingTypeError"
  assert said["result"] == "float32[16@data,32]"


def test_shard_map_without_its_psum_is_an_error():
  specs = P("data"), P(None, "model"), P("model")
  mesh = jax.make_mesh((4, 2), ("data", "model"))
  arrays = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(four_ways.arrays(), specs, strict=True)]
  with pytest.raises(ValueError, match="replicated across mesh axis 'model'"):
    jax.shard_map(four_ways.plain, mesh=mesh, in_specs=specs, out_specs=P("data"))(*arrays)


def test_the_compiler_gathers_the_smaller_operand_unless_a_constraint_decides(shown: Shown):
  data = shown["where_they_differ"].data
  gathered = lambda name: [one.operands[0].dims for one in data[name]["sent"]]
  weights, hidden = [(4, 64), (64, 4)], [(4, 64), (2, 64)]  # w1 and w2; w1 and the hidden units
  assert gathered("by the compiler, 256 examples") == weights == gathered("with constraints, 16 examples")
  assert gathered("by the compiler, 16 examples") == hidden
  split = {name: one["y"].sharding.shard_shape(one["y"].shape) for name, one in data.items() if name != "in types"}
  assert list(split.values()) == [(32, 32), (16, 4), (2, 32)]
  for name in split:
    assert set(kinds(data[name]["sent"])) == {"all-gather"}
    assert relative_difference(data[name]["y"], data[name]["expected"]) < PARITY
  assert "illegally sharded" in str(data["in types"])


def test_the_gradient_of_a_split_batch_is_added_up_once(shown: Shown):
  data = shown["gradient_of_a_split_batch"].data
  for name, one in data.items():
    times = 8 if name == "shard_map, psum alone" else 1
    assert relative_difference(one["y"], times * one["expected"]) < PARITY, name
    assert set(kinds(one["sent"])) == {"all-reduce"}, name
    assert [shape.dims for shape in one["sent"][0].operands] == [(4,)], name


def test_a_ring_equals_plain_attention_and_passes_on_each_piece_but_the_last(shown: Shown):
  data = shown["keys_go_round"].data
  assert relative_difference(data["y"], data["expected"]) < PARITY
  assert [(one.kind, one.axes, one.times) for one in data["sent"]] == [("collective-permute", ("context",), 1)] * 3
  keys_and_values = 2 * data["y"].size * data["y"].dtype.itemsize
  assert sum(one.sent_in_step for one in data["sent"]) == 3 / 4 * keys_and_values
  assert "largest difference from one device: 0.00000" in shown["keys_go_round"].output


def test_devices_with_an_early_and_a_late_chunk_need_equally_many_scores(shown: Shown):
  data, seen = shown["balanced"].data, np.tri(256).sum(axis=1)
  assert data["in_order"].tolist() == seen.reshape(4, -1).sum(axis=1).tolist()
  assert len(set(data["early_and_late"])) == 1
  assert sum(data["early_and_late"]) == sum(data["in_order"]) == seen.sum()


def test_a_halo_equals_plain_attention_with_a_window_and_grows_with_no_text(shown: Shown):
  data, window = shown["halo"].data, 17
  assert relative_difference(data["y"], data["expected"]) < PARITY
  assert data["bytes"] == [2 * (window - 1) * 16 * 4] * 2  # keys and values of 16 numbers of 4 bytes
  q, k, v = (np.asarray(x, np.float64) for x in jax.random.normal(jax.random.key(0), (3, 1024, 16)))
  seen = slice(1000 - window + 1, 1001)
  weights = np.exp(k[seen] @ q[1000] / 4)
  assert relative_difference(np.asarray(data["y"])[1000], weights @ v[seen] / weights.sum()) < PARITY


def test_a_mixture_is_the_weighted_sum_of_two_experts(shown: Shown):
  x, router, up, down = (np.asarray(a, np.float64) for a in experts.tokens_and_experts())
  loads, y = np.zeros(8, int), np.zeros_like(x)
  for t, scores in enumerate(x @ router):
    best = np.argsort(scores)[-2:]
    loads[best] += 1
    for expert, weight in zip(best, np.exp(scores[best]) / np.exp(scores[best]).sum(), strict=True):
      y[t] += weight * np.maximum(x[t] @ up[expert], 0) @ down[expert]
  data = shown["a_router_chooses"].data
  assert data["loads"].tolist() == loads.tolist()
  assert relative_difference(data["y"], y) < PARITY


@pytest.mark.parametrize("way", ["tokens_go_to_experts", "tokens_go_to_all_devices"])
def test_experts_on_four_devices_equal_one_device(way: str, shown: Shown):
  data = shown[way].data
  assert relative_difference(data["y"], data["expected"]) < PARITY
  assert data["y"].shape == (256, 16)
  assert "largest difference from one device: 0.00000" in shown[way].output


def test_rows_go_to_experts_and_back_with_room_for_the_most(shown: Shown):
  data = shown["tokens_go_to_experts"].data
  rows = data["rows"]
  assert rows.sum(axis=0).tolist() == shown["a_router_chooses"].data["loads"].tolist()
  assert rows.sum(axis=1).tolist() == [2 * 64] * 4
  assert [(one.kind, one.axes, one.times) for one in data["sent"]] == [("all-to-all", ("expert",), 1)] * 2
  to_others = 8 * rows.max() * 16 * 4 * 3 / 4
  assert [one.sent_in_step for one in data["sent"]] == [to_others] * 2


def test_a_gather_sends_each_token_to_all_other_devices(shown: Shown):
  sent = shown["tokens_go_to_all_devices"].data["sent"]
  assert [(one.kind, one.axes, one.times) for one in sent] == [
    ("all-gather", ("expert",), 1), ("reduce-scatter", ("expert",), 1),
  ]  # fmt: skip
  assert [one.sent_in_step for one in sent] == [3 * 64 * 16 * 4] * 2


def test_the_table_of_ways_is_what_the_programs_send(shown: Shown):
  table, token = shown["which_way_sends_less"].data, 64 * 16 * 4  # bytes of a device's tokens
  ways = ("tokens_go_to_all_devices", "tokens_go_to_experts")
  in_all = {way: sum(one.sent_in_step for one in shown[way].data["sent"]) for way in ways}
  to_all, to_experts = table[4]
  assert in_all["tokens_go_to_all_devices"] == to_all * token
  rows = shown["tokens_go_to_experts"].data["rows"]
  assert in_all["tokens_go_to_experts"] == to_experts * token * rows.max() / rows.mean()
  for devices, (to_all, to_experts) in table.items():  # as the repository chooses
    assert choose("auto", devices, chosen=2) == ("exchange" if 1.25 * to_experts < to_all else "gather")


def test_a_layout_turns_names_into_specs(shown: Shown):
  assert {name: tuple(sharding.spec) for name, sharding in shown["layouts"].data.items()} == {
    "data_parallel": (None, None, None), "fsdp": (None, "data", None),
    "tensor_parallel": (None, None, "model"), "two_d": (None, "data", "model"),
  }  # fmt: skip


def test_fully_sharded_is_exactly_an_eighth_of_replicated(shown: Shown):
  data = shown["replicated_and_sharded"].data
  everything, kept_whole = data["single"]["whole"][0], data["fsdp"]["whole"][0]
  assert kept_whole < 0.01 * everything
  for device in range(8):
    assert data["data_parallel"]["whole"][device] == everything
    assert data["data_parallel"]["pieces"][device] == 0
    assert data["fsdp"]["whole"][device] == kept_whole
    assert data["fsdp"]["pieces"][device] * 8 == everything - kept_whole


def test_memory_without_devices_is_the_state_divided_by_the_devices(shown: Shown):
  data = {name: one["held"] for name, one in shown["memory_without_devices"].data.items()}
  state = shown["memory_without_devices"].data["fsdp"]["state"]
  split = sum(x.size * x.dtype.itemsize for x in state if x.sharding.shard_shape(x.shape) != x.shape)
  whole = data["data_parallel"] - split
  assert data["fsdp"] == data["two_d"] == split / 256 + whole
  assert data["tensor_parallel"] == split / 8 + whole
