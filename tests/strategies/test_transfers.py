"""What a layout makes move, beside what the papers of the strategies say, and in words."""

import dataclasses

import pytest

import strategies
from strategies.execution.transfers import Transfers

# Short names of the fields of `Transfers` that hold mesh axes: a small letter for each part, a capital for once a step.
FIELDS = {
  "g": "gathered_each_part", "G": "gathered_once", "s": "scattered_each_part", "S": "scattered_once",
  "r": "reduced_each_part", "R": "reduced_once", "new": "gathered_updated", "hand": "by_hand",
}  # fmt: skip
DATA, BOTH, STAGED = ("data",), ("data", "context"), ("stage", "data")
ONE, HAND, PARTS, STEP = {}, {"by_hand": True}, {"parts": 4}, {"parts": 4, "gather": "step"}


@pytest.mark.parametrize(
  "name, mesh, asked, moves",
  [
    ("single", {}, PARTS, {}),
    ("tensor_parallel", {"model": 8}, PARTS, {}),  # activations move, and no weight or gradient
    # Data parallelism all-reduces gradients: with several parts once, since sums can wait.
    ("data_parallel", {"data": 8}, ONE, {"r": DATA}),
    ("data_parallel", {"data": 8}, HAND, {"R": DATA, "hand": DATA}),
    ("data_parallel", {"data": 8}, PARTS, {"R": DATA, "hand": DATA}),
    ("data_parallel", {"data": 8}, {"parts": 2}, {"R": DATA, "hand": DATA}),
    ("data_parallel", {"data": 8}, {"gather": "step"}, {"r": DATA}),  # nothing to save with a single part
    ("data_parallel", {"data": 1}, PARTS, {}),
    # ZeRO-1 and 2 scatter gradients and gather new weights. Only ZeRO-2 scatters after each part.
    ("zero1", {"data": 8}, ONE, {"s": DATA, "new": DATA}),
    ("zero1", {"data": 8}, PARTS, {"S": DATA, "new": DATA, "hand": DATA}),
    ("zero2", {"data": 8}, PARTS, {"s": DATA, "new": DATA}),
    ("zero2", {"data": 8}, HAND, {"s": DATA, "new": DATA}),  # no gradient is smaller than its weight by hand
    ("zero2", {"data": 8}, STEP, {"S": DATA, "new": DATA, "hand": DATA}),
    # FSDP gathers weights and scatters gradients for each part, or if asked to once.
    ("fsdp", {"data": 8}, ONE, {"g": DATA, "s": DATA}),
    ("fsdp", {"data": 8}, HAND, {"g": DATA, "s": DATA, "hand": DATA}),
    ("fsdp", {"data": 8}, PARTS, {"g": DATA, "s": DATA}),
    ("fsdp", {"data": 8}, {"gather": "step"}, {"g": DATA, "s": DATA}),
    ("fsdp", {"data": 8}, STEP, {"G": DATA, "S": DATA, "hand": DATA}),
    # HSDP also all-reduces the pieces over replicas, which can wait.
    ("hsdp", {"replica": 2, "data": 4}, ONE, {"g": DATA, "s": DATA, "r": ("replica",)}),
    ("hsdp", {"replica": 2, "data": 4}, PARTS, {"g": DATA, "s": DATA, "R": ("replica",), "hand": ("replica", "data")}),
    ("hsdp", {"replica": 2, "data": 4}, STEP, {"G": DATA, "S": DATA, "R": ("replica",), "hand": ("replica", "data")}),
    # Devices that share positions or experts always sum by hand.
    ("context", {"context": 8}, ONE, {"R": ("context",), "hand": ("context",)}),
    ("expert", {"expert": 8}, ONE, {"R": ("expert",), "hand": ("expert",)}),
    (
      "long_context", {"replica": 2, "data": 2, "context": 2}, ONE,
      {"g": BOTH, "s": BOTH, "R": ("replica",), "hand": ("replica", *BOTH)},
    ),
    ("long_context", {"data": 2, "context": 4}, STEP, {"G": BOTH, "S": BOTH, "hand": BOTH}),
    # A pipeline waits in any case. Its stages hold other weights, and send activations.
    ("pipeline", {"stage": 4, "data": 2}, ONE, {"R": DATA, "hand": STAGED}),
    ("pipeline", {"stage": 1, "data": 8}, ONE, {"r": DATA}),
    ("three_d", {"stage": 2, "data": 2, "model": 2}, PARTS, {"G": DATA, "S": DATA, "hand": STAGED}),
  ],
)  # fmt: skip
def test_a_layout_moves_what_its_strategy_is_known_for(name: str, mesh: dict, asked: dict, moves: dict):
  transfers = Transfers.of(strategies.layout_of(name).on(**mesh), **asked)
  assert {short: axes for short, field in FIELDS.items() if (axes := getattr(transfers, field))} == moves
  assert (transfers.parts, transfers.gather) == (asked.get("parts", 1), asked.get("gather", "part"))


def test_zero1_beside_hsdp_scatters_the_rest_of_its_state_once():
  """Each part scatters to the pieces of weights, and the end of the step to those of the state, which are finer."""
  layout = strategies.layout_of("hsdp").on(replica=2, data=4).place(state=("data", "replica"))
  once = dataclasses.asdict(Transfers.of(layout, parts=4))
  assert once["scattered_each_part"] == DATA
  assert once["scattered_once"] == ("replica",)
  assert once["reduced_once"] == once["reduced_each_part"] == ()
  assert once["gathered_updated"] == ("replica",)


def test_transfers_are_described_without_axes_of_one_device():
  layout = strategies.layout_of("hsdp").on(replica=2, data=4)
  assert Transfers.of(layout).described(layout.mesh) == [
    "weights gathered for each part of the batch over data",
    "gradients scattered after each part of the batch over data",
    "gradients all-reduced after each part of the batch over replica",
  ]
  layout = strategies.layout_of("long_context").on(replica=1, data=2, context=4)
  assert Transfers.of(layout, parts=4, gather="step").described(layout.mesh) == [
    "weights gathered once a step over data × context",
    "gradients scattered once a step over data × context",
    "sent by hand, not by the compiler, over data × context",
  ]
  alone = strategies.layout_of("fsdp").on(data=1)
  assert Transfers.of(alone).described(alone.mesh) == []
