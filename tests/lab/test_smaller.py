"""What fewer processes run if the given config does not fit them: the same strategy, or else plan's best."""

import json
from pathlib import Path

import pytest
from jobs import flags

from lab import smaller


def chosen(workdir: Path, processes: int, devices: int = 1, strategy: str = "tensor_parallel", **fields: object):
  """The fields that are added for so many processes, and the choice in words."""
  found = smaller.choose(flags(strategy, workdir, **fields), workdir, processes, devices)
  return found and (dict(flag.removeprefix("--config.").split("=") for flag in found[0]), found[1])


def test_the_same_strategy_comes_first_on_another_mesh(tmp_path: Path):
  """Meshes that the user gave do not fit two devices. Batches of 24 split over them, and 8 heads."""
  fields, why = chosen(tmp_path, 2, batch_size=24, mesh__model=4)
  assert fields["strategy"] == "tensor_parallel"
  assert fields["mesh.model"] == "2"
  assert why.startswith("tensor_parallel on mesh model=2 is the best of")
  fields, _ = chosen(tmp_path, 3, 2, "two_d", batch_size=24, model__width=96, mesh__data=2, mesh__model=4)
  assert (fields["strategy"], fields["mesh.data"], fields["mesh.model"]) == ("two_d", "3", "2")


def test_only_then_comes_another_one(tmp_path: Path):
  """Three devices divide neither 8 heads nor a width of 32, but batches of 24. The mesh of before is given up."""
  fields, why = chosen(tmp_path, 3, batch_size=24, mesh__model=4, eval_batch_size=32)
  assert (fields["strategy"], fields["mesh.data"], fields["mesh.model"]) == ("data_parallel", "3", "1")
  assert fields["eval_batch_size"] == "33"
  assert why.startswith("tensor_parallel splits this model and batch over no mesh of 3 devices, and data_parallel on")


def test_none_is_chosen_if_none_fits(tmp_path: Path):
  assert chosen(tmp_path, 3, batch_size=1) is None
  assert smaller.choose(["--workdir=x"], tmp_path, 3, 1) is None


@pytest.mark.parametrize(
  "found", [{"model": []}, {"model": {"vocab_size": "x"}}, {"steps": 0, "model": {"vocab_size": 9}}]
)
def test_a_config_that_no_run_has_written_says_nothing(found: dict[str, object], tmp_path: Path):
  (tmp_path / "config.json").write_text(json.dumps(found))
  assert smaller.config_of(flags("fsdp", tmp_path, model__vocab_size=0), tmp_path).model.vocab_size != 9


def test_the_devices_and_the_sizes_are_those_of_the_job(tmp_path: Path):
  """Those of its last start: 12 GPUs of 4 processes, of which each has the memory for its part of the state."""
  start = {"event": "start", "step": 0, "devices": "12 × NVIDIA L4 in 4 processes"}
  (tmp_path / "journal.jsonl").write_text(json.dumps(start) + "\n")
  (tmp_path / "config.json").write_text(json.dumps({"model": {"vocab_size": 100}}))
  sizes = {"batch_size": 72, "model__width": 3072, "model__depth": 48, "model__heads": 24, "model__kv_heads": 24}
  where = smaller._machine(tmp_path, 3, 3)
  assert (where.count, where.chip.memory) == (9, 0.9 * 22.03 * 2**30)
  assert smaller.config_of(flags("fsdp", tmp_path, model__vocab_size=0), tmp_path).model.vocab_size == 100
  fields, _ = chosen(tmp_path, 3, 3, "data_parallel", **sizes)
  assert fields["strategy"] != "data_parallel"  # 16 bytes a parameter do not fit


@pytest.mark.parametrize("processes", [2, 3])
def test_what_is_chosen_is_a_config_of_train(processes: int, tmp_path: Path):
  """The flags are added to those of the user and have the last word."""
  arguments = flags("tensor_parallel", tmp_path, batch_size=24, mesh__model=4)
  found = smaller.choose(arguments, tmp_path, processes, 1)
  config = smaller.config_of([*arguments, *found[0]], tmp_path)
  assert config.batch_size == 24
  assert config.mesh.model == (2 if processes == 2 else 1)
