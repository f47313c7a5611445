"""Objects of a bucket are put, read, listed and removed, and each kind of failure becomes one sentence."""

import errno
import functools
import time

import pytest
from buckets import SECRET, Emulator

from errors import Unavailable
from runtime.storage import bucket as settings
from runtime.storage import lease as leases
from runtime.storage import mirror as mirrors
from runtime.storage.answers import StorageError
from runtime.storage.bucket import Folder, location
from runtime.storage.lease import LOCK, Lease
from runtime.storage.mirror import INDEX
from runtime.workdir import HOLDS, MEMORY, of_process

pytestmark = pytest.mark.full
Mirror = functools.partial(mirrors.Mirror, holds=HOLDS)
WRITES = r"^(PUT /bucket/\S|POST /upload/)"


@pytest.fixture
def folder(bucket: Emulator, request: pytest.FixtureRequest) -> Folder:
  found = location(f"{bucket.url}/{request.node.originalname}", "workdir")
  assert isinstance(found, Folder)
  return found


def test_objects_are_put_read_listed_and_removed(folder, tmp_path, monkeypatch):
  assert folder.names() == []
  assert not folder.exists()
  (folder / "a" / "x").write(b"1")
  (folder / "a" / "y z").write(b"22")
  (folder / "b").write(b"")
  assert folder.names() == ["a/x", "a/y z", "b"]
  assert [found.name for found in folder.iterdir()] == ["a", "b"]
  assert (folder / "a").is_dir()
  assert (folder / "a" / "y z").read_text() == "22"
  assert (folder / "b").read_bytes() == b""
  with pytest.raises(FileNotFoundError):
    (folder / "c").read_bytes()
  (folder / "a").rename(folder / "damaged-a-1")
  assert folder.names() == ["b", "damaged-a-1/x", "damaged-a-1/y z"]
  folder.remove()
  assert folder.names() == []


def test_files_go_there_and_back_also_large_ones(folder, tmp_path, monkeypatch):
  monkeypatch.setattr(settings, "PIECE", 1000)
  contents = {"empty": b"", "small": b"x" * 10, "piece": b"y" * 1000, "below/large": bytes(range(250)) * 17}
  for name, content in contents.items():
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(content)
  folder.upload(tmp_path, contents)
  for name, content in contents.items():
    (folder / name).download(tmp_path / "back" / name)
    assert (tmp_path / "back" / name).read_bytes() == content
  assert None not in folder.generations(contents)
  assert folder.generations(["none"]) == [None]


def test_an_object_is_changed_only_if_it_is_as_it_was_read(folder):
  thing = folder / "thing"
  nothing, missing = thing.read()
  assert nothing is None
  first = thing.write(b"1", only_if=missing)
  assert first
  assert thing.write(b"2", only_if=missing) is None
  second = thing.write(b"2", only_if=first)
  assert second
  assert second != first
  assert thing.write(b"3", only_if=first) is None
  assert thing.read() == (b"2", second)


@pytest.mark.parametrize(
  "how, body, reason",
  [
    (401, "", "the credentials are missing or have expired"),
    (403, "AccessDenied", "permission denied"),
    (403, "quotaExceeded", "the bucket's quota is used up"),
    (507, "", "the bucket's quota is used up"),
    (429, "", "asked for fewer requests"),
    (500, "", "storage failed"),
    ("reset", "", "storage cannot be reached, or the connection broke"),
    ("silent", "", "did not answer within 2 s"),
  ],
)
def test_each_fault_ends_in_one_sentence(bucket, folder, impatient, how, body, reason):
  with bucket.proxy.failing(WRITES, how, body=f"{body} {SECRET}"), pytest.raises(StorageError) as error:
    (folder / "a").write(b"x" * 1000)
  assert reason in str(error.value)
  assert str(error.value).startswith(f"{folder}/a: ")
  assert "\n" not in str(error.value)
  assert error.value.__context__ is None  # which would be shown, with all that the server answered
  assert not (folder / "a").exists()


@pytest.mark.parametrize("how", [500, 503, 429, "reset"])
def test_a_fault_that_passes_is_not_noticed(bucket, folder, how):
  with bucket.proxy.failing(WRITES, how, times=2) as fault:
    (folder / "a").write(b"x" * 1000)
  assert fault.count == 2
  assert (folder / "a").read_bytes() == b"x" * 1000


def test_a_bucket_that_is_not_there_is_named(bucket, folder):
  other = location(f"{bucket.scheme}://not-there/run", "workdir")
  with pytest.raises(StorageError, match="there is no such bucket") as error:
    (other / "a").write(b"1")
  assert str(other) in str(error.value)


def lease(folder: Folder, home: str) -> Lease:
  return Lease(folder, home, f"process of {home}", lambda line: None)


def test_a_second_run_on_another_machine_is_refused(folder, monkeypatch):
  monkeypatch.setattr(leases, "RENEW", 0.05)
  with lease(folder, "one") as first:
    first.brought()
    with pytest.raises(Unavailable, match=r"in use by another run .process of one."):
      lease(folder, "two").__enter__()
  with lease(folder, "two") as second:
    assert second.before == "one"


def test_a_run_goes_on_at_once_on_the_machine_of_the_killed_one(folder):
  killed = lease(folder, "one")
  killed._take()
  killed.brought()
  start = time.monotonic()
  with lease(folder, "one") as second:
    assert second.before == "one"
  assert time.monotonic() - start < leases.PATIENCE / 2


def test_another_machine_waits_for_a_killed_run_and_takes_over(folder, monkeypatch):
  killed = lease(folder, "one")
  killed._take()
  monkeypatch.setattr(leases, "PATIENCE", 1.0)
  with lease(folder, "two"):
    killed._renew()
    with pytest.raises(StorageError, match=r"was taken over by another run .process of two., so this run ends"):
      killed.check()


def test_only_one_of_two_runs_gets_the_lock(folder):
  first, second = lease(folder, "one"), lease(folder, "two")
  generation, _ = first._look()
  second._generation = generation
  first._take()
  assert not second._write(held=True)


def test_an_answer_that_was_lost_is_no_second_run(bucket, folder):
  with lease(folder, "one") as held:
    # The object is written, and the answer is lost: the second try finds another generation.
    with bucket.proxy.failing(WRITES, "lost", times=1) as fault:
      held._renew()
    assert fault.count == 1
    held.check()


def test_small_files_are_copied_and_come_back(folder, tmp_path):
  first, second = tmp_path / "first", tmp_path / "second"
  for local in (first, second):
    (local / "heartbeats").mkdir(parents=True)
  with lease(folder, "one") as held, Mirror(first, folder, held, pytest.fail) as mirror:
    (first / "metrics.jsonl").write_text("1\n")
    (first / "checkpoints").mkdir()
    (first / "checkpoints" / "x").write_text("not small")
    mirror.push()
    (first / "previous-1").mkdir()
    (first / "metrics.jsonl").rename(first / "previous-1" / "metrics.jsonl")
    (first / "metrics.jsonl").write_text("2\n")
    (first / "gone").write_text("")
    mirror.push()
    (first / "gone").unlink()
  assert [n for n in folder.names() if not n.endswith(".json")] == ["metrics.jsonl", "previous-1/metrics.jsonl"]
  (second / MEMORY).write_text("{}")  # of a run that was there before
  with lease(folder, "two") as held, Mirror(second, folder, held, pytest.fail) as mirror:
    mirror.bring()
    assert not (second / MEMORY).exists()
    assert (second / "metrics.jsonl").read_text() == "2\n"
    assert (second / "previous-1" / "metrics.jsonl").read_text() == "1\n"


def test_another_process_sends_what_it_alone_has(folder, tmp_path):
  """Process 0, which has another folder, keeps it, also if no index names any file yet."""
  with lease(folder, "one") as held, Mirror(tmp_path / "0", folder, held, pytest.fail) as first:
    first.bring()
    for rank in (0, 1):
      for name in (f"heartbeats/{rank}.json", f"profile/plugins/profile/steps-0-1/process-{rank}.xplane.pb"):
        (tmp_path / str(rank) / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / str(rank) / name).write_text("1")
      (tmp_path / str(rank) / "metrics.jsonl").write_text(str(rank))
    with Mirror(tmp_path / "1", folder, None, pytest.fail, only=of_process(1)) as second:
      second.push()
      first.push()
      assert {"heartbeats/0.json", "heartbeats/1.json"} <= set(folder.names())
      (tmp_path / "1" / "heartbeats" / "1.json").unlink()  # it ends in order
  sent = {
    "heartbeats/0.json",
    "metrics.jsonl",
    *(f"profile/plugins/profile/steps-0-1/process-{r}.xplane.pb" for r in (0, 1)),
  }
  assert {name for name in folder.names() if name not in (LOCK, INDEX)} == sent
  assert (folder / "metrics.jsonl").read_text() == "0"


def test_a_listing_that_lags_loses_no_file(bucket, folder, tmp_path):
  local = tmp_path / "local"
  local.mkdir()
  with bucket.proxy.failing(r"^GET /(storage/v1/b/bucket/o\?|bucket/?\?)", "stale"):
    assert folder.names() == []
    with lease(folder, "one") as held, Mirror(local, folder, held, pytest.fail):
      (local / "metrics.jsonl").write_text("1\n")
    assert folder.names() == []
    with lease(folder, "two") as held:
      mirror = Mirror(tmp_path / "other", folder, held, pytest.fail)
      mirror.bring()
  assert (tmp_path / "other" / "metrics.jsonl").read_text() == "1\n"


def test_files_that_cannot_be_copied_are_reported_once_and_retried(bucket, folder, tmp_path, impatient):
  warnings: list[str] = []
  with lease(folder, "one") as held, Mirror(tmp_path, folder, held, warnings.append) as mirror:
    with bucket.proxy.failing(WRITES, 507):
      for _ in range(2):
        (tmp_path / "a").write_text("1")
        mirror.soon()
        end = time.monotonic() + 30
        while mirror._wanted.is_set() or mirror._copying.locked():
          assert time.monotonic() < end
          time.sleep(0.01)
    (tmp_path / "b").write_text("2")
  assert len(warnings) <= 1
  assert {"a", "b"} <= set(folder.names())


def test_errors_are_full_disks_and_missing_rights_to_other_code():
  assert StorageError(errno.EDQUOT, "x").strerror == "x"
  assert str(StorageError(errno.EDQUOT, "x")) == "x"
