"""The benchmark of writing texts: its turns and figures, and what our side writes."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers import one_sentence

from lab.benchmarks import generation, generation_worker
from lab.benchmarks.peer_generation import timed


def case(ours: list[float], dynamic: list[float], static: list[float], equal: int) -> dict[str, Any]:
  """A case in which prefill takes ten times as long as a token."""
  sides = {"ours": ours, "dynamic": dynamic, "static": static}
  seconds = {side: [{"prefill": 10 * t, "decode": t} for t in times] for side, times in sides.items()}
  return {"equal": equal, "difference": 2e-6, "seconds": seconds}


RECORD = {
  "command": "python -m tools.benchmark generation", "machine": "a machine", "versions": {"python": "3"}, "load": 0.5,
  "date": "2030-01-31",
  "prompt": 256, "shorter": 8, "length": 64, "models": {"10 M": {"parameters": 10_600_000}},
  "cases": {
    "10 M/1": case([0.001, 0.002, 0.003], [0.002, 0.004, 0.003], [0.009, 0.009, 0.001], equal=1),
    "10 M/8": case([0.002, 0.002, 0.002], [0.006, 0.006, 0.006], [0.002, 0.003, 0.002], equal=7),
  },
}  # fmt: skip


def test_the_table_shows_medians_and_ratios_within_rounds():
  """The peer's faster cache counts: the dynamic one for a text, with ratios 2, 2 and 1; for 8 texts the static one."""
  text = generation.tables(RECORD)["speed"]
  assert "| 10 M | 1 | prefill | 20.0 ms | 30.0 ms | dynamic | 2.00 (1.00–2.00) |" in text
  assert "| 10 M | 8 | each further token | 2.0 ms | 2.0 ms | static | 1.00 (1.00–1.50) |" in text
  assert "Missed: 10 M, 8 texts, prefill: 1.00; 10 M, 8 texts, each further token: 1.00." in text
  assert "the same tokens in 8 of 9 texts, and their first logits differ by at most 2e-06" in text


def test_the_first_token_is_prefill_and_the_others_are_decode():
  assert timed(1.0, [3.0, 4.0, 7.0]) == {"prefill": 2.0, "decode": 2.0}


class Side:
  """Answers like a process that writes texts, and counts its requests."""

  def __init__(self, logits: list[float]):
    self.logits, self.asked = logits, list[dict[str, Any]]()

  def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
    self.asked.append(request)
    return {
      "make": {"parameters": 7},
      "logits": {"logits": self.logits, "versions": {"torch": "2"}},
      "write": {"tokens": [[1]] * len(request.get("prompts", ())), "prefill": 0.1, "decode": 0.01},
    }[request["task"]]


def test_both_sides_write_the_same_prompts_in_turn(tmp_path: Path):
  ours, theirs = Side([1.0, 2.0]), Side([1.0, 2.0])
  record = generation.measure(2, ours, theirs, tmp_path, lambda line: None)
  assert record["versions"]["torch"] == "2"
  assert [len(turns) for found in record["cases"].values() for turns in found["seconds"].values()] == [2] * 12
  assert [found["equal"] for found in record["cases"].values()] == [1, 8, 1, 8]
  given = [[r["prompts"] for r in side.asked if r["task"] == "write"] for side in (ours, theirs)]
  for prompts in given[0]:
    # Once to compile, and twice in each of two rounds; the peer with each of its caches.
    assert given[1].count(prompts) == 2 * given[0].count(prompts) == 2 * 5
    assert [len(prompt) for prompt in prompts] == [256 - 8 * row for row in range(len(prompts))]


def test_sides_with_different_models_get_one_sentence(tmp_path: Path):
  with one_sentence("first logits differ by 5e-01", "different models"):
    generation.measure(1, Side([1.0, 1.0]), Side([1.0, 2.0]), tmp_path, lambda line: None)


def test_a_process_that_fails_gets_one_sentence():
  with one_sentence("'nowhere/python' cannot be started"), generation.process(["nowhere/python"]):
    pass
  with generation.process(["false"]) as ask, one_sentence("write", "exit status 1"):
    ask({"task": "write"})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
  monkeypatch.setattr(generation_worker, "start_jax", lambda config: jax.devices())  # keeps the cache of conftest.py
  sizes = {"width": 32, "depth": 2, "heads": 4, "kv_heads": 2, "mlp_width": 48, "vocab_size": 64}
  made = generation_worker.make({"model": sizes, "folder": str(tmp_path / "model")})
  assert made["parameters"] == 2 * (32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32) + 2 * 64 * 32 + 32
  return str(tmp_path / "model")


@pytest.mark.full
def test_our_side_writes_the_most_likely_tokens(folder: str):
  """Each token is the one with the largest logit after all tokens before it."""
  request = {"folder": folder, "prompts": [[5, 9, 2, 7], [3, 8]], "length": 5}
  written = generation_worker.write(request)
  assert set(written) == {"prefill", "decode", "tokens"}
  for prompt, text in zip(request["prompts"], written["tokens"], strict=True):
    for step, token in enumerate(text):
      found = generation_worker.logits({"folder": folder, "prompts": [prompt + text[:step]], "length": 1})["logits"]
      assert int(np.argmax(found)) == token
