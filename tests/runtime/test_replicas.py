"""Copies of the state on several devices: a flipped bit is found, named by its device, and healed or ends the run."""

import inspect
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import ROOT, config, initial_state, measured, program, strategy
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jobs import TINY, flags

import strategies
import train
from checkpointing import reading, record
from reporting import recorded
from runtime import digests, replicas
from runtime.replicas import Corrupted, Difference, Replicas, compare
from tools import launch


def flipped(x: jax.Array, device: int, place: int = 0, bit: int = 12) -> jax.Array:
  """The array with one bit flipped in what one device of the mesh holds, which may be of another process."""
  pieces = []
  for shard in x.addressable_shards:
    host = np.array(shard.data)
    if shard.device == x.sharding.mesh.devices.flat[device]:
      host.reshape(-1).view(np.uint8)[place * host.itemsize + bit // 8] ^= 1 << bit % 8
    pieces.append(jax.device_put(host, shard.device))
  return jax.make_array_from_single_device_arrays(x.shape, x.sharding, pieces)


@pytest.fixture(scope="module")
def state() -> dict[str, jax.Array]:
  """Arrays of several dtypes on 2 × 4 devices: held by all, by each row of devices, by each column, and once."""
  mesh, random = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b")), np.random.default_rng(0)
  put = lambda x, dtype, *spec: jax.device_put(x.astype(dtype), NamedSharding(mesh, P(*spec)))
  return {
    "key": jax.random.wrap_key_data(put(np.array([1, 2]), np.uint32)),
    "flags": put(random.standard_normal(5) > 0, bool),
    "of_column": put(random.integers(0, 99, (3, 8)), jnp.int32, None, "b"),
    "of_row": put(random.standard_normal((6, 4)), jnp.bfloat16, "a"),
    "once": put(random.standard_normal((8, 2)), jnp.float32, ("a", "b")),
    "whole": put(random.standard_normal((3, 5)), jnp.float32),
  }


class Told(list):
  """Replicas of a state, and what they have told."""

  def __init__(self, state: dict[str, Any], every: int = 1):
    note = lambda step, pieces: self.extend((step, *piece.values()) for piece in pieces)
    self.replicas = Replicas(record.named(state), every, self.append, note)
    self.check = self.replicas.check


def refused(state: Any, after: int = 1, start: Any = None, every: int = 1) -> str:
  """The message with which a run ends that finds this state after a step; `start` is its state at step 0."""
  told = Told(state, every)
  if start is not None:
    told.check(start, 0)
  with pytest.raises(Corrupted) as caught:
    told.check(state, after)
  assert "\n" not in str(caught.value)
  assert not told
  return str(caught.value)


def test_the_majority_says_which_device_is_wrong():
  columns = np.array([[0, 2, 4], [1, 3, 5]])
  equal = np.full((6, 2), 7)
  assert compare([columns, columns], equal) == []
  digests = equal.copy()
  digests[3, 1] = 8
  assert compare([columns, columns], digests) == [Difference(1, (3,), 1)]
  digests[0, 0], digests[1, 1] = 6, 5
  assert compare([columns, columns], digests) == [Difference(0, (0,), 2), Difference(1, (1, 3, 5), None)]
  assert compare([np.array([[0, 1]])], np.array([[1], [2]])) == [Difference(0, (0, 1), None)]
  assert compare([np.array([[0, 1, 2, 3]])], np.array([[1], [2], [1], [2]])) == [Difference(0, (0, 1, 2, 3), None)]


@pytest.mark.parametrize("place, bit", [(0, 0), (7, 31), (14, 12)])
def test_a_flipped_bit_is_found_and_named_by_device(state: dict, place: int, bit: int):
  wrong = state | {"whole": flipped(state["whole"], device=5, place=place, bit=bit)}
  assert "whole on device 5 (process 0);" in refused(wrong)
  assert "flags on device 7 (process 0);" in refused(state | {"flags": flipped(state["flags"], 7, bit=0)})
  assert "of_row on device 6 (process 0);" in refused(
    state | {"of_row": flipped(state["of_row"], 6, place % 12, bit // 2)}
  )


def test_changes_in_two_places_are_found(state: dict):
  """Signs, of which a sum of bits with odd weights sees nothing, and two values that change places."""
  signs = flipped(flipped(state["whole"], 2, place=1, bit=31), 2, place=8, bit=31)
  assert "whole on device 2 (" in refused(state | {"whole": signs})
  exchanged = []
  for shard in state["whole"].addressable_shards:
    host = np.array(shard.data)
    if shard.device.id == 3:
      host[0, 1], host[2, 4] = host[2, 4], host[0, 1]
    exchanged.append(jax.device_put(host, shard.device))
  wrong = jax.make_array_from_single_device_arrays((3, 5), state["whole"].sharding, exchanged)
  assert "whole on device 3 (" in refused(state | {"whole": wrong})


def test_two_copies_differ_and_neither_is_said_to_be_right(state: dict):
  message = refused(state | {"of_column": flipped(state["of_column"], 1)}, start=state)
  assert "of_column on device 1 (process 0) and device 5 (process 0); no majority says which" in message
  assert message.endswith("the same command goes on from the last checkpoint")


def test_what_is_held_once_is_not_compared(state: dict):
  told = Told(state)
  told.check(state | {"once": flipped(state["once"], 3)}, 1)
  assert not told


def test_a_difference_of_the_last_step_is_healed(state: dict):
  """Each device has the bits of the others again. Devices that hold another piece keep theirs."""
  told, right = Told(state), state["of_row"]
  told.check(state, 0)
  for step, device in ((1, 6), (2, 3)):
    healed = told.check(state | {"of_row": flipped(right, device, place=2)}, step)
    line, event = told[-2:]
    assert line.startswith(f"healed    after step {step}: of_row on device {device} (process 0) had other bits")
    assert event == (step, "of_row", device, 0)
    for mine, expected in zip(healed["of_row"].addressable_shards, right.addressable_shards, strict=True):
      assert np.array(mine.data).tobytes() == np.array(expected.data).tobytes()
    assert healed["whole"] is state["whole"]
  with pytest.raises(Corrupted, match="device 3 was healed after step 2 before, so leave it out"):
    told.check(state | {"of_row": flipped(right, 3)}, 3)


def test_an_older_difference_ends_the_run(state: dict):
  """Wrong gradients may have changed all copies since, and a majority says nothing about that."""
  message = refused(state | {"whole": flipped(state["whole"], 5)}, after=4, start=state, every=4)
  assert "whole on device 5 (process 0); they were last equal after step 0, so wrong gradients" in message


def test_a_check_sends_nothing_and_copies_nothing():
  mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
  specs = (P(), P("a"), P(None, "b"))
  shapes = [jax.ShapeDtypeStruct((4096, 4096), jnp.float32, sharding=NamedSharding(mesh, spec)) for spec in specs]
  program = replicas._digests(mesh, specs).lower(*shapes).compile()
  assert not re.search("all-|collective|reduce-scatter", program.as_text())
  memory = program.memory_analysis()
  assert memory.temp_size_in_bytes + memory.output_size_in_bytes < 0.01 * memory.argument_size_in_bytes


def test_copies_are_compared_by_steps_and_before_each_save(state: dict):
  due = Told(state, every=3).replicas.due
  assert [step for step in range(8) if due(step, saves=False)] == [0, 3, 6]
  assert due(4, saves=True)
  assert not Told(state, every=0).replicas.due(3, saves=True)
  assert Told(state, every=0).replicas.lines == []


@pytest.mark.parametrize(
  "name, fields, said",
  [
    ("data_parallel", {}, ": 38 of 38 arrays, 100.0% of the state"),
    ("zero1", {}, ": 20 of 38 arrays, 33.5% of the state; what only one device holds cannot be compared"),
    ("fsdp", {}, ": 11 of 38 arrays, 0.3% of the state; what only one device holds"),
    ("single", {}, "nothing is held twice, so runtime.check_every=2 compares nothing"),
    ("data_parallel", {"optimizer__on_host": True}, "% of the state; what is in the host's memory is not compared"),
  ],
)
def test_a_run_says_what_is_compared(name: str, fields: dict, said: str):
  runner = strategy(name, program(**fields))
  (line,) = Told(runner.abstract_state(), every=2).replicas.lines
  assert said in line


@pytest.mark.full
@pytest.mark.parametrize(
  "name, array, where, end",
  [
    ("data_parallel", "opt_state/0/mu/blocks/mlp/up", "device 5 (process 0)", "never been equal in this run"),
    ("pmap_ddp", "params/head", "device 5 (process 0)", "never been equal in this run"),
    ("hsdp", "params/blocks/attention/query", "device 1 (process 0) and device 5 (process 0)", "no majority"),
    ("two_d", "params/blocks/mlp_norm/scale", "device 5 (process 0)", "never been equal in this run"),
    ("pipeline", "params/embedding", "device 5 (process 0)", "never been equal in this run"),
  ],
)
def test_a_flipped_bit_is_found_under_every_kind_of_strategy(name: str, array: str, where: str, end: str):
  runner = strategy(name, program(model__depth=8), pipeline__microbatches=4)
  state = initial_state(runner)
  Told(state).check(state, 0)
  names, leaves = zip(*record.named(state), strict=True)
  leaves = [flipped(x, 5) if each == array else x for each, x in zip(names, leaves, strict=True)]
  message = refused(jax.tree.unflatten(jax.tree.structure(state), leaves))
  assert f"differ: {array} on {where}; " in message
  assert end in message


@pytest.mark.full
def test_the_digest_by_rows_is_the_digest():
  """For arrays of which a row, a row of a row, or all is hashed at a time. A changed element changes it."""
  random = np.random.default_rng(0)
  for shape in ((3, 300, 300), (70_000, 2), (8, 90_000), (7,), ()):
    x = random.standard_normal(shape).astype(np.float32)
    found = int(jax.jit(digests.digest_by_rows)(x))
    assert found == int(jax.jit(digests.digest)(x))
    changed = x.copy()
    changed[(-1,) * x.ndim] += 1
    assert found != int(jax.jit(digests.digest_by_rows)(changed))


RUN = TINY | {"steps": 10}
FLIP = f"""
import jax
import numpy as np
from strategies import Strategy

{inspect.getsource(flipped)}
def disturb(step, device, array):
  def train_step(self, state, batch, before=Strategy.train_step):
    state, metrics = before(self, state, batch)
    if int(state.step) == step:
      state.params[array] = flipped(state.params[array], device, bit=22)
    return state, metrics

  Strategy.train_step = train_step
"""


def disturb(monkeypatch: pytest.MonkeyPatch, *where: Any) -> None:
  """Flips a bit after a step of each run from now on: step, device, parameter."""
  monkeypatch.setattr(strategies.Strategy, "train_step", strategies.Strategy.train_step)  # to be restored
  defined: dict[str, Any] = {}
  exec(FLIP, defined)
  defined["disturb"](*where)


@pytest.mark.full
def test_a_healed_run_equals_an_undisturbed_one(
  tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
  """Bit for bit, if the bit flips after the step's last use of the weight. Without a check the losses are others."""
  train.train(config("data_parallel", **RUN), tmp_path / "whole")
  capfd.readouterr()
  disturb(monkeypatch, 6, 3, "head")
  train.train(config("data_parallel", **RUN, runtime__check_every=1), tmp_path / "healed")
  output = capfd.readouterr().out
  assert "replicas  compared every step: 38 of 38 arrays" in output
  assert "healed    after step 6: params/head on device 3 (process 0) had other bits than most copies" in output
  assert measured(tmp_path / "healed") == measured(tmp_path / "whole")
  (event,) = (e for e in recorded.events(tmp_path / "healed") if e["event"] == "healed")
  assert event["step"] == 6
  assert event["pieces"] == [{"array": "params/head", "device": 3, "process": 0}]
  train.train(config("data_parallel", **RUN), tmp_path / "unchecked")
  assert measured(tmp_path / "unchecked") != measured(tmp_path / "whole")


@pytest.mark.full
def test_a_run_that_cannot_be_healed_saves_nothing_wrong_and_goes_on_from_its_checkpoint(
  tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
  """The bit flips before a save, which is when the copies are compared. The joined metrics are the undisturbed ones."""
  train.train(config("hsdp", **RUN), tmp_path / "whole")
  checked = config("hsdp", **RUN, runtime__check_every=100)
  with monkeypatch.context() as patch:
    disturb(patch, 7, 6, "head")
    with pytest.raises(SystemExit) as ended:
      train.main(checked, tmp_path / "run")
  assert ended.value.code == 1
  message = capfd.readouterr().err.splitlines()[-1]
  assert "error: after step 8, copies of the state differ: params/head on device 2 (process 0) and device 6" in message
  assert reading.steps(tmp_path / "run" / "checkpoints") == [4]
  train.main(checked, tmp_path / "run")
  assert "resumed   at step 4" in capfd.readouterr().out
  assert measured(tmp_path / "run") == measured(tmp_path / "whole")


@pytest.mark.full
def test_processes_compare_and_heal_each_others_copies(tmp_path: Path, capfd: pytest.CaptureFixture):
  """A device of process 1 is wrong. Its bits come from process 0, or both processes end with the same sentence."""
  script, fields = tmp_path / "script.py", RUN | {"runtime__check_every": 1}
  run = f"import runpy, sys\nrunpy.run_path({str(ROOT / 'train.py')!r}, run_name='__main__')\n"
  script.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{FLIP}\ndisturb(6, 3, 'head')\n{run}")
  train.train(config("data_parallel", **RUN), tmp_path / "whole")
  capfd.readouterr()
  assert launch.launch(2, 2, flags("data_parallel", tmp_path / "run", **fields), script) == 0
  healed = r"\[0\] healed    after step 6: params/head on device \d+ \(process 1\) had other bits"
  assert re.search(healed, capfd.readouterr().out)
  for mine, expected in zip(measured(tmp_path / "run"), measured(tmp_path / "whole"), strict=True):
    assert mine.pop("split") == expected.pop("split")
    assert mine == pytest.approx(expected, rel=1e-5)
  assert launch.launch(2, 2, flags("hsdp", tmp_path / "pair", **fields), script) == 1
  output, pair = capfd.readouterr().out, r"on device \d+ \(process 0\) and device \d+ \(process 1\); no majority"
  for rank in range(2):
    assert re.search(rf"\[{rank}\] error: after step 6, .*: params/head {pair}", output)
