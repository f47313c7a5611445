"""What explain says of a jitted function of one's own, and XLA's warning with its line."""

import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from helpers import ROOT, one_sentence, program, strategy

from lab import own_program
from lab.analysis.explanation import explain
from lab.lessons import moves
from tools import explain as tool

MODULE = """
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

def step(devices):
  mesh = jax.make_mesh((4, 2), ("data", "model"), (AxisType.Auto,) * 2, devices=devices)
  place = lambda *spec: NamedSharding(mesh, P(*spec))

  def function(x):
    hidden = jnp.tanh(x)
    return jax.lax.with_sharding_constraint(hidden, place(None, ("data", "model"))) + 1

  return jax.jit(function).lower(jax.ShapeDtypeStruct((8, 16, 16), jnp.float32, sharding=place("model", None, "data")))

def nothing(devices):
  return devices

def wrong(devices):
  return devices.step
"""


@pytest.fixture(autouse=True)
def with_lines() -> Iterator[None]:
  """Programs name lines of code, which conftest.py leaves out."""
  left_out = jax.config.jax_traceback_in_locations_limit
  jax.config.update("jax_traceback_in_locations_limit", 10)
  yield
  jax.config.update("jax_traceback_in_locations_limit", left_out)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
  (tmp_path / "mine.py").write_text(MODULE)
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, "path", [*sys.path])
  yield tmp_path
  sys.modules.pop("mine", None)


def test_a_program_of_ones_own_is_explained_with_its_lines(folder: Path):
  said = own_program.explain("mine:step", jax.devices())
  assert said.startswith("mine:step, for 8 × cpu\nof a device's memory: arguments 1.02 kB, results 1.02 kB, temporary ")
  assert "sends: all-gather over data, 4 devices together: each puts in f32[4,16,4] and sends 3,072 bytes" in said
  assert "  used by: mine.py:11: return jax.lax.with_sharding_constraint(" in said
  warning = said.partition("XLA warns of ")[2].splitlines()
  assert warning[0].startswith(
    "involuntary full rematerialization: each device gathers all of an array of which it has"
  )
  assert warning[1] == "  made by: argument x"  # debugging.md has one with a line


@pytest.mark.parametrize("name", ["mine", "mine:", ":step", "nowhere:step", "mine:other", "mine:nothing"])
def test_a_name_that_leads_to_no_program_is_refused_in_a_sentence(name: str, folder: Path):
  with one_sentence(f"program={name!r}", "use MODULE:FUNCTION"):
    own_program.lowered(name, jax.devices())


def test_what_the_function_raises_has_its_traceback(folder: Path):
  with pytest.raises(AttributeError, match="'list' object has no attribute 'step'"):
    own_program.lowered("mine:wrong", jax.devices())


@pytest.mark.full
def test_explain_prints_the_warning_of_a_strategys_step(monkeypatch: pytest.MonkeyPatch):
  """No step of a strategy has one, so this compiles another program in its place."""
  runner = strategy("data_parallel", program())
  monkeypatch.setattr(runner, "lower_train_step", lambda size: moves.moved(None)[0])
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)  # XLA says it only when it compiles
  found = explain("data_parallel", runner, 16)
  assert len(found["warnings"]) == 1
  assert "\n\nXLA warns of involuntary full rematerialization: " in tool.text(found, runner)


@pytest.mark.full
def test_the_command_needs_no_config_and_repeats_the_warning(folder: Path):
  """Also if there is a compilation cache, from which XLA would say nothing."""
  cache = {"JAX_COMPILATION_CACHE_DIR": str(folder / "cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
  devices = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", "PYTHONPATH": str(ROOT)}
  for _ in range(2):
    command = [sys.executable, "-m", "tools.explain", "--program=mine:step"]
    done = subprocess.run(
      command, capture_output=True, text=True, cwd=folder, env={**cache, **devices, "HOME": str(folder)}
    )
    assert "\n  made by: argument x\n" in done.stdout.partition("XLA warns of ")[2], done.stderr


def test_without_program_the_command_needs_a_config():
  with one_sentence("config is missing"):
    tool.main(None, types.SimpleNamespace(fit=None, program=None, topology=None, network=None))
