"""The small files of a run go to a bucket and come back whole. The bucket is in memory, so nothing needs a network."""

import errno
import functools
import json
from pathlib import Path

import pytest

from data import remote
from runtime.storage import mirror as mirrors
from runtime.storage.answers import StorageError
from runtime.storage.bucket import Folder
from runtime.storage.lease import Lease
from runtime.workdir import HOLDS

Mirror = functools.partial(mirrors.Mirror, holds=HOLDS)
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


OUTSIDE = ["../outside", "/{outside}", "a/../../outside", "./x", "", "checkpoints/2/x", "lock", 7, None, ["x"]]


@pytest.mark.parametrize("index", [json.dumps([*OUTSIDE, "metrics.jsonl"]), '{"a": 1}', "7", "torn ["])
def test_an_index_of_files_leads_nowhere_else(index: str, results: Folder, tmp_path: Path):
  """Objects of a bucket may be written by others. What the index names is taken only if it is a file of the run."""
  outside = tmp_path / "outside"
  (results / "files.json").write(index.replace("{outside}", str(outside)).encode())
  for name in ("../outside", str(outside), "a/../../outside"):
    (results / name).write(b"from outside")
  with lease(results, "two") as held:
    mirror = Mirror(tmp_path / "two" / "run", results, held, pytest.fail)
    mirror.bring()
    with mirror:
      pass
  assert not outside.exists()
  assert not (tmp_path / "two" / "outside").exists()
  assert (tmp_path / "two" / "run" / "metrics.jsonl").read_text() == "1\n"
  assert not (tmp_path / "two" / "run" / "lock").exists()


def test_data_of_a_bucket_is_written_only_into_the_cache(in_memory: Folder, tmp_path: Path):
  outside = tmp_path / "outside"
  for name in ("1.txt", f"/{outside}", str(outside)[1:], "a/../../../outside"):
    Folder("gs", "bucket", f"runs/one/{name}").write(b"text")
  assert in_memory.names() == ["1.txt", str(outside)[1:]]
  found = Path(remote.brought(str(in_memory), "data.path", str(tmp_path / "cache")))
  assert (found / "1.txt").read_text() == (found / str(outside)[1:]).read_text() == "text"
  assert not outside.exists()
