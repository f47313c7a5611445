"""Debugging: every step shows what its text claims, and docs/debugging.md shows what the steps print."""

import inspect
import re

import jax
import numpy as np
import pytest
from helpers import PARITY
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from lesson_pages import Shown, check_page, run_steps

from lab.analysis.hlo import parse
from lab.lessons import gathers, waiting
from lab.lessons.sent import print_origins

pytestmark = [pytest.mark.full, pytest.mark.both_stacks]


@pytest.fixture(scope="module")
def shown() -> Shown:
  return run_steps("debugging")


def test_the_page_shows_what_the_steps_print(shown: Shown):
  check_page("debugging", shown)


def test_only_explicit_axes_show_in_the_type(shown: Shown):
  data = shown["of_an_array"].data
  assert {name: str(jax.typeof(x)) for name, x in data.items()} == {
    "Explicit": "float32[8@data,16@model]", "Auto": "float32[8,16]",
  }  # fmt: skip
  assert {x.sharding.spec for x in data.values()} == {P("data", "model")}
  assert shown["of_an_array"].output.count("CPU") == 8


def test_the_compiler_tells_once_what_it_chose_for_a_value_and_for_a_gradient(shown: Shown):
  assert [sharding.spec for sharding in shown["inside_jit"].data] == [P("data", "model")]
  found = shown["of_a_gradient"].data
  assert {name: sharding.shard_shape((16, 64)) for name, sharding in found.items()} == {
    "split, value": (4, 32), "split, gradient": (4, 32), "gathered, value": (4, 32), "gathered, gradient": (4, 64),
  }  # fmt: skip


def test_a_program_shows_its_shardings_and_its_collectives(shown: Shown):
  data = shown["of_a_program"].data
  assert data["program"].output_shardings.spec == P("data")
  assert [one.kind for one in data["sent"]] == ["all-reduce"]
  assert "all-reduce(" in shown["of_a_program"].output


def test_the_lines_around_an_unexpected_gather_are_found_and_a_constraint_removes_it(shown: Shown):
  made, used = (line_of(text) for text in ("heads = ", "return jnp.tanh"))
  assert shown["a_merged_dimension"].data["origins"] == [("all-gather", made, used)]
  assert shown["a_merged_dimension"].data["output"].shard_shape((16, 8, 16)) == (4, 8, 16)
  fixed = shown["fixed"].data
  assert [(kind, used) for kind, _, used in fixed["constraint"]["origins"]] == [("all-to-all", made)]
  assert fixed["stored by heads"]["origins"] == []
  for one in fixed.values():
    assert one["output"].shard_shape((16, 8, 16)) == (4, 8, 8)


def line_of(start: str) -> str:
  """A line of `gathers.features`, as `print_origins` shows it."""
  lines, first = inspect.getsourcelines(gathers.features)
  (found,) = [i for i, line in enumerate(lines) if line.strip().startswith(start)]
  return f"gathers.py:{first + found}: {lines[found].strip()}"


def test_an_inserted_gather_has_the_metadata_of_a_neighbour():
  """Of the operation that needs the result in jax 0.10, and of the one that made the operand in jax 0.12."""
  program, _ = gathers.compiled(P(None, None, "model"))
  (name,) = [i.instruction.op_name for i in parse(program.as_text()).walk() if i.instruction.operation == "all-gather"]
  old = jax.__version_info__ < (0, 12)
  assert ("reshape" if old else "dot_general") in name


def test_a_gather_of_an_argument_names_it(capsys: pytest.CaptureFixture):
  mesh = jax.make_mesh((8,), ("data",))
  split, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
  program = jax.jit(lambda batch: batch, out_shardings=whole).lower(jax.device_put(np.zeros((8, 4)), split)).compile()
  ((kind, made, _),) = print_origins(program, mesh)
  assert (kind, made) == ("all-gather", "argument batch")
  assert "sends: all-gather over data" in capsys.readouterr().out


def test_every_cause_sends_and_what_stands_in_its_place_does_not(shown: Shown):
  names = [line.partition(":")[0] for line in shown["causes"].output.splitlines()]
  assert len(names) == 14
  for name in names:
    sent = shown["causes"].data[name.strip()]
    assert bool(sent) != name.startswith("  "), name


def test_the_warning_names_the_line_and_a_sharding_in_between_sends_pieces_only(shown: Shown):
  found = shown["one_move"].data
  (warning,) = found["at once"]["warnings"]
  assert "f32[4,16,4]" in warning
  assert re.search(r"made by: moves\.py:\d+: squares = x \* x$", warning)
  assert not found["x first"]["warnings"]
  assert {one.kind for one in found["at once"]["sent"]} == {"all-gather"}
  assert {one.kind for one in found["x first"]["sent"]} == {"all-to-all"}


def test_each_mode_of_axes_has_its_own_functions(shown: Shown):
  """What the text says; the page shows the rest."""
  auto, explicit = (shown["in_each_mode"].data[kind] for kind in ("Auto", "Explicit"))
  moves, whole = "(1, 8)", "(8, 8)"
  for text in ("jax.reshard(x, P())", "jnp.dot(x, x, out_sharding=P())"):
    assert (auto[text], explicit[text]) == (moves, whole)
  constrain = "with_sharding_constraint(x, P())"
  assert (auto[constrain], explicit[constrain]) == (whole, "AssertionError")
  assert auto["jnp.zeros((8, 8))"] == explicit["jnp.zeros((8, 8))"] == whole


def test_a_state_is_made_in_pieces_and_jit_alone_puts_moments_on_one_device(shown: Shown):
  found = shown["from_the_start"].data
  devices = {name: {len(x.sharding.device_set) for x in jax.tree.leaves(tree)} for name, tree in found.items()}
  assert devices["weights"] == devices["state"] == {8}
  assert devices["jax.jit(adam.init)(weights)"] == {1}
  for name in ("state", "adam.init(weights)"):
    for moment, weight in zip(*map(jax.tree.leaves, (found[name][0].mu, found["weights"])), strict=True):
      assert moment.sharding.is_equivalent_to(weight.sharding, weight.ndim), name
  for ours, whole in zip(*map(jax.tree.leaves, (found["weights"], found["weights of init(0)"])), strict=True):
    np.testing.assert_allclose(ours, whole, rtol=1e-6)


def test_moments_stay_in_other_pieces_than_weights(shown: Shown):
  found = shown["other_pieces"].data
  for weight, moment in zip(*map(jax.tree.leaves, (found["weights"], found["state"][0].mu)), strict=True):
    assert weight.sharding.is_fully_replicated
    assert not moment.sharding.is_fully_replicated


def test_the_causes_of_compiling_again(shown: Shown):
  """Places compile a trace again, all else traces again, and what stays the same does neither."""
  found = shown["again"].data
  same = [second for (first, second), seen in found.items() if seen == (0, 0)]
  assert same == ["step(x)", "step(x, 2.0)", "step(x, one)", "jax.jit(scale)(x)", "step(split_too)"]
  assert [second for (_, second), seen in found.items() if seen == (0, 1)] == ["step(on_device_0)", "step(split)"]
  assert set(found.values()) == {(0, 0), (0, 1), (1, 1)}


def test_values_wait_and_everything_else_does_not(shown: Shown):
  waited = [code for code, one in shown["what_waits"].data.items() if one]
  assert waited == list(waiting.CASES)[7:-1]
  assert len(waited) == 11


def test_layouts_differ_in_bfloat16_by_no_more_than_it_does_from_float32(shown: Shown):
  found = shown["between_layouts"].data
  assert 0.005 < found["single"] < 0.05
  for name in ("fsdp", "tensor_parallel"):
    wide, narrow, times = found[name]
    assert wide < PARITY < narrow / 100  # what finds a mistake in float32 is far below what is normal in bfloat16
    assert times < 1.5, name
