"""What is taken for a workdir, and what is not: the places within a run, folders with models, and what is not seen."""

import concurrent.futures
from pathlib import Path

import pytest
from helpers import config, one_sentence

import train
from errors import ConfigError, Unavailable
from job import supervisor
from runtime import folders, workdir
from runtime.storage.bucket import Folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
  """A workdir, as far as its names."""
  found = tmp_path / "run"
  (found / "checkpoints" / "8" / "run").mkdir(parents=True)
  (found / "checkpoints" / "8" / "run" / "metadata").touch()
  (found / "config.json").touch()
  return found


@pytest.mark.parametrize(
  "inner",
  ["checkpoints", "checkpoints/8", "checkpoints/8/new", "checkpoints-1", "tensorboard/x", "previous-1", "profile"],
)
def test_what_lies_within_a_run_is_no_workdir(inner: str, run: Path, tmp_path: Path):
  source = run / "checkpoints/8" if "8" in inner else run
  parts = [f"workdir={str(run / inner)!r} lies within the run {str(run)!r}", f"--workdir={run},", f"init_from={source}"]
  with one_sentence(*parts), folders.owned(run / inner):
    pass
  (tmp_path / "link").symlink_to(run / inner)
  with one_sentence(f"lies within the run {str(run)!r}"), folders.owned(tmp_path / "link"):
    pass
  assert not (run / inner / "lock").exists()


def test_train_says_so_before_it_loads_data(run: Path):
  with one_sentence("lies within the run", "init_from="):
    train.train(config("single", simulated_devices=8), run / "checkpoints" / "8")


def test_folders_of_other_kinds_are_no_workdirs(run: Path, tmp_path: Path):
  (run / "checkpoints" / "8").rename(tmp_path / "alone")
  with one_sentence("is a checkpoint", f"--config.init_from={tmp_path}/alone"):
    workdir.check(tmp_path / "alone")
  (tmp_path / "model").mkdir()
  (tmp_path / "model" / "model.safetensors").touch()
  with one_sentence("holds a model", f"--config.init_from={tmp_path}/model"):
    workdir.check(tmp_path / "model")
  with one_sentence("lies where runs save in memory"):
    workdir.check(Path("/dev/shm/meshwright-4711/key/host"))


def test_a_users_own_folders_are_workdirs(run: Path, tmp_path: Path):
  """In and beside a run, and with names like those of a run's parts."""
  for place in (
    run,
    run / "second",
    tmp_path / "checkpoints" / "first",
    tmp_path / "previous-1",
    tmp_path / "new" / "x",
  ):
    workdir.check(place)


def test_the_same_holds_in_a_bucket(in_memory: Folder):
  (in_memory / "config.json").write(b"{}")
  (in_memory / "checkpoints/8/run/metadata").write(b"{}")
  with one_sentence(f"lies within the run '{in_memory}'", f"init_from={in_memory}/checkpoints/8"):
    workdir.check(in_memory / "checkpoints" / "8")
  workdir.check(in_memory)
  workdir.check(in_memory / "second")


def test_a_supervisor_writes_nothing_there_either(run: Path):
  policy = supervisor.Policy(1, 1, 0, 1.0, 1.0, 0.0, (), lambda *_: None)
  with one_sentence("lies within the run"):
    supervisor.supervise(policy, [f"--workdir={run / 'checkpoints' / '8'}"])
  assert [file.name for file in (run / "checkpoints" / "8").iterdir()] == ["run"]


def test_a_workdir_on_a_disk_that_is_not_mounted_is_waited_for(tmp_path: Path):
  (tmp_path / "runs").symlink_to(tmp_path / "disk")
  says = f"'{tmp_path}/runs' is a link to '{tmp_path}/disk', which is not there"
  with one_sentence("workdir=", says, kind=Unavailable):
    folders.writable(tmp_path / "runs" / "a", "workdir")


def test_three_runs_that_start_in_one_second_have_three_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(folders.time, "strftime", lambda form: "20261128-190000")
  with concurrent.futures.ThreadPoolExecutor(3) as pool:
    made = list(pool.map(folders.fresh, 3 * ["fsdp"]))
  assert sorted(map(str, made)) == [f"runs/fsdp-20261128-190000{end}" for end in ("", "-2", "-3")]
  taken: list[Path] = []
  monkeypatch.setattr(folders, "owned", taken.append)
  for _ in range(2):
    with pytest.raises((AttributeError, TypeError)):  # `owned` gives nothing to enter
      train.train(config("single", simulated_devices=8), None)
  assert len({*taken, *made}) == 5


def test_a_place_that_cannot_be_written_is_named_for_a_run_without_a_name(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
  monkeypatch.chdir(tmp_path)
  for make, why in ((Path.touch, "Not a directory"), (lambda path: path.symlink_to("disk"), "is not there")):
    make(Path("runs"))
    with pytest.raises((ConfigError, Unavailable), match=why):
      folders.writable(folders.fresh("fsdp"), "workdir")
    Path("runs").unlink()
