"""Runs whose workdir is in a bucket: killed, moved to other machines and hit by faults, they equal local runs."""

import json
import shutil
import signal
import time
from pathlib import Path

import pytest
from buckets import SECRET, Emulator
from helpers import config, measured
from jobs import SECONDS, TINY, Job, flags

import train
from checkpointing import reading
from checkpointing.save import NotSaved
from job.attempt import free_port
from reporting import account, metrics, recorded, source
from runtime.command_line import BAD_INPUT, FAILED
from runtime.storage.bucket import Folder, location
from runtime.storage.lease import LOCK
from tools import checkpoint, launch, report

pytestmark = pytest.mark.full
# One kind of bucket is enough for a run: what differs between kinds, test_bucket.py tests on both. Each has some runs.
one = lambda kind: pytest.mark.parametrize("bucket", [kind], indirect=True)
# Eight devices, as in test_resume.py.
RUN = TINY | {"steps": 16, "eval_every": 6, "checkpoint__every": 2, "simulated_devices": 8}
LISTS = r"^GET /(storage/v1/b/bucket/o\?|bucket/?\?)"
DATA = r"^(PUT /bucket/|POST /upload/).*checkpoints(/|%2F)\d+(/|%2F)(params|optimizer)"


class Machine:
  """A machine that reaches the bucket, with a folder of its own, which can be lost."""

  def __init__(self, bucket: Emulator, folder: Path, name: str, log: str = "log"):
    self.folder = folder / name
    self.folder.mkdir()
    self.bucket, self.log = bucket, folder / log

  def start(self, strategy: str, workdir: Folder, **fields: object) -> Job:
    return Job(strategy, str(workdir), self.log, machine=(self.bucket.environment, self.folder), **RUN | fields)

  def lose(self) -> None:
    shutil.rmtree(self.folder)


def place(bucket: Emulator, name: str) -> Folder:
  found = location(f"{bucket.url}/runs/{name}", "workdir")
  assert isinstance(found, Folder)
  return found


def losses(workdir: Path | Folder, tmp_path: Path) -> list[dict]:
  """The measurements of a run, in a bucket or not, without speeds."""
  if isinstance(workdir, Folder):
    (workdir / "metrics.jsonl").download(tmp_path / "fetched" / "metrics.jsonl")
    workdir = tmp_path / "fetched"
  return measured(workdir)


def sign_of_life(workdir: Folder) -> dict:
  """The last one of process 0 in the lock; {} if there is none."""
  data, _ = (workdir / LOCK).read()
  return json.loads(json.loads(data or b"{}").get("beat") or "{}")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """The workdir of a local run that nothing has disturbed."""
  folder = tmp_path_factory.mktemp("undisturbed")
  job = Job("fsdp", folder / "run", folder / "log", **RUN)
  assert job.wait() == 0, job.output
  return folder / "run"


@one("s3")
def test_a_killed_run_on_other_machines_equals_an_undisturbed_local_run(
  bucket: Emulator, undisturbed: Path, tmp_path: Path
):
  """Killed in mid-run and in mid-upload, each time with the loss of its machine, and with a listing that lags.

  The first machine of all is lost before a file of it is in the bucket. Still the account has all of the time.
  """
  workdir, often, begun = place(bucket, "killed"), {"runtime__heartbeat": 0.1}, time.time()
  with bucket.proxy.failing(LISTS, "stale"):
    unlucky = Machine(bucket, tmp_path, "unlucky")
    job = unlucky.start("fsdp", workdir, **often, steps=100_000, eval_every=0, checkpoint__every=0)
    job.wait_until(lambda: sign_of_life(workdir).get("step", 0) > 2, "said that it has made steps")
    job.send(signal.SIGKILL)
    job.wait()
    unlucky.lose()
    assert (workdir / recorded.JOURNAL).read()[0] is None

    first = Machine(bucket, tmp_path, "first")
    job = first.start("fsdp", workdir, **often)
    job.wait_for("checkpoint 4 saved")
    job.send(signal.SIGKILL)
    job.wait()
    first.lose()
    kept = reading.steps(workdir / reading.FOLDER)[-1]  # on a busy machine the signal may come a few steps later
    assert 4 <= kept < RUN["steps"]

    second = Machine(bucket, tmp_path, "second")
    with bucket.proxy.failing(DATA, "slow", seconds=60) as upload:
      job = second.start("fsdp", workdir, **often)
      job.wait_for(f"resumed   at step {kept}")
      job.wait_until(lambda: upload.count > 0, "began to send a checkpoint")
      time.sleep(0.2)
      job.send(signal.SIGKILL)
      job.wait()
    assert f"checkpoint {kept + 2} saved" not in job.output
    second.lose()
    assert reading.steps(workdir / reading.FOLDER)[-1] == kept

    job = Machine(bucket, tmp_path, "third").start("fsdp", workdir, **often)
    job.wait_for("results in")
    took = time.time() - begun
    assert job.wait() == 0, job.output
    assert f"resumed   at step {kept}" in job.output
  assert losses(workdir, tmp_path) == losses(undisturbed, tmp_path)
  assert reading.steps(workdir / reading.FOLDER) == reading.steps(undisturbed / reading.FOLDER)
  events = recorded.events(workdir)
  assert [event["event"] for event in events].count("killed") == 3
  assert events[-1]["event"] == "end"
  found = account.account(account.attempts(events))
  assert found.restarts == 3
  assert found.wall_time == pytest.approx(took, rel=0.01)
  assert min(found.seconds[name] for name in ("training", "repeating", "down")) > 0
  names = {name.partition("/")[0] for name in workdir.names()}
  assert {"metrics.jsonl", "journal.jsonl", "report.html", "config.json", "tensorboard", "metrics.prom"} <= names
  left = [found.name for found in (workdir / reading.FOLDER).iterdir()]
  assert sorted(left) == sorted([*map(str, reading.steps(workdir / reading.FOLDER)), reading.INDEX])


def test_no_credential_is_written_anywhere(bucket: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.chdir(tmp_path)
  workdir = place(bucket, "secrets")
  machine = Machine(bucket, tmp_path, "machine")
  with bucket.proxy.failing(DATA, 403, times=1, body=f"AccessDenied {SECRET}"):
    job = machine.start("fsdp", workdir, steps=4)
    assert job.wait() == 1, job.output
  assert "permission denied" in job.output
  assert SECRET not in job.output
  for name in workdir.names():
    assert SECRET.encode() not in (workdir / name).read_bytes(), name
  for file in tmp_path.rglob("*"):
    assert not file.is_file() or SECRET.encode() not in file.read_bytes(), file
  for given in (f"{bucket.scheme}://user:{SECRET}@bucket/run", f"{bucket.scheme}://bucket/run?sig={SECRET}"):
    job = Job("fsdp", given, tmp_path / "refused.log", **RUN)
    assert job.wait() == BAD_INPUT
    job = Job("fsdp", tmp_path / "local", tmp_path / "refused.log", data__path=given, **RUN | {"data__name": "text"})
    assert job.wait() == BAD_INPUT
  assert SECRET not in (tmp_path / "refused.log").read_text()
  for file in (tmp_path / "local").rglob("*"):
    assert not file.is_file() or SECRET.encode() not in file.read_bytes(), file


@one("gs")
def test_a_checkpoint_in_a_bucket_resumes_under_another_strategy_and_tools_read_it(
  bucket: Emulator, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
  monkeypatch.chdir(tmp_path)
  workdir = place(bucket, "strategies")
  train.train(config("fsdp", **RUN, stop_after=8), str(workdir))
  shutil.rmtree("runs")
  train.train(config("two_d", **RUN), str(workdir))
  assert "resumed   at step 8, saved by fsdp" in capsys.readouterr().out
  ours, reference = (
    {(line["split"], line["step"]): line["loss"] for line in losses(one, tmp_path)} for one in (workdir, undisturbed)
  )
  ours.pop(("validation", 8))  # of the run that stopped there
  assert ours == pytest.approx(reference, rel=1e-5)
  shutil.rmtree("runs")

  found = [checkpoint.verify(one) for one in checkpoint.find(workdir)]
  assert [one.step for one in found] == reading.steps(workdir / reading.FOLDER)
  assert all("arrays verified" in one.health for one in found)
  assert report.opened(workdir).step == 16
  assert source.open_model(str(workdir)).config.model.depth == 1
  train.train(config("fsdp", **RUN | {"steps": 1}, init_from=str(workdir)), tmp_path / "next")
  assert "step 16, saved by two_d" in capsys.readouterr().out


@one("s3")
def test_two_processes_send_one_checkpoint(bucket: Emulator, undisturbed: Path, tmp_path: Path, monkeypatch, capfd):
  """They share no folder for checkpoints. One process resumes what the two have sent, and the other way round."""
  monkeypatch.chdir(tmp_path)
  workdir = place(bucket, "processes")
  train.train(config("fsdp", **RUN, stop_after=4), str(workdir))
  shutil.rmtree("runs")
  fields = RUN | {"simulated_devices": 0, "stop_after": 10}
  with bucket.proxy.failing(r"^P.*process_1", "slow", seconds=1.0):  # process 0 must wait for the other's part
    assert launch.launch(2, 4, flags("fsdp", workdir, **fields)) == 0
  assert "resumed   at step 4" in capfd.readouterr().out
  assert {"checkpoints", "checkpoints-1"} <= {
    found.name for found in Path("runs", *str(workdir).split("://")).iterdir()
  }
  shutil.rmtree("runs")
  train.train(config("fsdp", **RUN), str(workdir))
  assert "resumed   at step 10" in capfd.readouterr().out
  ours, reference = (
    {(line["split"], line["step"]): line["loss"] for line in losses(one, tmp_path)} for one in (workdir, undisturbed)
  )
  for step in (4, 10):
    ours.pop(("validation", step))
  assert ours == pytest.approx(reference, rel=1e-5)


@one("gs")
def test_a_process_on_another_machine_sends_its_trace_and_its_sign_of_life(bucket: Emulator, tmp_path: Path):
  workdir, port = place(bucket, "machines"), free_port()
  fields = {"simulated_devices": 4, "steps": 100_000, "eval_every": 4, "checkpoint__every": 0, "profile__steps": 2}
  fields |= {"distributed__coordinator": f"127.0.0.1:{port}", "distributed__processes": 2}
  jobs = [
    Machine(bucket, tmp_path, f"machine-{rank}", f"log-{rank}").start(
      "fsdp", workdir, **fields, distributed__process=rank
    )
    for rank in (0, 1)
  ]
  expected = {f"profile/plugins/profile/steps-10-11/process-{rank}.xplane.pb" for rank in (0, 1)}
  signs = {f"heartbeats/{rank}.json" for rank in (0, 1)}
  jobs[0].wait_until(lambda: expected | signs <= set(workdir.names()), "had all of its files in the bucket")
  jobs[1].send(signal.SIGTERM)
  assert [job.wait() for job in jobs] == [0, 0], jobs[1].output
  names = set(workdir.names())
  assert expected <= names
  assert not signs & names


@one("gs")
@pytest.mark.parametrize("how, reason", [(507, "quota is used up"), (403, "permission denied")])
def test_training_continues_if_a_checkpoint_cannot_be_sent(
  bucket: Emulator, undisturbed: Path, impatient: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd,
  how: int, reason: str,
):  # fmt: skip
  monkeypatch.chdir(tmp_path)
  workdir = place(bucket, f"refused-{how}")
  of_four = DATA.replace(r"\d+", "4")
  with bucket.proxy.failing(of_four, how), pytest.raises(NotSaved, match="steps 4 could not be written to"):
    train.train(config("fsdp", **RUN), str(workdir))
  said = capfd.readouterr()
  assert f"checkpoint 4 in {workdir / reading.FOLDER} could not be written" in said.err
  assert reason in said.err
  assert "checkpoint 2 stays" in said.err
  assert "checkpoint 6 saved" in said.out
  assert losses(workdir, tmp_path) == losses(undisturbed, tmp_path)


@one("gs")
def test_faults_that_pass_change_nothing(
  bucket: Emulator, undisturbed: Path, impatient: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
):
  monkeypatch.chdir(tmp_path)
  workdir, proxy = place(bucket, "faults"), bucket.proxy
  with (
    proxy.failing(DATA, 500, times=3), proxy.failing(DATA, "reset", times=3), proxy.failing(DATA, "slow", 3, 1.0),
    proxy.failing(r"metrics", 503, times=2), proxy.failing(r"index", 429, times=2),
  ):  # fmt: skip
    train.train(config("fsdp", **RUN), str(workdir))
  assert "error" not in capfd.readouterr().err
  assert losses(workdir, tmp_path) == losses(undisturbed, tmp_path)


@one("s3")
def test_a_damaged_checkpoint_is_set_aside(bucket: Emulator, undisturbed: Path, tmp_path: Path, monkeypatch, capfd):
  monkeypatch.chdir(tmp_path)
  workdir = place(bucket, "damaged")
  train.train(config("fsdp", **RUN, stop_after=8), str(workdir))
  folder = workdir / reading.FOLDER
  (name, *_) = [name for name in (folder / "8" / "params").names() if "/d/" in name]
  (folder / "8" / "params" / name).unlink()
  train.train(config("fsdp", **RUN), str(workdir))
  said = capfd.readouterr()
  assert "was renamed to damaged-8-1; resuming from checkpoint 6" in said.err
  assert "resumed   at step 6" in said.out
  assert losses(workdir, tmp_path) == losses(undisturbed, tmp_path)
  assert (folder / "damaged-8-1").is_dir()


def test_storage_that_fails_at_the_start_ends_the_run_with_one_sentence(bucket: Emulator, tmp_path: Path):
  machine = Machine(bucket, tmp_path, "machine")
  job = machine.start("fsdp", location(f"{bucket.scheme}://not-there/run", "workdir"))
  assert job.wait() == BAD_INPUT
  assert "there is no such bucket" in job.output
  with bucket.proxy.failing(".", 401):
    job = machine.start("fsdp", place(bucket, "expired"))
    assert job.wait() == BAD_INPUT
  assert "the credentials are missing or have expired" in job.output
  assert "Traceback" not in job.output


def test_a_second_job_is_refused(bucket: Emulator, tmp_path: Path):
  workdir = place(bucket, "twice")
  job = Machine(bucket, tmp_path, "first").start("fsdp", workdir, steps=1000)
  job.wait_for("checkpoint 2 saved")
  for machine in (Machine(bucket, tmp_path, "second"),):
    other = Job("fsdp", str(workdir), tmp_path / "other.log", machine=(bucket.environment, machine.folder), **RUN)
    assert other.wait() == FAILED
    assert "in use by another run" in other.output
  job.send(signal.SIGTERM)
  assert job.wait() == 0


OTHER = {"held": True, "owner": "process 7 on other since 2026-01-01 00:00:00", "home": "other", "count": 1}


def test_a_run_that_another_one_replaces_ends_with_one_sentence(bucket: Emulator, tmp_path: Path):
  """As after a machine had no network for a while, so that another one has taken over."""
  workdir = place(bucket, "replaced")
  job = Machine(bucket, tmp_path, "first").start("fsdp", workdir, steps=100_000, eval_every=0)
  job.wait_for("checkpoint 2 saved")
  (workdir / LOCK).write(json.dumps(OTHER).encode())
  began = time.monotonic()
  assert job.wait() == BAD_INPUT
  assert time.monotonic() - began < SECONDS / 4  # and not at the end of the training
  (line,) = [line for line in job.output.splitlines() if "error" in line or "Traceback" in line]
  assert line == (
    f"error: workdir={str(workdir)!r} was taken over by another run ({OTHER['owner']}), so this run ends and saves "
    "nothing more; let that one go on, or end it and run this command again"
  )
  assert json.loads((workdir / LOCK).read_bytes()) == OTHER


@one("s3")
def test_data_of_a_bucket_is_that_of_a_folder(bucket: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  """It is read once; an object that has changed is read again."""
  monkeypatch.chdir(tmp_path)
  local, remote = tmp_path / "texts", place(bucket, "texts")
  local.mkdir()
  for i in range(30):
    (local / f"{i}.txt").write_text(f"text {i} " * 200)
  (local / "lines.jsonl").write_text("".join(json.dumps({"text": f"line {i}" * 30}) + "\n" for i in range(50)))
  remote.upload(local, sorted(file.name for file in local.iterdir()))
  fields = RUN | {"data__name": "text", "steps": 2, "eval_every": 0, "data__cache_dir": str(tmp_path / "cache")}
  of_text = fields | {"data__form": "text"}  # the folder holds rows, too
  train.train(config("fsdp", **of_text, data__path=str(local)), tmp_path / "of-folder")
  train.train(config("fsdp", **of_text, data__path=str(remote)), tmp_path / "of-bucket")
  assert losses(tmp_path / "of-bucket", tmp_path) == losses(tmp_path / "of-folder", tmp_path)
  before = len(bucket.proxy.requests)
  train.train(config("fsdp", **of_text, data__path=str(remote)), tmp_path / "again")
  assert len(bucket.proxy.requests) - before <= 31 + 2  # asks for the generations only
  (remote / "3.txt").write(b"another text " * 300)
  train.train(config("fsdp", **of_text, data__path=str(remote)), tmp_path / "changed")
  assert losses(tmp_path / "changed", tmp_path) != losses(tmp_path / "of-bucket", tmp_path)
  train.train(config("fsdp", **fields, data__path=str(remote / "lines.jsonl")), tmp_path / "one-object")
  assert metrics.read(tmp_path / "one-object" / "metrics.jsonl")
