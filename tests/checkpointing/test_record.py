"""The digest of an array depends on its bits and positions, not on its layout; and what a resumed run may change."""

import contextlib
import copy
import json
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import initial_state, one_sentence, program, strategy
from kept import make

from checkpointing import form, record
from configs import base
from reporting import source
from training.loop import LoopState


def digest(x: np.ndarray) -> int:
  return int(record._digests([jnp.asarray(x)], (np.shape(x),))[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8", "bool"])
def test_one_changed_element_changes_the_digest(dtype: str):
  x = np.arange(6 * 5 * 4).reshape(6, 5, 4) % 2
  x = x.astype(jnp.dtype(dtype))
  seen = {digest(x)}
  for place in np.ndindex(2, 5, 4):
    changed = x.copy()
    changed[place] = 1 - changed[place]
    seen.add(digest(changed))
  assert len(seen) == 41


def test_two_exchanged_elements_change_the_digest():
  x = np.arange(120, dtype=np.float32).reshape(6, 5, 4)  # the shape of the test above, whose program this uses
  for a in np.ndindex(2, 3, 4):
    for b in [(0, 0, 1), (1, 0, 0), (0, 2, 3)]:
      if a != b:
        y = x.copy()
        y[a], y[b] = x[b], x[a]
        assert digest(y) != digest(x)


def test_zero_and_negative_zero_differ():
  zeros = np.zeros((6, 5, 4), np.float32)
  assert digest(zeros) != digest(-zeros)


@pytest.mark.full
def test_the_digest_is_the_same_under_every_layout():
  p = program(model__depth=4)
  expected = record.arrays(initial_state(strategy("single", p, devices=1)))
  assert len(expected) == 3 * 12 + 2
  for name in ("data_parallel", "two_d", "three_d"):
    assert record.arrays(initial_state(strategy(name, p))) == expected
  state = initial_state(strategy("fsdp", p))
  state.params["embedding"] = state.params["embedding"].at[3, 4].add(1e-6)
  assert record.damaged(state, {"arrays": expected}) == "params/embedding"


def test_arrays_are_named_by_their_paths():
  assert [name for name, _ in record.named({"a": {"b": 1}, "c": [2, 3]})] == ["a/b", "c/0", "c/1"]


def test_padding_of_a_stored_array_is_in_neither_shape_nor_digest():
  own = np.arange(10, dtype=np.float32).reshape(5, 2)
  stored = jnp.asarray(np.pad(own, [(0, 1), (0, 3)]))
  expected = record.arrays({"w": jnp.asarray(own)})
  assert record.arrays({"w": stored}, {"w": [5, 2]}) == expected
  assert record.damaged({"w": stored}, {"arrays": expected}) is None
  assert record.damaged({"w": stored.at[4, 1].set(0.0)}, {"arrays": expected}) == "w"


def test_small_arrays_share_a_program_and_large_ones_do_not(monkeypatch: pytest.MonkeyPatch):
  arrays = {name: jnp.arange(size, dtype=jnp.float32) for name, size in (("a", 4), ("b", 4), ("c", 300), ("d", 4))}
  expected = record.arrays(arrays)
  monkeypatch.setattr(record, "GROUP", 1000)
  names = [[name for name, _ in group] for group in record._groups(record.named(arrays))]
  assert names == [["a", "b"], ["c"], ["d"]]
  assert record.arrays(arrays) == expected


def test_a_digest_moves_no_array():
  """Each device computes the digest of its shards. The only collectives are sums."""
  state = initial_state(strategy("two_d", program(model__depth=1)))
  x = state.params["embedding"]
  text = record._jitted(jax.sharding.NamedSharding(x.sharding.mesh, jax.P())).lower([x], (x.shape,)).compile().as_text()
  assert "all-reduce" in text
  for kind in ("all-gather", "all-to-all", "collective-permute"):
    assert kind not in text


def run(model: dict) -> record.Record:
  """The record of a run, as far as resuming asks for it."""
  data = {"seed": 0, "batch_size": 8, "tokenizer": "bytes", "fingerprints": [1], "turns": [1]}
  return {"version": 1, "config": {"model": model, "data": {"on_change": "refuse"}}, "data": data}


@pytest.mark.parametrize("field, value", [("loss_chunk", 64), ("saved", "attended"), ("remat", "full"), ("depth", 8)])
def test_a_resumed_run_may_change_how_the_model_is_computed_but_not_what_it_is(field: str, value: object):
  fields = {"depth": 4, "remat": "minimal", "saved": "", "loss_chunk": 0}
  with one_sentence(f"model.{field}") if field == "depth" else contextlib.nullcontext():
    record.check_same_run(run(fields), run(fields | {field: value}), "runs/a")


def test_a_run_from_before_mixers_had_names_had_attention():
  """It resumes without a note, and with another mixer it is refused by the field's name."""
  old, same, other = run({"depth": 4}), *(run({"depth": 4, "mixer": x}) for x in ("attention", "recurrence"))
  places = {"devices": 1, "processes": 1}
  record.check_same_run(old, same, "runs/a")
  assert record.changes(old | places, same | places) == []
  with one_sentence("model.mixer was 'attention' and is now 'recurrence'"):
    record.check_same_run(old, other, "runs/a")


@pytest.mark.parametrize("field, value", [("moments", "bfloat16"), ("name", "lion")])
def test_a_field_that_changes_the_arrays_of_the_optimizer_is_named(field: str, value: str):
  before, now = ({**run({}), "config": {**run({})["config"], "optimizer": {field: x}}} for x in ("before", value))
  with one_sentence(f"optimizer.{field} was 'before' and is now '{value}'", "use the same, or name another workdir"):
    record.check_same_run(before, now, "runs/a")
  record.check_same_run(before, before, "runs/a")


def test_a_longer_run_says_that_the_learning_rate_jumps():
  """Half-way through its new cosine, from the end of the old one."""
  fields = {"learning_rate": 4e-3, "warmup": 0, "final_fraction": 0.25}
  of = lambda steps, **more: (
    program(steps=steps, **{f"optimizer__{n}": x for n, x in (fields | more).items()}).optimizer
  )
  saved = WHOLE | {"config": {"steps": 100, "optimizer": fields}, "loop": WHOLE["loop"] | {"step": 100}}
  note = "the learning rate jumps from 0.001 to 0.0025, because its schedule follows steps"
  assert record.jump(saved, of(200)) == [note]
  assert record.jump(saved, of(100)) == record.jump(saved, of(100, b1=0.5)) == []
  ((both,), constant) = record.jump(saved, of(200, learning_rate=8e-3)), {"final_fraction": 1.0}
  assert both.endswith("from 0.001 to 0.005, because its schedule follows optimizer.learning_rate and steps")
  saved["config"]["optimizer"] = fields | constant
  assert record.jump(saved, of(200, **constant)) == []  # a rate that never changes
  assert record.jump(saved | {"config": {}}, of(200)) == []  # of a run that did not say
  # Runs that did not say which schedule had the cosine.
  saved["config"]["optimizer"] = fields
  found = "the learning rate jumps from 0.001 to 0.004, because its schedule follows optimizer.schedule"
  assert record.jump(saved, of(100, schedule="constant")) == [found]
  saved["config"]["optimizer"] = fields | {"schedule": "wsd", "decay_fraction": 0.5}
  assert record.jump(saved | {"loop": WHOLE["loop"] | {"step": 50}}, of(200, schedule="wsd")) == []
  saved["config"]["optimizer"] = fields | {"schedule": "mine"}
  assert record.jump(saved, of(100)) == [
    "the learning rate may jump, because optimizer.schedule was 'mine', which is not known here"
  ]


WHOLE = {
  "version": record.VERSION, "config": {"seed": 0}, "strategy": "fsdp", "devices": 2, "processes": 1, "context": 32,
  "loss": None, "arrays": {"params/w": [[2, 3], "float32", "0123abcd"]},
  "loop": {"step": 10, "evaluated": True, "skipped_in_a_row": 0, "skipped_since_line": 0},
  "data": {
    "names": [""], "fingerprints": ["a"], "turns": [1], "streams": [0], "given": [0], "left": {}, "first": 0,
    "tokenizer": "bytes", "seed": 0, "batch_size": 16,
  },
}  # fmt: skip
NEEDED = [(name,) for name in WHOLE if name not in ("version", "loss")]
NEEDED += [(part, name) for part in ("loop", "data") for name in WHOLE[part] if name != "tokenizer"]


@pytest.mark.parametrize("place", [*NEEDED, ("arrays", "params/w")], ids=".".join)
def test_a_record_with_a_value_of_another_type_is_damaged(place: tuple[str, ...]):
  changed = copy.deepcopy(WHOLE)
  assert not form.fault(changed)
  inner = changed[place[0]] if len(place) == 2 else changed
  before = inner[place[-1]]
  for wrong in (None, "x", 1.5, [[]], {"a": 1}):
    inner[place[-1]] = 1.5 if type(wrong) is type(before) else wrong
    assert form.fault(changed), wrong


def test_a_record_of_another_version_is_left_to_the_check_of_versions():
  assert not form.fault({"version": 3, "config": {"seed": 0}, "arrays": {"w": []}, "data": {"seed": 0}})
  assert form.fault([WHOLE])


def test_changes_that_make_losses_hard_to_compare_are_reported():
  before, now = copy.deepcopy(WHOLE), copy.deepcopy(WHOLE)
  before["config"] |= {"eval_examples": 80, "init_from": "", "eval_batch_size": 8}
  now["config"] |= {"eval_examples": 16, "init_from": "runs/a", "eval_batch_size": 16}
  assert record.changes(before, now) == ["eval_examples was 80 and is now 16", "init_from was '' and is now 'runs/a'"]


def records() -> tuple[dict, dict]:
  """The record of a kept checkpoint, and that of a run that resumes it."""
  with zipfile.ZipFile(make.FOLDER / "runs" / "windows" / "workdir.zip") as archive:
    (name,) = [name for name in archive.namelist() if name.endswith("/run/metadata")]
    saved = json.loads(archive.read(name))
  return saved, copy.deepcopy({name: saved[name] for name in ("version", "config", "data", "devices", "processes")})


def test_a_field_that_is_younger_than_a_record_has_meant_its_default(monkeypatch: pytest.MonkeyPatch):
  """A fork adds fields, in `model` itself, in a section within it, and beside it."""
  saved, now = records()
  now["config"]["model"] |= {"soft_cap": 0.0, "scaling": {"kind": "linear", "base": None}}
  now["config"]["optimizer"]["soft"] = 0.5
  record.check_same_run(saved, now, "here")
  assert record.changes(saved, now) == [
    "model.scaling.kind is now 'linear'; the checkpoint was saved before it was recorded",
    "newer than the checkpoint, with their defaults: model.soft_cap=0.0, model.scaling.base=None",
  ]
  given = base.get_config()
  with given.unlocked():
    given.model.update({"soft_cap": 0.0, "scaling": {"kind": "linear", "base": None}})
  monkeypatch.setattr(base, "get_config", lambda: given.copy_and_resolve_references())
  for read in (source.config_of(saved["config"], "here"), source.config_of(saved["config"], "here", source.STEP)):
    assert (read.model.soft_cap, read.model.scaling.kind, read.model.scaling.base) == (0.0, "linear", None)
    assert read.model.width == saved["config"]["model"]["width"]


def test_a_field_that_only_the_record_has_is_refused():
  """What a fork has written, and the repository that it comes from does not know. None cannot be given to it."""
  saved, now = records()
  saved["config"]["model"] |= {"soft_cap": 0.0}
  with one_sentence("here has model.soft_cap=0.0", "not a field here; use the program that wrote it"):
    record.check_same_run(saved, now, "here")
  with one_sentence("model.soft_cap", "use the program that wrote it"):
    source.config_of(saved["config"], "here")
  saved, now = records()
  saved["config"]["reporting"] = {"color": "red"}  # of no array
  record.check_same_run(saved, now, "here")


def test_a_state_of_the_loop_may_be_older_than_its_fields(monkeypatch: pytest.MonkeyPatch):
  saved, _ = records()
  del saved["loop"]["skipped_since_line"]
  assert form.fault(saved) == ""
  assert LoopState(**saved["loop"]).skipped_since_line == 0
  for wrong in ({"step": "x"}, {"evaluated": True}, {"step": 20, "paused": 3}, {"step": 20, "evaluated": -1}):
    assert form.fault(saved | {"loop": wrong}), wrong
