"""A run on a mixture: its log, its exact resume, and what happens when the mixture changes."""

from pathlib import Path

import numpy as np
import pytest
from helpers import config, measured, one_sentence

import train
from checkpointing import reading

SMALL = {
  "model__depth": 1, "model__width": 32, "model__heads": 4, "model__kv_heads": 4, "model__seq_len": 8, "steps": 12,
  "batch_size": 8, "log_every": 1, "eval_every": 6, "eval_examples": 32, "eval_batch_size": 16, "sample_length": 0,
  "simulated_devices": 8, "eval_by_position": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
  """Three small texts, by name."""
  folder = tmp_path_factory.mktemp("texts")
  for name, letter in (("code", "x"), ("prose", "y"), ("letters", "z")):
    (folder / f"{name}.txt").write_text("".join(f"{letter} = {i}\n" for i in range(150)))
  return {name: str(folder / f"{name}.txt") for name in ("code", "prose", "letters")}


def mixed(corpora: dict[str, str], weights: dict[str, float], **fields):
  return config("fsdp", data__path={corpora[name]: w for name, w in weights.items()}, **SMALL | fields)


def saved(workdir: Path, step: int) -> dict:
  return reading.read_record(workdir / reading.FOLDER / str(step))["data"]


WEIGHTS = {"code": 0.7, "prose": 0.3}


@pytest.mark.full
@pytest.mark.parametrize("packing", ["windows", "documents"])
def test_a_stopped_run_on_a_mixture_resumes_bit_for_bit(packing: str, corpora: dict[str, str], tmp_path: Path, capsys):
  train.train(mixed(corpora, WEIGHTS, data__packing=packing), tmp_path / "whole")
  lines = measured(tmp_path / "whole")
  for stop in (6, 0):
    train.train(mixed(corpora, WEIGHTS, stop_after=stop, data__threads=3, data__packing=packing), tmp_path / "parts")
  assert measured(tmp_path / "parts") == lines
  printed = capsys.readouterr().out
  last = lines[-1]
  for name, share in (("code", 0.7), ("prose", 0.3)):
    path = corpora[name]
    assert f"{path}" in printed
    assert last[f"loss/{path}"] > 0
    assert last[f"epochs/{path}"] == pytest.approx(share * 96 / lengths(corpora, name, packing), abs=1 / 50)
  assert last["loss"] == pytest.approx(0.7 * last[f"loss/{corpora['code']}"] + 0.3 * last[f"loss/{corpora['prose']}"])
  by_position = [last[f"loss_at/{position}"] for position in (1, 2, 4, 8)]
  if packing == "windows":  # all positions are equally frequent
    assert last["loss"] == pytest.approx(np.average(by_position, weights=(1, 1, 2, 4)))


def lengths(corpora: dict[str, str], name: str, packing: str = "windows") -> int:
  """How many training examples a text has."""
  from data import text

  return len(text.load(config(data__path=corpora[name], data__packing=packing, **SMALL)).parts[0].train)


@pytest.mark.full
def test_a_changed_mixture_is_refused_or_goes_on_with_honest_counts(corpora: dict[str, str], tmp_path: Path, capsys):
  train.train(mixed(corpora, WEIGHTS, stop_after=6), tmp_path)
  given = {"code": 34, "prose": 14}  # of 48: 33.6 and 14.4
  new = {"code": 1.0, "letters": 1.0}
  with one_sentence("checkpoint 6", "data.path was", "data.on_change=continue"):
    train.train(mixed(corpora, new), tmp_path)
  with one_sentence("data.path was", "0.5"):
    train.train(mixed(corpora, {"code": 0.5, "prose": 0.5}), tmp_path)
  train.train(mixed(corpora, new, data__on_change="continue"), tmp_path)
  assert "data was" in capsys.readouterr().out
  record = saved(tmp_path, 12)
  assert record["first"] == 48
  assert dict(zip(record["names"], record["given"], strict=True)) == {
    corpora["code"]: given["code"],
    corpora["letters"]: 0,
  }
  assert list(record["left"].values()) == [[given["prose"], 1]]  # the second of its size
  last = measured(tmp_path)[-1]
  assert last[f"epochs/{corpora['code']}"] == pytest.approx((34 + 24) / lengths(corpora, "code"))
