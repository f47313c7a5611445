"""Parsing compiled programs: loops, products, groups of devices, memory traffic."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lab.analysis import calls, communication, hlo, overlap, work
from runtime.hardware import Chip

HEAD = "HloModule m\n\n"


def compiled(function, *shapes: tuple[int, ...]) -> hlo.Module:
  arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
  return hlo.parse(jax.jit(function).lower(*arrays).compile().as_text())


def test_the_body_of_a_loop_counts_as_often_as_it_runs():
  """XLA's own analysis counts it once."""

  def nested(x, w):
    inner = lambda x, _: (x @ w, None)
    outer = lambda x, _: (jax.lax.scan(inner, x, length=5)[0] @ w, None)
    return jax.lax.scan(outer, x, length=3)[0]

  assert work.flops(compiled(nested, (4, 8), (8, 8))) == 3 * (5 + 1) * 2 * 4 * 8 * 8


def test_the_rounds_of_an_unknown_loop_are_given_by_its_scope():
  def program(x, w, n):
    with jax.named_scope("sometimes"):
      inner = lambda x, _: (jnp.tanh(x @ w), None)
      return jax.lax.fori_loop(0, n[0].astype(int), lambda i, x: jax.lax.scan(inner, x, length=5)[0], x)

  module = compiled(program, (4, 8), (8, 8), (1,))
  assert work.flops(module) == 0
  assert work.flops(module, {"sometimes": 7}) == 7 * 5 * 2 * 4 * 8 * 8
  assert work.flops(module, {"another": 7}) == 0
  (loop,) = module.unknown_loops()
  assert "sometimes" in loop
  assert module.unknown_loops({"sometimes": 7}) == []


LOOP = (
  HEAD
  + """%body (p: (s32[], f32[4,4])) -> (s32[], f32[4,4]) {
  %p = (s32[], f32[4,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %two = s32[] constant(2)
  %next = s32[] add(%i, %two)
  %x = f32[4,4]{1,0} get-tuple-element(%p), index=1
  %y = f32[4,4]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %t = (s32[], f32[4,4]{1,0}) tuple(%next, %y)
}

%condition (p.1: (s32[], f32[4,4])) -> pred[] {
  %p.1 = (s32[], f32[4,4]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  %until = s32[] constant(7)
  ROOT %less = pred[] compare(%i.1, %until), direction=LT
}

ENTRY %main (n: s32[], x.1: f32[4,4]) -> (s32[], f32[4,4]) {
  %n = s32[] parameter(0)
  %x.1 = f32[4,4]{1,0} parameter(1)
  %from = s32[] constant(FIRST)
  %copy = s32[] copy(%from)
  %a = (s32[], f32[4,4]{1,0}) tuple(%copy, %x.1)
  ROOT %w = (s32[], f32[4,4]{1,0}) while(%a), condition=%condition, body=%body
}
"""
)


@pytest.mark.parametrize("first, rounds", [(0, 4), (1, 3), (-3, 5), (6, 1), (7, 0), (9, 0)])
def test_a_trip_count_is_computed_from_start_limit_and_step(first: int, rounds: int):
  """As libtpu writes loops, without an annotation: from 0 up to 7 in steps of 2 makes 4 rounds."""
  module = hlo.parse(LOOP.replace("FIRST", str(first)))
  assert work.flops(module) == rounds * 2 * 4 * 4 * 4
  assert module.unknown_loops() == []


@pytest.mark.parametrize(
  "old, new",
  [
    ("copy(%from)", "copy(%n)"),
    ("constant(7)", "parameter(1)"),
    ("%two = s32[] constant(2)", "%two = s32[] constant(-2)"),
  ],
)
def test_a_loop_without_constant_bounds_is_unknown(old: str, new: str):
  module = hlo.parse(LOOP.replace("FIRST", "0").replace(old, new))
  assert work.flops(module) == 0
  assert module.unknown_loops() == ["w"]


@pytest.mark.parametrize(
  "left, right, out, attributes, flops",
  [
    # x [512, 8·128] × w [8, 128, 1024]: the heads are a spatial dimension whose window meets one input at each output
    ("512,1024,1", "8,128,1024", "512,8,128", "window={size=8 pad=7_7 rhs_reversal=1}, dim_labels=bf0_0oi->b0f",
     2 * 512 * 1024 * 8 * 128),
    # a batch of 8 products [128, 512] × [512, 512]: the batch is a spatial dimension with holes
    ("8,128,512", "8,512,512", "8,128,512", "window={size=8 stride=7 lhs_dilate=8}, dim_labels=0bf_0io->0bf",
     8 * 2 * 128 * 512 * 512),
    ("512,1024", "1024,2816", "512,2816", "dim_labels=bf_io->bf", 2 * 512 * 1024 * 2816),
  ],
)  # fmt: skip
def test_flops_of_products_that_a_tpu_writes_as_convolutions(
  left: str, right: str, out: str, attributes: str, flops: int
):
  text = f"""{HEAD}ENTRY %main (l: bf16[{left}], r: bf16[{right}]) -> bf16[{out}] {{
  %l = bf16[{left}] parameter(0)
  %r = bf16[{right}] parameter(1)
  ROOT %c = bf16[{out}] convolution(%l, %r), {attributes}
}}
"""
  assert work.flops(hlo.parse(text)) == flops


@pytest.mark.parametrize(
  "written, groups",
  [
    ("{{0,1},{2,3}}", [[0, 1], [2, 3]]),
    ("[2,2]<=[4]", [[0, 1], [2, 3]]),
    ("[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
    ("{}", [[0, 1, 2, 3]]),
    ('{}, backend_config={"a":{"is_sync":true}}', [[0, 1, 2, 3]]),
    ("mesh['a'=2,'b'=2] {'a'}", [[0, 2], [1, 3]]),
    ("mesh['a'=2,'b'=2] {'a','b'}", [[0, 1, 2, 3]]),
    ("mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}", [[0, 1], [2, 3]]),
  ],
)
def test_groups_of_devices_in_each_notation(written: str, groups: list[list[int]]):
  instruction = hlo.Instruction(
    "x", "all-reduce", (), (), f", channel_id=1, replica_groups={written}, to_apply=%add", False
  )
  found = communication.groups(instruction, 4)
  assert sorted(map(sorted, found.tolist())) == groups


@pytest.mark.parametrize(
  "kind, bytes_sent",
  [
    ("all-gather", 300),  # a device's 100 bytes go to 3 others
    ("all-reduce", 150),
    ("reduce-scatter", 75),
    ("all-to-all", 75),
    ("collective-permute", 100),
  ],
)
def test_bytes_that_a_device_sends(kind: str, bytes_sent: float):
  collective = communication.Collective("it", kind, ("data",), 4, (hlo.Shape("s8", (10, 10)),), 2, "")
  assert collective.sent == bytes_sent
  assert collective.sent_in_step == 2 * bytes_sent


def test_a_collective_in_several_kernels_counts_once_and_two_on_one_channel_twice():
  """As libtpu writes them: one kernel starts it, one continues it beside a product, and one waits for it."""
  gather = "bf16[8,4] all-gather(%x), channel_id=9, replica_groups={{0,1}}, dimensions={0}"
  kernel = lambda name, end: f"%{name} (x: bf16[4,4]) -> bf16[8,4] {{\n  %x = bf16[4,4] parameter(0)\n{end}\n}}\n\n"
  called = lambda target: (
    f'  %g = {gather}\n  ROOT %c = bf16[8,4] custom-call(%g), custom_call_target="AsyncCollective{target}"'
  )
  kernels, calls = "", ""
  for n in (1, 2):
    kernels += kernel(f"begin.{n}", called("Start")) + kernel(f"async_collective_fusion.{n}", f"  ROOT %g = {gather}")
    kernels += kernel(f"wait.{n}", called("Done"))
    for name in ("begin", "async_collective_fusion", "wait"):
      calls += f"  %{name}.{n}.call = bf16[8,4] fusion(%a), kind=kCustom, calls=%{name}.{n}\n"
  text = f"{HEAD}{kernels}ENTRY %main (a: bf16[4,4]) -> bf16[8,4] {{\n  %a = bf16[4,4] parameter(0)\n{calls}}}\n"
  found = communication.collectives(hlo.parse(text), {"data": 2})
  assert [(each.kind, each.sent) for each in found] == [("all-gather", 32)] * 2


def test_a_call_on_another_core_counts():
  """As libtpu writes the collectives of a TPU7x: prepared, started and awaited."""
  text = f"""{HEAD}%add (p: f32[], q: f32[]) -> f32[] {{
  %p = f32[] parameter(0)
  %q = f32[] parameter(1)
  ROOT %s = f32[] add(%p, %q)
}}

%called (x: f32[100]) -> f32[100] {{
  %x = f32[100] parameter(0)
  ROOT %r = f32[100] all-reduce(%x), channel_id=1, replica_groups={{{{0,1}}}}, to_apply=%add
}}

ENTRY %main (a: f32[100]) -> f32[100] {{
  %a = f32[100] parameter(0)
  %ready = s32[] custom-call(), custom_call_target="PrepareAsyncCallStart"
  %rest = token[] custom-call(%ready), custom_call_target="PrepareAsyncCallDone"
  %begun = (f32[100], token[]) call-start(%a, %rest), async_execution_thread="sparsecore", to_apply=%called
  ROOT %done = f32[100] call-done(%begun)
}}
"""
  module = hlo.parse(text)
  assert [each.sent_in_step for each in communication.collectives(module, {"data": 2})] == [400]
  assert calls.unknown(module) == []
  assert 800 <= work.traffic(module) < 820  # the sum, read and written, and a few bytes more


def test_traffic_of_a_slice_is_the_slice():
  """Reading one row of a large array and writing one in place moves only these rows."""
  rows = 1000

  def program(table, i):
    return jax.lax.dynamic_update_index_in_dim(table, table[i[0].astype(int)] + 1, 0, axis=0)

  arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((rows, 64), (1,))]
  text = jax.jit(program, donate_argnums=0).lower(*arrays).compile().as_text()
  assert work.traffic(hlo.parse(text)) < 20 * 64 * 4


def test_traffic_of_a_slice_through_a_kernel_that_passes_its_operand_on():
  """As in programs for TPU7x, where each operand of a kernel passes through a kernel of its own."""
  text = f"""{HEAD}%passed (p: f32[1000,64]) -> f32[1000,64] {{
  %p = f32[1000,64] parameter(0)
  ROOT %copy = f32[1000,64] copy(%p)
}}

%kernel (table: f32[1000,64], i: s32[]) -> f32[1,64] {{
  %table = f32[1000,64] parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %whole = f32[1000,64] fusion(%table), kind=kLoop, calls=%passed
  ROOT %row = f32[1,64] dynamic-slice(%whole, %i, %zero), dynamic_slice_sizes={{1,64}}
}}

ENTRY %main (a: f32[1000,64], n: s32[]) -> f32[1,64] {{
  %a = f32[1000,64] parameter(0)
  %n = s32[] parameter(1)
  ROOT %r = f32[1,64] fusion(%a, %n), kind=kLoop, calls=%kernel
}}
"""
  assert work.traffic(hlo.parse(text)) == 2 * 64 * 4 + 4  # the row, read and written, and its number


SLICE = "s8[512]{0:S(1)}"
SLICED = f"""%sliced (a: s8[4096]) -> s8[512] {{
  %a = s8[4096] parameter(0)
  ROOT %piece = {SLICE} slice(%a), slice={{[0:512]}}
}}

"""


@pytest.mark.parametrize(
  "before, begins, ends",
  [
    ("", "slice-start(%a), slice={[0:512]}", "slice-done"),
    (SLICED, "async-start(%a), calls=%sliced", "async-done"),  # as libtpu dumps it
  ],
)
def test_traffic_of_an_asynchronous_slice_is_the_slice(before: str, begins: str, ends: str):
  """It is read from memory, and written to a memory on the chip."""
  text = f"""{HEAD}{before}ENTRY %main (a: s8[4096]) -> s8[512] {{
  %a = s8[4096] parameter(0)
  %begun = (s8[4096], {SLICE}, s32[]{{:S(2)}}) {begins}
  ROOT %done = {SLICE} {ends}(%begun)
}}
"""
  module = hlo.parse(text)
  assert work.traffic(module) == 512
  chip = Chip(flops=1.0, memory=1e9, bandwidth=1.0, link=1.0)
  assert overlap.overlap(module, {"data": 2}, {}, chip, lambda found: 0.0).kernels == 512  # seconds


def test_the_lines_of_a_kernels_metadata_belong_to_its_instruction():
  text = f"""{HEAD}ENTRY %main (a: bf16[4,256,64]) -> bf16[4,256,64] {{
  %a = bf16[4,256,64] parameter(0)
  ROOT %r = bf16[4,256,64] custom-call(%a, %a, %a), custom_call_target="tpu_custom_call", METADATA
}}
"""
  origin = "jit(step)/attention/causal/vmap(static_sparsity_splash)/splash_mha_fwd_residuals/pallas_call"
  written = f'frontend_attributes={{kernel_metadata={{\n"xprof_metadata":"{{}}"\n}}}}, metadata={{op_name="{origin}"}}'
  module = hlo.parse(text.replace("METADATA", written))
  (call,) = (one for one in module.computations["main"].values() if one.operation == "custom-call")
  assert call.op_name.endswith("pallas_call")
  assert calls.unknown(module) == []
  assert work.flops(module) == 2 * 2 * 4 * 256**2 * 64  # one block of 256 positions, of which no pair is skipped


def test_traffic_of_a_sum_is_its_operands_and_its_result():
  moved = work.traffic(compiled(lambda a, b: a + b, (256, 256), (256, 256)))
  assert moved == 3 * 256 * 256 * 4


def test_nested_tuples_are_parsed_and_an_unknown_format_is_an_error():
  tiled = "bf16[4,8]{1,0:T(8,128)(2,1)}"
  line = f"  %s = (({tiled}, {tiled}), ({tiled}, {tiled}), u32[]{{:T(128)}}) all-gather-start(%a, %b), channel_id=1\n"
  module = hlo.parse(f"{HEAD}ENTRY %main (a: f32[1]) -> f32[1] {{\n{line}}}\n")
  (start,) = module.computations["main"].values()
  assert (start.operation, len(start.shapes), start.operands) == ("all-gather-start", 5, ("a", "b"))
  with pytest.raises(ValueError, match="cannot be read"):
    hlo.parse(f"{HEAD}ENTRY %main (a: f32[1]) -> f32[1] {{\n  %x = nonsense\n}}\n")


def test_shapes_are_parsed_with_their_memory_space():
  found = hlo.shapes("(bf16[4,8]{1,0:T(8,128)(2,1)S(1)}, f32[]{:T(128)}, /*index=2*/pred[3])")
  assert found == (hlo.Shape("bf16", (4, 8), True), hlo.Shape("f32", ()), hlo.Shape("pred", (3,)))
  assert [shape.bytes for shape in found] == [64, 4, 3]
  assert np.prod(found[0].dims) == found[0].size
