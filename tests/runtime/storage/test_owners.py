"""What another user owns, or may write to, is neither read nor written, unless a field names them, in both caches.

Users are numbers here: the tests run as root, who may give files to anyone.
"""

import grp
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from helpers import config, one_sentence

from configs import base
from data import cache, sealed
from data.cache import prepared
from data.growing import GrowingFiles, fingerprint_of
from data.recognition import survey
from runtime import devices
from runtime.storage import owners

MALLORY = 54321
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


@pytest.fixture(autouse=True)
def nobody_named() -> Iterator[None]:
  """A test may name an owner, or ask for hashes."""
  yield
  owners.read_also("")
  cache.verify[0] = False
  jax.config.update("jax_compilation_cache_max_size", -1)


def given_to(uid: int, *roots: Path) -> None:
  for root in roots:
    for path in [root, *root.rglob("*")]:
      os.chown(path, uid, uid, follow_symlinks=False)


def write(folder: Path, text: str = "mine") -> None:
  with GrowingFiles(folder, ("train.tokens",)) as growing:
    growing.files["train.tokens"].write(text.encode())
  (folder / "growing.json").unlink(missing_ok=True)
  (folder / "meta.json").write_text(json.dumps({"fingerprint": "made up"}))


def tokens(root: Path, **fields: Any) -> str:
  return (prepared(str(root), "text", "key", write) / "train.tokens").read_text()


def theirs(root: Path, text: str = "them", mode: int = 0o755) -> Path:
  """The cache of another user, who has prepared the same data."""
  folder = prepared(str(root), "text", "key", lambda to: write(to, text))
  given_to(MALLORY, root)
  root.chmod(mode)
  folder.chmod(0o755)
  return folder


@AS_ROOT
@pytest.mark.parametrize("mode", [0o755, 0o777, 0o1777])
def test_what_another_user_has_prepared_is_not_read(mode: int, tmp_path: Path, capsys: pytest.CaptureFixture):
  owners._say.cache_clear()
  before = theirs(tmp_path / "cache", mode=mode)
  assert tokens(tmp_path / "cache") == "mine"
  assert tokens(tmp_path / "cache") == "mine"  # and from the cache
  assert (before / "train.tokens").read_text() == "them"
  own = tmp_path / "cache" / f"user-{os.geteuid()}"
  assert stat.S_IMODE(own.stat().st_mode) == 0o700
  assert capsys.readouterr().err.count(f"is in its folder {own.name}") == 1


@AS_ROOT
def test_a_named_owners_data_is_read_and_never_written(tmp_path: Path):
  theirs(tmp_path / "cache")
  owners.read_also(str(MALLORY))
  assert tokens(tmp_path / "cache") == "them"
  with one_sentence("data.cache_dir=", "lacks text-", "is read only", "another folder"):
    prepared(str(tmp_path / "cache"), "text", "another key", write)
  assert len(list((tmp_path / "cache").iterdir())) == 2  # what was prepared, and what says so


@AS_ROOT
def test_a_named_owners_data_is_hashed_at_each_start(tmp_path: Path):
  file = theirs(tmp_path / "cache") / "train.tokens"
  owners.read_also(str(MALLORY))
  seen = file.stat()
  file.write_text("evil")
  os.utime(file, ns=(seen.st_atime_ns, seen.st_mtime_ns))
  with one_sentence("data.cache_dir", "'train.tokens' has other contents", "ask its owner"):
    tokens(tmp_path / "cache")
  sealed.beside(file.parent).unlink()
  with one_sentence("an earlier version has prepared", "cannot be checked"):
    tokens(tmp_path / "cache")


@AS_ROOT
@pytest.mark.parametrize("how", ["a link", "of another user", "too large"])
def test_a_manifest_counts_if_its_owner_alone_wrote_it(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  """Otherwise it is as if there were none, and then a named owner's data is not read."""
  folder = theirs(tmp_path / "cache")
  owners.read_also(str(MALLORY))
  manifest = sealed.beside(folder)
  if how == "a link":
    (folder / "train.ends").symlink_to("train.tokens")
  elif how == "too large":
    monkeypatch.setattr(sealed, "MOST", manifest.stat().st_size - 1)
  else:
    os.chown(manifest, 999, 999)
  part = "'train.ends' is a link" if how == "a link" else "an earlier version has prepared"
  with one_sentence("data.cache_dir has", part, "ask its owner"):
    tokens(tmp_path / "cache")


@AS_ROOT
@pytest.mark.parametrize("which", ["", "entry", "train.tokens"])
def test_a_named_owners_data_is_not_read_if_others_may_write_to_it(which: str, tmp_path: Path):
  folder = theirs(tmp_path / "cache")
  owners.read_also(str(MALLORY))
  at = {"": folder.parent, "entry": folder}.get(which, folder / which)
  at.chmod(0o777)
  with one_sentence("data.cache_dir", "others may write to"):
    tokens(tmp_path / "cache")
  os.chown(at, 999, 999)
  at.chmod(0o755)
  if which:
    with one_sentence("data.cache_dir", "belongs to 999"):
      tokens(tmp_path / "cache")


@pytest.mark.parametrize("kind", ["a link", "another's folder", "a hard link", "a link in place of the folder"])
def test_a_link_planted_in_an_unfinished_folder_is_not_followed(kind: str, tmp_path: Path):
  root, victim = tmp_path / "cache", tmp_path / "victim"
  victim.write_text("precious")
  final = prepared(str(root), "text", "key", write)
  unfinished = root / f".{final.name}"
  final.rename(root / "elsewhere")
  if kind == "a link in place of the folder":
    (tmp_path / "folder").mkdir()
    unfinished.symlink_to(tmp_path / "folder")
    assert tokens(root) == "mine"
    assert list((tmp_path / "folder").iterdir()) == []
    return
  unfinished.mkdir()
  for name in ("train.tokens", "meta.json", "growing.json"):
    (os.link if kind == "a hard link" else os.symlink)(victim, unfinished / name)
  if kind == "another's folder" and os.geteuid() == 0:
    given_to(MALLORY, unfinished)
  assert tokens(root) == "mine"
  assert victim.read_text() == "precious"


def test_growing_files_follow_no_link(tmp_path: Path):
  (tmp_path / "victim").write_text("precious")
  (tmp_path / "train.tokens").symlink_to(tmp_path / "victim")
  with pytest.raises(OSError, match="symbolic links"):
    GrowingFiles(tmp_path, ("train.tokens",))
  assert (tmp_path / "victim").read_text() == "precious"


def test_each_start_compares_sizes_and_times_and_a_copy_is_accepted(tmp_path: Path):
  folder = prepared(str(tmp_path / "cache"), "text", "key", write)
  file, kept = folder / "train.tokens", sealed.beside(folder)
  assert json.loads(kept.read_text())["files"]["train.tokens"][2] == fingerprint_of(file)
  os.utime(file, ns=(1, 1))  # as a copy has
  assert tokens(tmp_path / "cache") == "mine"
  assert json.loads(kept.read_text())["files"]["train.tokens"][1] == 1
  seen = file.stat()
  file.write_text("evil")
  with one_sentence("'train.tokens' has other contents", "remove that folder"):  # it has another time
    tokens(tmp_path / "cache")
  os.utime(file, ns=(seen.st_atime_ns, seen.st_mtime_ns))
  assert tokens(tmp_path / "cache") == "evil"  # contents are hashed
  cache.verify[0] = True  # by tools.prepare --verify
  with one_sentence("'train.tokens' has other contents", "remove that folder"):
    tokens(tmp_path / "cache")
  file.write_text("longer")
  cache.verify[0] = False
  with one_sentence("'train.tokens' has 6 bytes and had 4"):
    tokens(tmp_path / "cache")
  file.write_text("mine")
  (folder / "more").touch()
  with one_sentence("files that were not prepared", "more"):
    tokens(tmp_path / "cache")
  (folder / "more").unlink()
  kept.write_text(kept.read_text().replace('"key": "', '"key": "0'))
  with one_sentence("prepared for other data"):
    tokens(tmp_path / "cache")
  kept.unlink()  # of an earlier version
  assert tokens(tmp_path / "cache") == "mine"


@pytest.mark.parametrize("shared", [0o700, 0o755, 0o750])
def test_only_this_user_may_write_and_others_read_if_the_folder_is_shared(shared: int, tmp_path: Path):
  before = os.umask(0)
  try:
    tokens(tmp_path / "cache")
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700
    (tmp_path / "cache").chmod(shared)
    folder = prepared(str(tmp_path / "cache"), "text", "second", write)
    survey._keep(str(tmp_path / "cache"), "a", {})
  finally:
    os.umask(before)
  assert stat.S_IMODE(folder.stat().st_mode) == shared
  for path in [*folder.iterdir(), sealed.beside(folder)]:
    assert not path.stat().st_mode & 0o022, path
  assert stat.S_IMODE((tmp_path / "cache" / survey.FOLDER).stat().st_mode) == 0o700


@AS_ROOT
@pytest.mark.parametrize(
  "group, members, closed",
  [("ann", [], True), ("ann", ["ann"], True), (None, [], True), ("users", [], False), ("ann", ["ann", "eve"], False)],
)
def test_a_group_counts_as_its_user_if_nobody_else_is_in_it(
  group: str | None, members: list[str], closed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
  def of(gid: int) -> SimpleNamespace:
    if group is None:
      raise KeyError(gid)
    return SimpleNamespace(gr_name=group, gr_mem=members)

  monkeypatch.setattr(grp, "getgrgid", of)
  monkeypatch.setattr(owners, "user", lambda uid: "ann")
  owners._is_private.cache_clear()
  os.chown(tmp_path, -1, 4711)
  tmp_path.chmod(0o775)
  assert owners.is_closed(tmp_path, os.lstat(tmp_path)) == closed
  assert (owners.place(tmp_path, "data.cache_dir").write == tmp_path) == closed
  owners._is_private.cache_clear()
  tmp_path.chmod(0o777)
  assert not owners.is_closed(tmp_path, os.lstat(tmp_path))
  monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_RDONLY))
  assert owners.is_closed(tmp_path, os.lstat(tmp_path))  # nobody may write


def test_a_file_system_that_gives_files_to_another_user_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  """NFS may: what this program makes belongs to somebody else there, as does the folder around."""
  monkeypatch.setattr(os, "geteuid", lambda: 4711)
  root = tmp_path / "cache"
  assert tokens(root) == tokens(root) == "mine"
  assert [path.name for path in root.iterdir() if path.is_dir()] == [prepared(str(root), "text", "key", write).name]


@AS_ROOT
def test_a_volume_of_another_user_is_used_by_root(tmp_path: Path):
  """As in a container."""
  (tmp_path / "volume").mkdir()
  given_to(1000, tmp_path / "volume")
  assert tokens(tmp_path / "volume") == tokens(tmp_path / "volume") == "mine"


@AS_ROOT
def test_what_root_has_prepared_is_read_by_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  tokens(tmp_path / "cache")
  monkeypatch.setattr(os, "geteuid", lambda: MALLORY)
  monkeypatch.setattr(owners, "_own", lambda folder, found: None)  # may not write there
  monkeypatch.setattr(Path, "mkdir", lambda *_, **__: (_ for _ in ()).throw(PermissionError()))
  assert tokens(tmp_path / "cache") == "mine"


@AS_ROOT
def test_a_survey_of_another_user_is_not_believed(tmp_path: Path):
  (tmp_path / "a.txt").write_text("some text")
  path, root = str(tmp_path / "a.txt"), str(tmp_path / "cache")
  assert survey.surveyed(path, "data.path", root).files[0].kind == "plain"
  (kept,) = (tmp_path / "cache" / survey.FOLDER).iterdir()
  kept.write_text(kept.read_text().replace("plain", "parquet"))
  given_to(MALLORY, tmp_path / "cache")
  assert survey.surveyed(path, "data.path", root).files[0].kind == "plain"


def test_an_unknown_owner_is_one_sentence():
  with one_sentence("cache_owner='no such user'", "no user of this machine"):
    owners.read_also("no such user")
  assert base.get_config().cache_owner == ""


def programs(monkeypatch: pytest.MonkeyPatch, given: str, of_jax: str | None = None) -> str | None:
  """The folder of compiled programs that JAX uses, with a value of `compilation_cache_dir` and one of JAX's own."""
  jax.config.update("jax_compilation_cache_dir", of_jax)
  monkeypatch.setattr(devices, "PROGRAMS", str(Path.home() / "compiled"))
  devices._keep_programs(given, profiled=False)
  return jax.config.jax_compilation_cache_dir


def test_jaxs_own_variable_is_respected_and_nothing_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setenv("HOME", str(tmp_path))
  given, of_jax = str(tmp_path / "given"), str(tmp_path / "of_jax")
  assert config().compilation_cache_dir == "auto" == base.get_config().compilation_cache_dir
  assert programs(monkeypatch, "auto", of_jax) == of_jax
  assert programs(monkeypatch, "auto") == str(tmp_path / "compiled")
  assert programs(monkeypatch, given, of_jax) == given
  assert programs(monkeypatch, "", of_jax) is None
  assert programs(monkeypatch, "auto", "gs://bucket/programs") == "gs://bucket/programs"
  assert stat.S_IMODE((tmp_path / "given").stat().st_mode) == 0o700
  monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")
  assert programs(monkeypatch, "auto") is None


@AS_ROOT
@pytest.mark.parametrize("by_jax", [False, True])
def test_programs_of_another_user_are_not_run(by_jax: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  folder = tmp_path / "programs"
  folder.mkdir()
  given_to(MALLORY, folder)
  ask = lambda: programs(monkeypatch, *(("auto", str(folder)) if by_jax else (str(folder),)))
  assert ask() == str(folder / "user-0")
  owners.read_also(str(MALLORY))
  assert ask() == str(folder)
  assert jax.config.jax_persistent_cache_min_compile_time_secs > 1e6  # so nothing is written
  folder.chmod(0o777)
  with one_sentence("JAX_COMPILATION_CACHE_DIR" if by_jax else "compilation_cache_dir", "others may write to it"):
    ask()


def test_a_start_sets_the_folder_of_programs_by_the_rule(monkeypatch: pytest.MonkeyPatch):
  asked: list[tuple[str, bool]] = []
  monkeypatch.setattr(devices, "_keep_programs", lambda *given: asked.append(given))
  devices.start_jax(config(compilation_cache_dir="x", cache_owner=str(MALLORY)))
  assert asked == [("x", False)]
  assert owners._named == [str(MALLORY)]
