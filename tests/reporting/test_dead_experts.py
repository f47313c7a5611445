"""Experts that have no token for many steps are named once, with what to do; a single step without one is no reason."""

import dataclasses
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from helpers import config, measured, model_sizes, program

import train
from models.lora import LoraSizes
from reporting import dead_experts, report
from reporting.dead_experts import STEPS, DeadExperts
from reporting.heartbeat import Heartbeat
from reporting.journal import Journal
from reporting.metrics import Writer
from reporting.progress import Progress
from reporting.recorded import load
from reporting.speed import Clock, Meter
from training.loop import LoopState, StepPlan

DEPTH, EXPERTS = 2, 16
mixture = functools.partial(model_sizes, depth=DEPTH, experts=EXPERTS)


def loads(*idle: tuple[int, int]) -> np.ndarray:
  """One token for each expert but these, given by layer and number."""
  found = np.ones((DEPTH, EXPERTS), np.int32)
  for layer, expert in idle:
    found[layer, expert] = 0
  return found


def test_a_dead_expert_is_named_once_after_so_many_steps_in_a_row():
  experts = DeadExperts(mixture())
  for step in range(STEPS - 1):
    assert experts.after(loads((0, 5), (1, 2), (1, step % 2))) == []
  assert not experts.dead.any()
  assert experts.after(loads((1, 2))) == [
    "expert 2 of layer 1, counted from 0, had no token in the last 100 steps; raise "
    "model.router_aux=0.01, or use model.router='sigmoid_bias'"
  ]
  assert np.argwhere(experts.dead).tolist() == [[1, 2]]
  assert experts.after(loads((1, 2))) == []
  assert experts.after(loads()) == []
  assert not experts.dead.any()
  for _ in range(STEPS):
    assert experts.after(loads((1, 2))) == []  # it is known
  assert experts.dead.sum() == 1


def test_a_sentence_for_each_layer_names_the_field_that_the_router_has():
  experts = DeadExperts(mixture(router="sigmoid_bias", router_bias_rate=0.002))
  idle = loads((0, 1), (0, 7), *((1, expert) for expert in range(1, 16)))
  (one, other) = [experts.after(idle) for _ in range(STEPS)][-1]
  assert one.startswith("experts 1, 7 of layer 0, ")
  assert other.startswith("experts 1, 2, 3, 4, 5, 6, 7, 8 and 7 more of layer 1, ")
  assert one.endswith("; raise model.router_bias_rate=0.002")


def test_with_adapters_nothing_is_said_because_routers_are_not_trained():
  experts = DeadExperts(dataclasses.replace(mixture(), lora=LoraSizes(2, 4.0, ("query",))))
  assert [experts.after(loads((0, 1))) for _ in range(STEPS)] == [[]] * STEPS
  assert experts.dead.sum() == 1


def test_a_run_warns_and_its_page_names_the_expert(tmp_path: Path, capsys: pytest.CaptureFixture):
  """A skipped update counts for nothing: what is not finite chooses experts at random."""
  asked = config(steps=STEPS + 2, log_every=STEPS + 2)
  clock, plan = Clock(), StepPlan.of(asked)
  meter = Meter(clock, items=1, unit="tokens", flops=1.0, palm_flops=1.0, peak=None)
  with Writer(tmp_path, LoopState(), plan.last) as writer, Journal(tmp_path, clock, True, pytest.fail) as journal:
    heartbeat, status = Heartbeat(tmp_path, 0, clock, 0), SimpleNamespace(update=lambda *_: None)
    devices, experts = jax.devices()[:1], DeadExperts(mixture())
    progress = Progress(clock, meter, writer, journal, plan, devices, LoopState(), heartbeat, status, experts)
    for step in range(1, STEPS + 3):
      skipped = step == 3
      metrics = {"loss": np.float32(2), "skipped": np.bool_(skipped), "load": loads() if skipped else loads((1, 2))}
      progress.read(step, metrics)
      said = "expert 2 of layer 1" in capsys.readouterr().out
      assert said == (step == STEPS + 1)
  (line,) = measured(tmp_path)
  assert (line["step"], line["loss"], "load" in line) == (STEPS + 2, 2.0, False)
  found = load(tmp_path)
  assert [(event["event"], event["step"]) for event in found.events] == [("dead_experts", STEPS + 1)]
  page = report.page([found])
  assert f"step {STEPS + 1}: expert 2 of layer 1" in page
  assert "Running when this page was written" in page


def test_only_mixtures_report_loads():
  def metrics(**fields: Any) -> dict[str, jax.ShapeDtypeStruct]:
    p = dataclasses.replace(program(), sizes=model_sizes(depth=DEPTH, **fields))
    state = jax.eval_shape(lambda: p.init(jax.random.key(0)))
    return jax.eval_shape(lambda s: p.apply_gradients(s, p.no_sums(s.step), s.params), state)[1]

  dense, ours = metrics(), metrics(experts=EXPERTS)
  assert ours["load"].shape == (DEPTH, EXPERTS)
  assert {name: x.shape for name, x in dense.items() if x.shape} == {}
  assert {name for name, x in ours.items() if x.shape} == {"load"}


@pytest.mark.full
def test_a_mixture_in_training_warns_of_its_dead_experts(
  tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
  """Under devices that share experts. 64 experts of one layer have few tokens, so some have none in two steps."""
  monkeypatch.setattr(dead_experts, "STEPS", 2)
  sizes = {"depth": 1, "width": 32, "heads": 8, "kv_heads": 8, "seq_len": 8, "experts": 64, "experts_per_token": 1}
  fields = {f"model__{name}": size for name, size in sizes.items()}
  asked = {"steps": 3, "log_every": 1, "eval_examples": 16, "sample_length": 0, "data__name": "synthetic"}
  train.train(config("expert", **fields, **asked), tmp_path)
  assert "of layer 0, counted from 0, had no token in the last 2 steps" in capsys.readouterr().out
