"""The small files of a run go to a bucket and come back whole. The bucket is in memory, so nothing needs a network."""

import errno
from pathlib import Path

import pytest

from storage.answers import StorageError
from storage.bucket import Folder
from storage.lease import Lease
from storage.mirror import Mirror

FILES = {"journal.jsonl": "started\n", "metrics.jsonl": "1\n", "previous-1/metrics.jsonl": "0\n"}


def lease(folder: Folder, home: str) -> Lease:
  return Lease(folder, home, f"process of {home}", lambda line: None)


@pytest.fixture
def results(in_memory: Folder, tmp_path: Path) -> Folder:
  """What a run on machine one has left in the bucket."""
  with lease(in_memory, "one") as held, Mirror(tmp_path / "one", in_memory, held, pytest.fail):
    for name, content in FILES.items():
      (tmp_path / "one" / name).parent.mkdir(parents=True, exist_ok=True)
      (tmp_path / "one" / name).write_text(content)
  assert set(FILES) < set(in_memory.names())
  return in_memory


@pytest.mark.parametrize("killed", [False, True])
def test_copying_back_that_is_interrupted_loses_nothing(
  killed: bool, results: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
  """Machine two fails, or is killed, after the first file. Its next start brings the rest before it sends anything."""
  local, download = tmp_path / "two", Folder.download

  def broken(self: Folder, file: Path) -> None:
    if self.name != "journal.jsonl":
      raise StorageError(errno.EIO, "the network is down")
    download(self, file)

  with monkeypatch.context() as patched:
    patched.setattr(Folder, "download", broken)
    first = lease(results, "two")
    first._take()
    with pytest.raises(StorageError):
      Mirror(local, results, first, pytest.fail).bring()
    if not killed:
      first._write(held=False)
  assert [file.name for file in local.rglob("*")] == ["journal.jsonl"]
  with lease(results, "two") as held:
    mirror = Mirror(local, results, held, pytest.fail)
    mirror.bring()
    with mirror:
      pass
  for name, content in FILES.items():
    assert (results / name).read_text() == content
    assert (local / name).read_text() == content


def test_what_this_machine_wrote_last_is_not_brought_again(
  results: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
  """Its own files may be newer than those in the bucket."""
  with lease(results, "two") as held:
    Mirror(tmp_path / "two", results, held, pytest.fail).bring()
  monkeypatch.setattr(Folder, "download", lambda *_: pytest.fail("brought again"))
  with lease(results, "two") as held:
    Mirror(tmp_path / "two", results, held, pytest.fail).bring()
