"""A file of another owner, a full disk, a quota, a read-only mount: the sentence names that file, and what helps."""

import errno
import os
from pathlib import Path

import pytest
from helpers import config, one_sentence
from users import AS_ROOT, USER, another_user, given

import train
from errors import ConfigError, Unavailable, of_file, unwritable
from reporting.appender import Appender
from runtime import command_line, folders, processes

FULL, QUOTA, READ_ONLY = errno.ENOSPC, errno.EDQUOT, errno.EROFS


@AS_ROOT
@pytest.mark.parametrize("name", ["lock", "journal.jsonl", "metrics.jsonl", "tokenizer", "config.json"])
def test_a_file_of_another_owner_is_named(name: str, tmp_path: Path):
  """Left by a run as root, for example: `chown` is what helps, and no other disk."""
  workdir = given(tmp_path / "run")
  (workdir / name).touch()
  fields = {"model__depth": 1, "steps": 1, "sample_length": 0, "compilation_cache_dir": "", "runtime__heartbeat": 0}
  says = f"workdir={str(workdir)!r}: {str(workdir / name)!r} cannot be written (Permission denied; it belongs to root"
  with one_sentence(says, f"and this user is {USER}); give this user the right", "or name another folder"):
    with another_user(workdir), folders.written_into(workdir, "workdir"):
      if name == "lock":
        train.train(config("single", **fields, simulated_devices=8), workdir)
      Appender(workdir / name)


@AS_ROOT
def test_a_folder_of_another_owner_is_named_once(tmp_path: Path):
  with one_sentence(f"workdir={str(tmp_path)!r} cannot be written (Permission denied; it belongs to root"):
    with another_user(tmp_path):
      folders.writable(tmp_path, "workdir")
  with one_sentence(f"workdir='{tmp_path}/a' cannot be written (Permission denied; {str(tmp_path)!r} belongs to root"):
    with another_user(tmp_path):
      folders.writable(tmp_path / "a", "workdir")


@pytest.mark.parametrize(
  "number, kind, fix",
  [
    (FULL, Unavailable, "free some space, or inodes (df, df -i)"),
    (QUOTA, Unavailable, "free some space, or ask for a larger quota"),
    (READ_ONLY, ConfigError, "make its file system writable"),
    (errno.EMFILE, Unavailable, "allow more open files (ulimit -n)"),
    (errno.ELOOP, ConfigError, "remove the link, which is not followed"),
    (errno.EEXIST, ConfigError, "name another folder"),
  ],
)
def test_what_helps_depends_on_the_error(number: int, kind: type[Exception], fix: str, tmp_path: Path):
  error = OSError(number, os.strerror(number))
  found = unwritable(error, "workdir", tmp_path)
  assert isinstance(found, kind)
  assert str(found).startswith(f"workdir={str(tmp_path)!r} cannot be written ({os.strerror(number)}); {fix}")
  assert ("space" in str(found)) == (number in (FULL, QUOTA))


@pytest.mark.parametrize("number, status", [(FULL, 1), (errno.EMFILE, 1), (errno.EACCES, 2), (READ_ONLY, 2)])
def test_an_error_of_the_machine_is_no_traceback(number: int, status: int, capsys: pytest.CaptureFixture):
  with pytest.raises(SystemExit) as ended, command_line.bad_input_ends_the_program():
    raise OSError(number, os.strerror(number), "/some/file")
  assert ended.value.code == status
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith(f"error: '/some/file' cannot be used ({os.strerror(number)}")


def test_a_mistake_of_the_program_keeps_its_traceback():
  with pytest.raises(FileNotFoundError), command_line.bad_input_ends_the_program():
    Path("/not/there").read_text()


def test_processes_say_the_same_together():
  with one_sentence("'/some/file' cannot be used (Too many open files); allow more", kind=Unavailable):
    with processes.raise_together():
      raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/some/file")


def test_an_error_without_a_name_is_a_sentence():
  assert of_file(OSError(FULL, "No space left on device"), "", "used").startswith("a file cannot be used (No space")
