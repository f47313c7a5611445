"""Debugging shardings: every step shows what its text claims, and docs/debugging.md shows what the steps print."""

import inspect

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from lesson_pages import Shown, check_page, run_steps

from lab.analysis.hlo import parse
from lab.lessons import gathers, origins

pytestmark = pytest.mark.full


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
  ((kind, made, _),) = origins.print_origins(program, mesh)
  assert (kind, made) == ("all-gather", "argument batch")
  assert "sends: all-gather over data" in capsys.readouterr().out


def test_without_a_pin_the_golden_page_changes_and_the_scope_leads_to_it(shown: Shown):
  data = shown["in_a_strategy"].data
  assert any(line.startswith("+ all-to-all") for line in data["changes"])
  (row,) = [row for row in data["found"]["communication"] if row["kind"] == "all-to-all"]
  assert all(scope.startswith("backward/embed/") for scope in row["scopes"])
  total = lambda mark: next(
    int(line.split()[-1].replace(",", "")) for line in data["changes"] if line.startswith(f"{mark} total")
  )
  assert total("+") < total("-")


def test_every_cause_sends_and_what_stands_in_its_place_does_not(shown: Shown):
  lines = shown["causes"].output.splitlines()
  names = [line for line in lines if not line.startswith("sends")]
  for name in names:
    sent = shown["causes"].data[name.strip()]
    assert bool(sent) != name.startswith("  "), name
