"""Which collectives kernels hide: small programs with times that are computed by hand.

A product here takes 2 seconds, and gathering `x`, `y` or `z` takes 1, 3 or 10.
"""

from collections.abc import Mapping

import pytest
from helpers import program, strategy

from lab.analysis import hlo, overlap, spans
from lab.analysis.compiled import compile_step
from lab.analysis.overlap import Overlap
from runtime.hardware import Chip

CHIP = Chip(flops=1e3, memory=1e9, bandwidth=1e12, link=100.0)  # memory traffic takes next to no time
PRODUCT = "f32[10,10] dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
GROUP = "channel_id=1, replica_groups={{0,1}}"
SIZES = {"x": 25, "y": 75, "z": 250}
PARAMETERS = "  %a = f32[10,10] parameter(0)\n" + "".join(
  f"  %{name} = f32[{size}] parameter({number})\n" for number, (name, size) in enumerate(SIZES.items(), 1)
)
PASSED = "(f32[10,10], f32[25], f32[75], f32[250])"
EVERYTHING = f"%everything = {PASSED} tuple(%a, %x, %y, %z)"
SCALAR = """%add (p: f32[], q: f32[]) -> f32[] {
  %p = f32[] parameter(0)
  %q = f32[] parameter(1)
  ROOT %s = f32[] add(%p, %q)
}

"""


def product(name: str) -> str:
  return f"%{name} = {PRODUCT}"


def gather(of: str) -> str:
  return f"%gather.{of} = f32[{2 * SIZES[of]}] all-gather(%{of}), {GROUP}, dimensions={{0}}"


def start(of: str) -> str:
  return f"%start.{of} = (f32[{SIZES[of]}], f32[{2 * SIZES[of]}]) all-gather-start(%{of}), {GROUP}, dimensions={{0}}"


def done(of: str) -> str:
  return f"%done.{of} = f32[{2 * SIZES[of]}] all-gather-done(%start.{of})"


def computation(name: str, *lines: str) -> str:
  """A computation that a loop can run: it takes a tuple with all arrays and returns one."""
  names = "".join(
    f"  %{array} = f32[{size}] get-tuple-element(%given), index={index}\n"
    for index, (array, size) in enumerate({"a": "10,10", **SIZES}.items())
  )
  body = "".join(f"  {line}\n" for line in lines)
  given = f"  %given = {PASSED} parameter(0)\n"
  return f"%{name} (given: {PASSED}) -> {PASSED} {{\n{given}{names}{body}  ROOT {EVERYTHING}\n}}\n\n"


def loop(body: str, trips: int | None, scope: str = "") -> list[str]:
  """A loop over a computation. Without `trips` only its scope says how often it runs."""
  noted = f', backend_config={{"known_trip_count":{{"n":"{trips}"}}}}' if trips is not None else ""
  what = f'condition=%condition, body=%{body}, metadata={{op_name="jit(f)/{scope}/while"}}'
  return [
    EVERYTHING.replace("everything", f"into.{body}"),
    f"%while.{body} = {PASSED} while(%into.{body}), {what}{noted}",
  ]


CONDITION = f"""%condition (given: {PASSED}) -> pred[] {{
  %given = {PASSED} parameter(0)
  %n = s32[] constant(1)
  ROOT %less = pred[] compare(%n, %n), direction=LT
}}

"""


def follow(*lines: str, before: str = "", rounds: Mapping[str, int] | None = None, chip: Chip = CHIP) -> Overlap:
  """Follows a program of two devices that runs these instructions. Computations come before it."""
  body = "".join(f"  {line}\n" for line in lines)
  text = (
    f"HloModule m\n\n{before}ENTRY %main (a: f32[10,10]) -> {PASSED} {{\n{PARAMETERS}{body}  ROOT {EVERYTHING}\n}}\n"
  )
  found = overlap.overlap(hlo.parse(text), {"data": 2}, rounds or {}, chip, lambda found: found.sent / chip.link)
  noted_in_full(found)
  return found


def noted_in_full(found: Overlap) -> None:
  """The spans, and what pictures make of them, take the seconds that the overlap gives. No test is without it."""
  drawn = spans.panels(found)
  for kind, whole in (("kernel", found.kernels), ("sent", found.sent), ("exposed", found.exposed)):
    noted = sum(span.times * (span.end - span.begin) for span in found.spans if span.kind == kind)
    assert noted == pytest.approx(whole)
    assert spans.seconds(drawn, kind) == pytest.approx(whole)


def times(found: Overlap) -> dict[str, tuple[float, float]]:
  """How long each collective is sent and exposed, to a microsecond."""
  return {one.collective.name.split(".")[-1]: (round(one.sent, 6), round(one.exposed, 6)) for one in found.collectives}


def test_a_collective_that_nothing_runs_beside_is_exposed():
  found = follow(product("p"), gather("y"), product("q"))
  assert times(found) == {"y": (3, 3)}
  assert found.kernels == pytest.approx(4)
  assert (found.sent, found.exposed, found.collectives[0].hidden) == (3, 3, 0)


@pytest.mark.parametrize("of, sent, exposed", [("x", 1, 0), ("y", 3, 1), ("z", 10, 8)])
def test_the_kernels_between_start_and_end_hide_a_collective(of: str, sent: float, exposed: float):
  """Those before and after it do not."""
  found = follow(product("p"), start(of), product("q"), done(of), product("r"))
  assert times(found) == {of: (sent, exposed)}
  assert found.kernels == pytest.approx(6)
  assert found.collectives[0].hidden == pytest.approx(sent - exposed)


def test_a_kernel_takes_as_long_as_its_memory_traffic_if_that_is_longer():
  """It reads 400 bytes twice and writes 400, which takes 4 seconds at 300 bytes/s."""
  slow = Chip(flops=1e3, memory=1e9, bandwidth=300.0, link=100.0)
  assert times(follow(start("z"), product("p"), done("z"), chip=slow)) == {"z": (10, 6)}


@pytest.mark.parametrize(
  "lines, expected",
  [
    # 0-3 y, 3-4 x. The product ends at 2, so y is exposed from 2 to 3; another product hides x.
    ([start("y"), start("x"), product("p"), done("y"), product("q"), done("x")], {"y": (3, 1), "x": (1, 0)}),
    ([start("y"), start("x"), product("p"), done("y"), done("x")], {"y": (3, 1), "x": (1, 1)}),
    # waiting for the second of them waits for the first one too
    ([start("y"), start("x"), product("p"), done("x"), done("y")], {"y": (3, 1), "x": (1, 1)}),
    # so does one that runs by itself
    ([start("y"), product("p"), gather("x"), product("q"), done("y")], {"y": (3, 1), "x": (1, 1)}),
    # links that were free do not make up for it: x is sent from 2 to 3
    ([product("p"), start("x"), done("x"), start("y"), product("q"), done("y")], {"x": (1, 1), "y": (3, 1)}),
  ],
)
def test_collectives_are_sent_one_after_another(lines: list[str], expected: dict):
  assert times(follow(*lines)) == expected


def test_a_loop_multiplies_the_times_of_its_body():
  body = computation("body", start("y"), product("p"), done("y"))
  found = follow(gather("x"), *loop("body", 5), before=CONDITION + body)
  assert times(found) == {"x": (1, 1), "y": (5 * 3, 5 * 1)}
  assert found.kernels == pytest.approx(5 * 2)


def test_a_loop_is_one_span_of_the_step_and_its_first_round_is_noted():
  body = computation("body", start("y"), product("p"), done("y"))
  step, loop_ = spans.panels(follow(gather("x"), *loop("body", 5, "forward"), product("q"), before=CONDITION + body))
  of = lambda panel: [(kind, begin / 1e6, end / 1e6, times) for kind, begin, end, times, _ in panel["spans"]]
  assert (step["name"], step["times"], step["length"]) == ("step", 1, 18e6)
  assert of(step) == [("kernel", 16, 18, 1), ("sent", 0, 1, 1), ("exposed", 0, 1, 1), ("loop", 1, 16, 5)]
  assert (loop_["name"], loop_["times"], loop_["length"]) == ("forward", 5, 3e6)
  assert of(loop_) == [("kernel", 0, 2, 5), ("sent", 0, 3, 5), ("exposed", 2, 3, 5)]
  assert loop_["spans"][1][4] == "all-gather over data, 300 B"


def test_neighbours_are_joined_if_they_are_the_same_or_short():
  """1,000 kernels of 2 seconds become one span: all have the name of their instruction."""
  step = spans.panels(follow(*(product(f"p.{i}") for i in range(1000)), gather("y")))[0]
  assert [(kind, end - begin) for kind, begin, end, *_ in step["spans"]] == [
    ("kernel", 2000e6), ("sent", 3e6), ("exposed", 3e6),
  ]  # fmt: skip


def test_nested_loops_multiply():
  inner = computation("inner", start("y"), product("p"), done("y"))
  outer = computation("outer", gather("x"), *loop("inner", 4))
  found = follow(*loop("outer", 3), before=CONDITION + inner + outer)
  assert times(found) == {"x": (3, 3), "y": (12 * 3, 12 * 1)}
  assert found.kernels == pytest.approx(12 * 2)


def test_the_rounds_of_an_unknown_loop_are_given_by_its_scope():
  body = computation("body", gather("x"), product("p"))
  following = lambda rounds: follow(*loop("body", None, "units"), before=CONDITION + body, rounds=rounds)
  assert times(following({"units": 7})) == {"x": (7, 7)}
  assert following({"units": 7}).kernels == pytest.approx(14)
  assert times(following({"others": 7})) == {}


def test_a_loop_hides_what_was_started_before_it():
  """Three rounds of 2 seconds hide 6 of 10."""
  body = computation("body", product("p"))
  assert times(follow(start("z"), *loop("body", 3), done("z"), before=CONDITION + body)) == {"z": (10, 4)}


def test_what_was_started_before_a_loop_frees_the_links_when_it_has_been_sent():
  """z from 0 to 10, of which 4 seconds after the loop; then x by itself."""
  body = computation("body", product("p"))
  lines = [start("z"), *loop("body", 3), done("z"), gather("x")]
  assert times(follow(*lines, before=CONDITION + body)) == {"z": (10, 4), "x": (1, 1)}


def test_only_the_first_round_waits_for_what_was_started_before_the_loop():
  """z from 0 to 10, of which a product hides 2 seconds; then x in each of five rounds."""
  body = computation("body", gather("x"))
  lines = [start("z"), product("p"), *loop("body", 5), done("z")]
  assert times(follow(*lines, before=CONDITION + body)) == {"z": (10, 8), "x": (5, 5)}


def test_calls_and_every_branch_of_a_conditional_run():
  called = computation("called", start("y"), product("p"), done("y"))
  other = computation("other", gather("x"))
  lines = [
    EVERYTHING.replace("everything", "into"),
    f"%call.1 = {PASSED} call(%into), to_apply=%called",
    f"%call.2 = {PASSED} call(%into), to_apply=%called",
    "%i = s32[] constant(0)",
    f"%either = {PASSED} conditional(%i, %into, %into), branch_computations={{%called, %other}}",
  ]
  assert times(follow(*lines, before=called + other)) == {"y": (3 * 3, 3 * 1), "x": (1, 1)}


def test_groups_of_single_devices_send_nothing():
  alone = gather("z").replace("{{0,1}}", "{{0},{1}}")
  assert follow(alone, product("p")).collectives == ()


BUFFERS = "(f32[75], f32[150], s32[2], u32[])"


def libtpu(*beside: str) -> Overlap:
  """A gather of `y` in pieces, as libtpu writes it: one kernel starts it, others run beside it, and one waits.

  All kernels hold the same gather, and hand on its buffers.
  """
  inside = f'%gather = f32[150] all-gather(%from), {GROUP}, dimensions={{0}}, frontend_attributes={{chain_id="0"}}'
  parameters = ["%from = f32[75] parameter(0)", "%to = f32[150] parameter(1)"]
  parameters += ["%sync = s32[2] parameter(2)", "%flag = u32[] parameter(3)"]
  kernel = lambda name, result, *lines: (
    f"%{name} (from: f32[75]) -> {result} {{\n" + "".join(f"  {line}\n" for line in lines) + "}\n\n"
  )
  called = lambda what, result, *operands: (
    f'ROOT %c = {result} custom-call({", ".join(operands)}), custom_call_target="AsyncCollective{what}"'
  )
  kernels = kernel("begin", BUFFERS, parameters[0], inside, called("Start", BUFFERS, "%from", "%gather"))
  kernels += kernel("wait", "f32[150]", *parameters, inside, called("Done", "f32[150]", "%from", "%to", "%gather"))
  lines = [f"%started = {BUFFERS} fusion(%y), kind=kCustom, calls=%begin"]
  last, first = "started", 0
  for number, name in enumerate(beside):
    result = "(f32[10,10], f32[75], f32[150], f32[150], s32[2], u32[])"
    root = f"ROOT %t = {result} tuple(%p, %from, %to, %gather, %sync, %flag)"
    kernels += kernel(name, result, *parameters, "%a = f32[10,10] parameter(4)", product("p"), inside, root)
    lines += passed(last, first, number)
    operands = ", ".join(f"%of.{number}.{i}" for i in range(4))
    lines.append(f"%beside.{number} = {result} fusion({operands}, %a), kind=kOutput, calls=%{name}")
    last, first = f"beside.{number}", 1
  lines += passed(last, first, len(beside))
  operands = ", ".join(f"%of.{len(beside)}.{i}" for i in range(4))
  return follow(*lines, f"%ended = f32[150] fusion({operands}), kind=kCustom, calls=%wait", before=kernels)


def passed(last: str, first: int, number: int) -> list[str]:
  """The buffers of a gather, taken from the kernel that handed them on."""
  skipped = [first, first + 1, *(2 * first + i for i in (2, 3))]  # a kernel beside it also returns the gather itself
  types = ("f32[75]", "f32[150]", "s32[2]", "u32[]")
  return [
    f"%of.{number}.{i} = {kind} get-tuple-element(%{last}), index={index}"
    for i, (kind, index) in enumerate(zip(types, skipped, strict=True))
  ]


@pytest.mark.parametrize("beside, exposed", [(0, 3), (1, 1), (2, 0)])
def test_kernels_of_libtpu_beside_a_collective_hide_it(beside: int, exposed: float):
  found = libtpu(*(f"async_collective_fusion.{number}" for number in range(beside)))
  assert times(found) == {"gather": (3, exposed)}
  assert found.kernels == pytest.approx(2 * beside)


def test_a_kernel_of_libtpu_that_reduces_and_slices_runs_by_itself():
  """An all-reduce fused with a slice of its result is a reduce-scatter: half of 300 bytes, and nothing beside it."""
  kernel = f"""{SCALAR}%all-reduce-scatter.1 (from: f32[75]) -> f32[38] {{
  %from = f32[75] parameter(0)
  %sum = f32[75] all-reduce(%from), {GROUP}, to_apply=%add
  ROOT %mine = f32[38] slice(%sum), slice={{[0:38]}}
}}

"""
  scatter = "%scattered = f32[38] fusion(%y), kind=kCustom, calls=%all-reduce-scatter.1"
  found = follow(start("x"), scatter, product("p"), done("x"), before=kernel)
  assert times(found) == {"x": (1, 1), "sum": (1.5, 1.5)}
  assert [one.collective.kind for one in found.collectives] == ["all-gather", "reduce-scatter"]


def test_a_kernel_that_is_started_apart_hides_a_collective():
  """As XLA:GPU of jax 0.12 writes it. What awaits the kernel does not wait for the links."""
  kernel = f"%product (a: f32[10,10]) -> f32[10,10] {{\n  %a = f32[10,10] parameter(0)\n  ROOT %p = {PRODUCT}\n}}\n\n"
  begun = "%fusion-start = ((f32[10,10]), f32[10,10], u32[]) fusion-start(%a), kind=kLoop, calls=%product"
  ended = "%fusion-done = f32[10,10] fusion-done(%fusion-start)"
  for lines in ([start("y"), begun, ended, done("y")], [begun, start("y"), ended, product("q"), done("y")]):
    found = follow(*lines, before=kernel)
    assert times(found) == {"y": (3, 1)}


def test_several_arrays_in_one_collective_of_a_gpu_take_as_long_as_each_by_itself():
  begun = f"%start.xy = ((f32[25], f32[75]), (f32[50], f32[150])) all-gather-start(%x, %y), {GROUP}, dimensions={{0}}"
  ended = "%done.xy = (f32[50], f32[150]) all-gather-done(%start.xy)"
  assert times(follow(begun, product("p"), ended)) == {"xy": (4, 2)}


def test_a_collective_that_the_gpu_compiler_marks_as_synchronous_is_exposed():
  """XLA:GPU of jax 0.10 sends it on the stream of the kernels, even if they stand between its start and end."""
  begun = start("y") + ', backend_config={"collective_backend_config":{"is_sync":true}}'
  assert times(follow(begun, product("p"), done("y"))) == {"y": (3, 3)}


def test_a_collective_on_a_core_of_its_own_is_hidden_until_it_is_awaited():
  """As libtpu writes those of a TPU7x. An all-reduce of 300 bytes sends 300."""
  called = f"""{SCALAR}%called (from: f32[75]) -> f32[75] {{
  %from = f32[75] parameter(0)
  ROOT %sum = f32[75] all-reduce(%from), {GROUP}, to_apply=%add
}}

"""
  begun = '%begun = (f32[75], token[]) call-start(%y), async_execution_thread="sparsecore", to_apply=%called'
  found = follow(begun, product("p"), "%ended = f32[75] call-done(%begun)", before=called)
  assert times(found) == {"sum": (3, 1)}


def test_copies_that_are_started_and_awaited_wait_for_no_collective():
  copies = ["%copied = (f32[25], f32[25], u32[]) copy-start(%x)", "%copy = f32[25] copy-done(%copied)"]
  assert times(follow(start("z"), *copies, product("p"), done("z"))) == {"z": (10, 8)}


@pytest.mark.full
@pytest.mark.parametrize("name", ["fsdp", "pipeline"])
def test_the_links_send_the_bytes_of_all_collectives_of_a_step(name: str):
  """Loops count as often as `communication.collectives` counts them. XLA:CPU hides nothing."""
  step = compile_step(strategy(name, program()), 16)
  found = overlap.overlap(step.module, step.mesh, step.rounds, CHIP, lambda found: found.sent / CHIP.link)
  assert found.sent > 0
  assert found.sent * CHIP.link == pytest.approx(sum(one.sent_in_step for one in step.collectives()))
  assert found.exposed == pytest.approx(found.sent)
  assert found.kernels * CHIP.flops == pytest.approx(step.flops(), rel=1e-3)
