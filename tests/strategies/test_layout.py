"""Layouts: how they join, how their meshes resolve and are arranged, which are refused, and what compiles a step."""

import dataclasses
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from helpers import model_sizes, one_sentence, program, strategy
from jax.sharding import PartitionSpec as P

import strategies
from strategies.execution.mesh import OnMesh, fitted, make_mesh, resolve
from strategies.execution.options import options, scatters
from strategies.execution.strategy import Strategy
from strategies.execution.transfers import Transfers
from strategies.layout import Layout

FSDP, TENSOR = strategies.layout_of("fsdp"), strategies.layout_of("tensor_parallel")


def test_two_d_is_the_union_of_fsdp_and_tensor_parallel():
  two_d = resolve(strategies.layout_of("two_d"), 8)
  assert two_d == resolve(FSDP | TENSOR, 8, {"data": 4, "model": 2})
  assert two_d.spec(("layers", "embed", "heads", None)) == P(None, "data", "model", None)


def test_a_union_that_disagrees_is_an_error():
  with pytest.raises(ValueError, match="'embed' on both"):
    FSDP | Layout(mesh={"model": -1}, embed="model")


def test_a_union_splits_the_batch_over_the_axes_of_both():
  """Outermost first, whichever comes first in the union."""
  other = Layout(mesh={"replica": 2}, batch="replica")
  assert (FSDP | other).batch == (other | FSDP).batch == ("replica", "data")


def test_an_array_with_experts_leaves_their_axes_out_of_its_other_dimensions():
  layout = strategies.layout_of("expert_fsdp").on(data=2, expert=4)
  assert layout.spec(("layers", "experts", "embed", "mlp")) == P(None, "expert", "data", None)
  assert layout.spec(("layers", "embed", "heads", None)) == P(None, ("data", "expert"), None, None)
  assert layout.shards_in(("experts", "embed"), "embed") == 2


def test_the_state_is_split_as_gradients_are_and_gradients_as_weights_unless_placed():
  plain, zero1, zero2 = (resolve(strategies.layout_of(name), 8) for name in ("data_parallel", "zero1", "zero2"))
  places = ("embed", "gradients", "state")
  assert [[one.shards(place) for place in places] for one in (plain, zero1, zero2, resolve(FSDP, 8))] == [
    [1, 1, 1], [1, 1, 8], [1, 8, 8], [8, 8, 8],
  ]  # fmt: skip
  assert zero1.stored_as("gradients") == plain
  assert zero1.stored_as("state") == zero2.stored_as("gradients") == resolve(FSDP, 8)
  assert (zero1 | TENSOR.on(model=1)).state == zero1.restricted_to(("data",)).state == "data"
  assert not zero1.restricted_to(()).axes("state")


def test_a_device_updates_a_piece_of_what_it_holds():
  with pytest.raises(ValueError, match="must begin with the axes of gradients"):
    Layout(mesh={"replica": 2, "data": 4}, embed="data", state=("replica", "data"))


def test_one_mesh_axis_cannot_split_two_dimensions():
  clash = Layout(mesh={"data": 8}, embed="data", mlp="data")
  with pytest.raises(ValueError, match="two dimensions"):
    clash.spec(("embed", "mlp"))


def test_mesh_axes_have_a_canonical_order():
  assert list(Layout(mesh={"model": 2, "data": 2, "replica": 2}).mesh) == ["replica", "data", "model"]


def test_a_dimension_may_be_sharded_over_two_mesh_axes():
  layout = Layout(mesh={"replica": 2, "data": 4}, batch=("replica", "data"))
  assert layout.shards("batch") == 8
  assert layout.spec(("batch", None)) == P(("replica", "data"), None)


def test_minus_one_takes_the_devices_that_are_left():
  assert resolve(strategies.layout_of("two_d"), 8, {"model": 4}).mesh == {"data": 2, "model": 4}
  assert resolve(FSDP, 1).mesh == {"data": 1}
  assert resolve(strategies.layout_of("two_d"), 1).mesh == {"data": 1, "model": 1}


@pytest.mark.parametrize(
  "name, devices, mesh",
  [
    ("pipeline", 2, {"stage": 2, "data": 1}),
    ("pipeline", 8, {"stage": 4, "data": 2}),
    ("three_d", 2, {"stage": 2, "data": 1, "model": 1}),
    ("three_d", 4, {"stage": 2, "data": 1, "model": 2}),
    ("two_d", 6, {"data": 3, "model": 2}),
    ("two_d", 3, {"data": 3, "model": 1}),
  ],
)
def test_a_layout_for_more_devices_is_fitted_to_fewer(name: str, devices: int, mesh: dict[str, int]):
  assert resolve(fitted(strategies.layout_of(name), devices), devices).mesh == mesh


def test_the_largest_axis_is_halved_first():
  assert fitted(Layout(mesh={"stage": 4, "data": -1, "model": 2}), 4).mesh == {"stage": 2, "data": -1, "model": 2}


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
@pytest.mark.parametrize("name", strategies.names())
def test_every_strategy_fits_one_to_eight_devices(name: str, devices: int):
  assert resolve(fitted(strategies.layout_of(name), devices), devices).device_count in (1, devices)


@pytest.mark.parametrize(
  "sizes, parts",
  [
    ({"data": 3}, ["mesh.data=3", "8 devices", "-1"]),
    ({"data": -1, "model": -1}, ["mesh.data=-1", "mesh.model=-1", "only one"]),
    ({"data": 3, "model": -1}, ["mesh.data=3", "8 devices"]),
    ({"data": 0}, ["mesh.data=0", "positive"]),
    ({"stage": 2}, ["mesh.stage=2", "no 'stage' axis"]),
  ],
)
def test_a_mesh_that_does_not_fit_is_refused(sizes: dict[str, int], parts: list[str]):
  with one_sentence(*parts):
    resolve(strategies.layout_of("two_d"), 8, sizes)


@pytest.mark.parametrize(
  "field, value, fix",
  [
    ("heads", 4, "1, 2 or 4"),
    ("kv_heads", 4, "1, 2 or 4"),
    ("mlp_width", 100, "use 1, 2 or 4 devices, or model.mlp_width=104"),
  ],
)
def test_sizes_that_the_mesh_does_not_divide_are_refused(field: str, value: int, fix: str):
  sizes = model_sizes(**({"kv_heads": 4} if field == "heads" else {}) | {field: value}).shardable()
  with one_sentence("mesh.model=8", f"model.{field}={value}", fix):
    resolve(TENSOR, 8).check_divides(sizes)


@pytest.mark.parametrize(
  "held, rows",
  [([(0, 4), (4, 8)], range(8)), ([(8, 12), (0, 4)], [0, 1, 2, 3, 8, 9, 10, 11]), ([(4, 8), (4, 8)], [4, 5, 6, 7])],
)
def test_a_process_reads_the_rows_its_devices_hold(held: list[tuple[int, int]], rows: list[int]):
  class Sharding:
    def addressable_devices_indices_map(self, shape: tuple[int, ...]) -> dict:
      return {device: (slice(*part),) for device, part in enumerate(held)}

    spec, mesh = P("data"), SimpleNamespace(shape={"data": 4})

  assert OnMesh(Sharding()).rows(16).tolist() == list(rows)


def test_an_unknown_strategy_is_refused_with_the_nearest_name():
  with one_sentence("strategy='fdsp'", "did you mean 'fsdp'"):
    strategies.layout_of("fdsp")


@dataclasses.dataclass(frozen=True)
class SliceDevice:
  """A device in one of several TPU slices, with the attributes that are read to arrange a mesh."""

  id: int
  slice_index: int
  coords: tuple[int, int, int] = (0, 0, 0)
  platform: str = "made up"
  device_kind: str = "made up"
  process_index: int = 0
  core_on_chip: int = 0


@pytest.fixture
def without_jax_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
  """Makes `make_mesh` return (devices, names), because a Mesh does not accept made-up devices."""
  made = lambda arranged, names, axis_types: (arranged, names)
  monkeypatch.setattr(sys.modules["strategies.execution.mesh"], "Mesh", made)


@pytest.mark.usefixtures("without_jax_mesh")
def test_the_outermost_axis_spans_the_slices():
  devices = [SliceDevice(i, slice_index=i % 2) for i in range(8)]  # the slices alternate
  arranged, names = make_mesh(resolve(strategies.layout_of("hsdp"), 8), devices)
  assert names == ("replica", "data")
  assert [[device.slice_index for device in row] for row in arranged] == [[0] * 4, [1] * 4]
  with one_sentence("mesh.replica=3", "2 slices"):
    make_mesh(resolve(strategies.layout_of("hsdp").on(replica=3, data=2), 6), devices)


def torus(slices: int, x: int, y: int) -> list[SliceDevice]:
  """The devices of slices of x × y chips."""
  places = [(n, i, j) for n in range(slices) for i in range(x) for j in range(y)]
  return [SliceDevice(k, n, (i, j, 0), "tpu", "TPU v5e") for k, (n, i, j) in enumerate(places)]


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.usefixtures("without_jax_mesh")
def test_a_mesh_axis_may_span_part_of_a_dimension_of_the_torus(slices: int):
  """A mesh of 8 × 2 in each slice of 4 × 4."""
  arranged, _ = make_mesh(strategies.layout_of("two_d").on(data=8 * slices, model=2), torus(slices, 4, 4))
  assert arranged.shape == (8 * slices, 2)
  assert [len({device.slice_index for device in part}) for part in arranged.reshape(slices, 16)] == [1] * slices


@pytest.mark.usefixtures("without_jax_mesh")
def test_many_slices_are_spread_over_the_outer_axes():
  """32 slices of 8 chips. Where the outer axis is too small for all of them, the next one spans the rest."""
  devices = torus(32, 2, 4)
  arranged, names = make_mesh(strategies.layout_of("hsdp").on(replica=2, data=128), devices)
  assert (names, arranged.shape) == (("replica", "data"), (2, 128))
  assert numbers(arranged).tolist() == np.arange(32).repeat(8).reshape(2, 128).tolist()
  arranged, names = make_mesh(strategies.layout_of("two_d").on(data=16, model=16), devices)
  assert (names, arranged.shape) == (("data", "model"), (16, 16))
  assert numbers(arranged).tolist() == [[2 * i] * 8 + [2 * i + 1] * 8 for i in range(16)]
  assert len({device.id for device in arranged.flat}) == 256


@pytest.mark.usefixtures("without_jax_mesh")
def test_an_outer_axis_of_size_one_leaves_all_slices_to_the_next():
  arranged, _ = make_mesh(strategies.layout_of("two_d").on(data=1, model=48), torus(6, 2, 4))
  assert numbers(arranged).tolist() == [np.arange(6).repeat(8).tolist()]


@pytest.mark.usefixtures("without_jax_mesh")
def test_sizes_that_slices_cannot_be_spread_over_are_refused():
  """An axis of 4 spans 2 of 6 slices, and has 2 devices in each. So the next axis cannot span the other 3."""
  with one_sentence("mesh.data=4, mesh.model=6", "6 slices", "use other sizes"):
    make_mesh(strategies.layout_of("two_d").on(data=4, model=6), torus(6, 2, 2))


def numbers(arranged: np.ndarray) -> np.ndarray:
  """The number of the slice of each device, in the shape of the mesh."""
  return np.reshape([device.slice_index for device in arranged.flat], arranged.shape)


@pytest.mark.usefixtures("without_jax_mesh")
def test_devices_that_form_no_mesh_are_refused():
  holes, uneven = torus(1, 3, 2), torus(2, 2, 2)
  with one_sentence("mesh.data=4, mesh.model=1", "these 4 devices", "all devices of each slice"):
    make_mesh(strategies.layout_of("two_d").on(data=4, model=1), [*holes[:3], holes[5]])
  with one_sentence("mesh.data=6, mesh.model=1", "these 6 devices", "all devices of each slice"):
    make_mesh(strategies.layout_of("two_d").on(data=6, model=1), uneven)


def test_compiler_options_reach_the_training_step():
  """The compiler refuses an option that it does not have, so it got it."""
  fsdp = strategy("fsdp", program())
  with pytest.raises(jax.errors.JaxRuntimeError, match="xla_is_fast"):
    Strategy(fsdp.runner, fsdp.mesh, {"xla_is_fast": True}).lower_train_step(16).compile()


def device(platform: str, kind: str) -> SimpleNamespace:
  return SimpleNamespace(platform=platform, device_kind=kind)


def test_accelerators_have_recommended_options():
  gpu, v5p = device("gpu", "NVIDIA H100 80GB HBM3"), device("tpu", "TPU v5")
  fsdp, whole = map(strategies.layout_of, ("fsdp", "data_parallel"))
  fsdp, whole = fsdp.on(data=8), whole.on(data=8)
  for accelerator in (gpu, v5p):
    assert options("recommended", accelerator, fsdp)
    assert options("default", accelerator, fsdp) == {}
  assert options("recommended", gpu, whole)
  for shares in (strategies.layout_of("tensor_parallel").on(model=8), strategies.layout_of("context").on(context=8)):
    assert options("recommended", v5p, shares)
  without = [(v5p, whole), (device("tpu", "TPU v4"), fsdp), (jax.devices()[0], fsdp)]
  assert [options("recommended", *each) for each in without] == [{}, {}, {}]


@pytest.mark.parametrize("name, mesh, fewer", [
  ("fsdp", {"data": 8}, True), ("fsdp", {"data": 16}, False), ("two_d", {"data": 16, "model": 8}, True),
  ("hsdp", {"replica": 2, "data": 4}, False), ("data_parallel", {"data": 8}, False),
])  # fmt: skip
def test_fewer_copies_are_asked_for_where_gradients_do_not_wait(name: str, mesh: dict, fewer: bool):
  found = options("recommended", device("gpu", "NVIDIA H100"), strategies.layout_of(name).on(**mesh))
  on_this_jax = fewer and jax.__version_info__ < (0, 12)  # newer ones gain nothing
  assert found.get("xla_gpu_copy_insertion_use_region_analysis", False) == on_this_jax


@pytest.mark.parametrize(
  "kind, sparse_cores, gathers", [("5 lite", False, []), ("5", True, [3]), ("6 lite", True, [2]), ("7x", True, [2, 3])]
)
def test_each_generation_of_tpus_has_its_options(kind: str, sparse_cores: bool, gathers: list[int]):
  """Options of another generation may be refused, or waste what this one has."""
  layout = strategies.layout_of("fsdp").on(data=8)
  found = options("recommended", device("tpu", f"TPU{kind}" if kind == "7x" else f"TPU v{kind}"), layout)
  assert any("sparse_core" in name for name in found) == sparse_cores
  assert [n for n in (2, 3) if any(f"{n}d_all_gather" in name for name in found)] == gathers


def test_only_layouts_that_share_experts_exchange_beside_kernels():
  layouts = [
    strategies.layout_of(name).on(data=4, **{axis: 2})
    for name, axis in (("expert_fsdp", "expert"), ("long_context", "context"))
  ]
  found = [options("recommended", device("tpu", "TPU v5"), layout) for layout in layouts]
  assert [found.get("xla_tpu_enable_async_all_to_all", False) for found in found] == [True, False]


@pytest.mark.parametrize("data, fills", [(256, True), (512, False), (1024, False)])
def test_thin_pieces_are_scattered_by_hand_on_tpus(data: int, fills: bool):
  """4096 / 512 rows of bfloat16 fill half a tile."""
  sizes = dataclasses.replace(program().sizes, width=4096, dtype="bfloat16")
  for name in ("fsdp", "zero1"):
    layout = strategies.layout_of(name).on(data=data)
    assert scatters(device("tpu", "TPU v5"), layout, sizes) == fills
    assert scatters(device("gpu", "NVIDIA H100"), layout, sizes)
    assert Transfers.of(layout, by_hand=not fills).by_hand == (() if fills else ("data",))
  for kind, replica in (("TPU7x", 2), ("TPU7x", 1), ("TPU v5", 2)):  # TPU7x merges it with an all-reduce
    layout = strategies.layout_of("hsdp").on(replica=replica, data=data)
    assert scatters(device("tpu", kind), layout, sizes) == (fills and (kind, replica) != ("TPU7x", 2))
  whole = strategies.layout_of("data_parallel").on(data=data)
  assert scatters(device("tpu", "TPU v5"), whole, dataclasses.replace(sizes, width=100)), "nothing is scattered"


@pytest.mark.parametrize("name, mesh, left", [
  ("hsdp", {"replica": 4, "data": 8}, True), ("hsdp", {"replica": 4, "data": 16}, False),
  ("hsdp", {"replica": 1, "data": 16}, True), ("fsdp", {"data": 16}, True), ("data_parallel", {"data": 16}, True),
])  # fmt: skip
def test_copies_of_pieces_on_several_hosts_are_summed_by_hand_on_gpus(name: str, mesh: dict, left: bool):
  layout = strategies.layout_of(name).on(**mesh)
  assert scatters(device("gpu", "NVIDIA H100"), layout, program().sizes) == left


@pytest.mark.full
def test_pmap_does_without_compiler_options():
  pmap = strategy("pmap_ddp", program())
  type(pmap)(pmap.runner, pmap.mesh, {"xla_is_fast": True}).lower_train_step(16).compile()


def test_pieces_of_the_state_within_pieces_of_the_weights_must_divide():
  """Width 63 is 21 rows each on 3 devices and 11 each on 6: the second piece of the state would not be in the first."""
  layout = Layout({"replica": 2, "data": 3}, batch=("replica", "data"), embed="data", state=("data", "replica"))
  layout.check_divides([("embed", "model.width", 66)])
  with one_sentence("model.width=63", "use 1 or 3 devices"):
    layout.check_divides([("embed", "model.width", 63)])


def test_positions_stay_whole_unless_they_split_evenly():
  layout = TENSOR.place(positions="context", mesh={"context": 2, "model": 4})
  assert layout.for_positions(16) is layout
  assert layout.for_positions(17) == layout.for_positions(20) == layout.place(sequence=None)  # 20 / 8
  assert layout.for_positions(16, sequence_parallel=False) == layout.place(sequence=None)


def test_a_layout_in_words():
  two_d = strategies.layout_of("two_d").on(data=4, model=2)
  assert two_d.mesh_in_words == "data=4 × model=2"
  assert two_d.on(data=1).mesh_in_words == "model=2"
  assert FSDP.on(data=8).placed(" × ") == ["batch over data", "embed over data"]
  names = strategies.layout_of("zero2").placed(" and ", mark="`")
  assert names == ["`batch` over data", "`gradients` over data", "`optimizer state` over data"]
  assert strategies.layout_of("zero1").placed(", ") == ["batch over data", "optimizer state over data"]
  assert strategies.layout_of("hsdp").placed(" × ")[0] == "batch over replica × data"


def test_an_axis_is_used_if_it_splits_anything():
  assert strategies.layout_of("zero1").uses_every_axis()
  assert Layout({"replica": 2, "data": 4}, state="data", batch="replica").uses_every_axis()
  assert not Layout({"replica": 2, "data": 4}, batch="data").uses_every_axis()
  assert not strategies.layout_of("single").uses_every_axis()


def test_pieces_of_a_dimension_and_of_it_in_an_array_with_experts():
  layout = strategies.layout_of("expert_fsdp").on(data=2, expert=4)
  assert (layout.shards("embed"), layout.shards("experts"), layout.shards("heads")) == (8, 4, 1)
  assert layout.axes_in(("experts", "embed"), "experts") == ("expert",)
  assert layout.axes_in(("experts", "embed"), "embed") == ("data",)
  assert layout.axes_in(("embed", "mlp"), "embed") == ("data", "expert")
  assert layout.shards_in(("embed", "mlp"), "embed") == 8
  assert layout.device_count == 8


def test_sequence_splits_what_positions_have_split():
  layout = Layout({"data": 2, "context": 2, "model": 2}, batch="data", positions="context", sequence="model")
  assert layout.spec(("batch", "sequence", None)) == P("data", ("context", "model"), None)
  assert layout.spec(("batch", "positions")) == P("data", "context")
  assert layout.spec((None, "heads")) == P(None, None)


def test_a_layout_seen_by_code_that_knows_some_axes():
  layout = strategies.layout_of("hsdp").on(replica=2, data=4)
  inner = layout.restricted_to(["data"])
  assert (dict(inner.mesh), inner.batch, inner.embed) == ({"data": 4}, "data", "data")
  assert dict(layout.on(replica=1).compact.mesh) == {"data": 4}
  with pytest.raises(ValueError, match=r"mesh axes \['model'\] are not in this layout's mesh \{'data': 8\}"):
    Layout({"data": 8}, heads="model")


def test_an_axis_that_splits_nothing_of_a_model_is_refused():
  layout = Layout({"data": 2, "context": 4}, batch="data", positions="context", embed=("data", "context"))
  layout.check_used(("batch", "positions", "embed"))
  layout.on(context=1).check_used(("batch",))
  with one_sentence("mesh.context=4 splits nothing", "use mesh.context=1"):
    layout.check_used(("batch", "embed"))  # without positions its devices would compute the same
  with one_sentence("mesh.data=2 splits nothing"):
    Layout({"data": 2}, mlp="data").check_used(("batch", "embed"))
  strategies.layout_of("zero1").on(data=2).check_used(("embed",))  # the state of it is split


@pytest.mark.parametrize(
  "mesh, size, fix",
  [
    ({"data": 2, "model": 3}, 8, "1 or 2, or model.mlp_width=9"),  # a factor of 6, since data takes what is left
    ({"model": 6}, 8, "1, 2 or 4 devices, or model.mlp_width=12"),
    ({"model": 2}, 7, "1 device, or model.mlp_width=8"),
  ],
)
def test_sizes_that_fit_are_named(mesh: dict[str, int], size: int, fix: str):
  layout = Layout(mesh, batch="data" if "data" in mesh else None, mlp="model", vocab="model")
  layout.check_divides([("vocab", "model.vocab_size", 7), ("mlp", "model.mlp_width", 24)])  # a vocabulary is padded
  with one_sentence(f"mesh.model={mesh['model']} does not divide model.mlp_width={size}; use {fix}"):
    layout.check_divides([("mlp", "model.mlp_width", size)])


def test_only_the_width_need_divide_if_the_state_is_in_finer_pieces():
  layout = Layout({"replica": 2, "data": 2}, batch="replica", vocab="data", embed="data", state=("data", "replica"))
  layout.check_divides([("vocab", "model.vocab_size", 7), ("embed", "model.width", 8)])
  with one_sentence("mesh.data=2 × mesh.replica=2", "model.width=6", "use 1, 2 or 3 devices"):
    layout.check_divides([("embed", "model.width", 6)])
  FSDP.on(data=4).check_divides([("embed", "model.width", 6)])
  strategies.layout_of("zero1").on(data=4).check_divides([("embed", "model.width", 6)])
