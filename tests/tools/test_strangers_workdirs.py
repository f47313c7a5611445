"""A stranger's workdir says what its model is, and nothing of this machine. What no run wrote gets one sentence."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT
from kept import make

from checkpointing import finished, reading, record
from checkpointing.memory import tier
from configs import base
from errors import ConfigError
from job import supervisor
from job.attempt import Here
from reporting import heartbeat, metrics, pages, source, summary
from reporting.appender import Appender
from runtime import folders
from runtime.storage.bucket import location
from tools import checkpoint, export, profile, report
from training.loop import LoopState

MACHINE = (
  "compilation_cache_dir",
  "simulated_devices",
  "distributed",
  "data.cache_dir",
  "checkpoint",
  "runtime",
  "profile",
)
WHAT = ("model.", "strategy", "init_", "project")  # what a model is; a project is a folder of projects/


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
  """A run that an earlier commit has made, and its record."""
  at = tmp_path_factory.mktemp("stranger") / "run"
  with zipfile.ZipFile(make.FOLDER / "runs" / "windows" / "workdir.zip") as archive:
    archive.extractall(at)
  return at, record_file(at).read_text()


@pytest.fixture
def workdir(ended: tuple[Path, str]) -> Path:
  """The same, as it was at first."""
  at, saved = ended
  record_file(at).write_text(saved)
  (at / "config.json").write_text(json.dumps(json.loads(saved)["config"]))
  return at


def record_file(workdir: Path) -> Path:
  return reading.newest(workdir) / reading.RECORD


def changed(workdir: Path, name: str, value: Any) -> None:
  """Changes a value of the record, by its dotted name, and that of the config in config.json."""
  for file, at in ((record_file(workdir), name), (workdir / "config.json", name.removeprefix("config."))):
    whole = inner = json.loads(file.read_text())
    *path, last = at.split(".")
    for part in path:
      inner = inner.setdefault(part, {})
    inner[last] = value
    file.write_text(json.dumps(whole))


def other(value: Any) -> Any:
  """Another value of the same type."""
  match value:
    case bool():
      return not value
    case int() | float():
      return value + 1
    case list() | tuple():
      return [*value, 1.0]
    case None:
      return 3
  return f"{value}/stranger"


def test_a_record_says_nothing_of_this_machine(workdir: Path):
  """Every field is changed in the record. Of those, only what the model is comes from there."""
  fields = record.flat(base.get_config().to_dict())
  given = {name: other(value) for name, value in fields.items() if not name.startswith(WHAT)}
  for name, value in given.items():
    changed(workdir, f"config.{name}", value)
  found = {
    "a model": record.flat(source.open_model(str(workdir)).config.to_dict()),
    "a step": record.flat(profile.config_of(workdir).to_dict()),
  }
  for what, config in found.items():
    for name in given:
      if name.startswith(MACHINE):
        assert config[name] == fields[name], f"{name} of {what}"
  taken = {name for name in given if found["a model"][name] != fields[name]}
  assert taken == {name for name in source.MODEL if name.startswith("data.")}


@pytest.mark.full
@pytest.mark.parametrize("tool", ["generate", "evaluate"])
def test_a_tool_connects_to_nobody_and_writes_nowhere_that_a_record_names(tool: str, workdir: Path, tmp_path: Path):
  with socket.create_server(("127.0.0.1", 0)) as stranger:
    changed(workdir, "config.distributed", {
      "coordinator": f"127.0.0.1:{stranger.getsockname()[1]}", "processes": 2, "process": 1, "host": "", "timeout": 5,
    })  # fmt: skip
    changed(workdir, "config.compilation_cache_dir", str(tmp_path / "planted"))
    changed(workdir, "config.data.cache_dir", str(tmp_path / "planted"))
    (tmp_path / "a.txt").write_text("some text\n" * 20)
    asked = {
      "generate": ["--prompt=a", "--length=2"],
      "evaluate": [f"--data.path={tmp_path}/a.txt", f"--data.cache_dir={tmp_path}/cache"],
    }[tool]
    done = subprocess.run([sys.executable, "-m", f"tools.{tool}", str(workdir), *asked], cwd=ROOT, check=False)
    assert done.returncode == 0
    stranger.setblocking(False)
    with pytest.raises(BlockingIOError):
      stranger.accept()
  assert not (tmp_path / "planted").exists()


TOOLS: dict[str, Callable[[Path], Any]] = {
  "checkpoint": lambda at: checkpoint.main([str(at)]),
  "export": lambda at: export.main([str(at), f"--out={at}-out"]),
  "generate": lambda at: source.open_model(str(at)).load,
  "profile": lambda at: profile.config_of(at),
  "report": lambda at: report.main([str(at), f"--html={at}.html"]),
  "finished": lambda at: finished.is_finished(location(str(at), "workdir")),
}
WRONG = [
  ("time", 1e300), ("time", "x"), ("time", float("nan")), ("time", -1), ("loss", "x"), ("devices", {}),
  ("context", 1 << 70),
  ("strategy", ["x"]), ("versions", 3), ("command", {}), ("loop.step", 1 << 60), ("loop.step", "x"), ("loop", []),
  ("data.batch_size", 0), ("data.names", [3]), ("data.turns", [1 << 30]), ("data.streams", [0, 1]),
  ("base", {"path": 3}),
  ("arrays.params/embedding", [[1 << 60], "float32", "00000000"]), ("arrays.params/embedding", [[1], "no", "00000000"]),
  ("arrays.params/../../x", [[1], "float32", "00000000"]), ("arrays.params/\x1b[2J", [[1], "float32", "00000000"]),
  ("config.steps", "x"), ("config.steps", 1e300), ("config.optimizer.learning_rate", "x"), ("config.optimizer", 3),
  ("config.model", "x"),
]  # fmt: skip
WRONG_FIELDS = [
  ("config.model.unknown", 1), ("config.model.width", "x"), ("config.model.depth", 1 << 40),
  ("config.model.width", 32.5),
  ("config.model.rope_base", float("inf")), ("config.model.rope_scaling", ["x"]), ("config.model.qk_norm", 1),
  ("config.model.attention", "x" * 100_000), ("config.model.saved", "\x1b]0;title\x07"),
  ("config.model.dropout", [0.5]),
]  # fmt: skip


@contextlib.contextmanager
def no_traceback() -> Iterator[list[str]]:
  """The body ends well, or with a sentence, which is returned."""
  said: list[str] = []
  try:
    yield said
  except ConfigError as error:
    said.append(str(error))
    assert said[0].isprintable()
    assert len(said[0]) < 1000


@pytest.mark.parametrize("name, value", WRONG, ids=lambda x: str(x)[:30])
def test_what_no_run_has_written_gets_one_sentence(name: str, value: Any, workdir: Path, capsys: pytest.CaptureFixture):
  changed(workdir, name, value)
  assert reading.read_record(reading.newest(workdir)) is None
  sentences = {}
  for tool, run in TOOLS.items():
    with no_traceback() as said:
      run(workdir)
    sentences[tool] = said
  assert (name if name.startswith("config") else name.split(".")[0]) in sentences["generate"][0]
  assert sentences["export"] == sentences["generate"]
  assert "damaged: its record cannot be read (" in capsys.readouterr().out


@pytest.mark.parametrize("name, value", WRONG_FIELDS, ids=lambda x: str(x)[:30])
def test_a_field_of_another_type_is_named(name: str, value: Any, workdir: Path):
  changed(workdir, name, value)
  field = name.removeprefix("config.")
  for tool in ("generate", "export", "profile"):
    with no_traceback() as said:
      TOOLS[tool](workdir)
    assert field in said[0], tool


def test_files_that_are_no_json_of_ours_get_one_sentence(workdir: Path):
  deep = b"[" * 100_000, b'{"a":' * 5000 + b"1" + b"}" * 5000
  for content in (b"", b"[]", b"3", b"\xff\xfe", *deep, b"9" * 5000, b'{"stop_after": 3}'):
    record_file(workdir).write_bytes(content)
    (workdir / "config.json").write_bytes(content)
    for tool, run in TOOLS.items():
      with no_traceback() as said:
        run(workdir)
      assert said or tool in ("checkpoint", "finished", "report"), (tool, content[:9])


def test_a_record_of_another_version_is_refused_by_each_tool(workdir: Path):
  changed(workdir, "version", 5)
  for tool in ("generate", "export"):
    with pytest.raises(ConfigError, match="record version 5"):
      TOOLS[tool](workdir)


@pytest.mark.parametrize("name, value", [("time", "x"), ("slowest", 1e300), ("step", 1.5), ("host", 3), ("doing", {})])
def test_a_sign_of_life_of_another_type_is_none(name: str, value: Any):
  beat = {name: {str: "x", dict: {}}.get(kind, 1) for name, kind in heartbeat.READ.items()}
  assert heartbeat.is_whole(beat)
  assert not heartbeat.is_whole(beat | {name: value})


def test_a_link_in_a_strangers_workdir_is_not_followed(workdir: Path, tmp_path: Path):
  """What a run and a report write there would overwrite a file elsewhere."""
  victim = tmp_path / "victim"
  names = ("lock", "metrics.jsonl", "metrics.part", "heartbeat.part", f".report.html.{os.getpid()}.part", "loss.png")
  for name in names:
    victim.write_text('{"step": 1, "split": "train"}\n')
    (workdir / name).unlink(missing_ok=True)
    (workdir / name).symlink_to(victim)
  before = victim.read_text()
  with contextlib.suppress(OSError):
    pages.write(workdir / "report.html", "page")
  for write in (
    lambda: folders.write(workdir / "heartbeat.json", "{}"),
    lambda: Appender(workdir / "metrics.jsonl").write(b"x\n"),
    lambda: metrics._cut(workdir / "metrics.jsonl", LoopState(step=2)),
    lambda: folders.owned(workdir).__enter__(),
  ):
    with pytest.raises((OSError, ConfigError)):
      write()
  summary.plot_loss(workdir / "loss.png", {})
  assert victim.read_text() == before
  for name in names:
    (workdir / name).unlink(missing_ok=True)


@pytest.mark.parametrize(
  "content", ["[" * 100_000, '{"run": {}, "step": "x"}', '{"run": "../../x", "step": 1e300}', "[]"]
)
def test_what_is_no_note_of_a_job_counts_as_none(content: str, tmp_path: Path):
  for name in (tier.NOTE, supervisor.STATE):
    (tmp_path / name).write_text(content)
  assert tier.note_of(tmp_path) == {}
  assert tier.newest(tmp_path) == -1
  wrong = {"starts": "x", "saved": 1e300, "failures": 3, "lost": {"a": "b"}, "refused": [1], "more": 1}
  (tmp_path / supervisor.STATE).write_text(json.dumps(wrong | {"starts": 2}))
  made = supervisor.Supervisor(supervisor.Policy(1, 1), [], tmp_path, Path("x"), None, Here(1, 1))
  assert made.state == supervisor.State(starts=2)


FILES = ["config.json", "metrics.jsonl", "journal.jsonl", "heartbeats/0.json", "checkpoints/sent.json"]


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_what_is_no_file_is_not_waited_for(kind: str, workdir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  """A pipe never ends. Nor does a device, to which an archive may have a link."""

  def late(*_: Any) -> None:
    raise TimeoutError

  before = signal.signal(signal.SIGALRM, late)
  record = str(record_file(workdir).relative_to(workdir))
  try:
    for name in (*FILES, record, "tokenizer/tokenizer.json", "tokenizer/generation_config.json"):
      at = tmp_path / name.replace("/", "-")
      shutil.copytree(workdir, at)
      (at / name).unlink(missing_ok=True)
      (at / name).parent.mkdir(exist_ok=True)
      (at / name).mkdir() if kind == "folder" else os.mkfifo(at / name)
      for run in (TOOLS | {"export": export.tokenizer_in}).values():
        signal.alarm(20)
        with no_traceback():
          run(at)
        signal.alarm(0)
  finally:
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("link", ["tokenizer", "tokenizer/tokenizer_config.json", "tokenizer/generation_config.json"])
def test_an_export_has_no_files_of_the_user(link: str, workdir: Path, tmp_path: Path):
  """A stranger's workdir has links to what this user alone can read, and the user passes the export on."""
  at = tmp_path / "run"
  shutil.copytree(workdir, at)
  secret = tmp_path / "own"
  secret.mkdir()
  for file in (at / "tokenizer").iterdir():
    shutil.copy(file, secret / file.name)
  (secret / "generation_config.json").write_text('{"eos_token_id": 0, "password": "MARK"}')
  (secret / "tokenizer_config.json").write_text('{"password": "MARK"}')
  (secret / "id_rsa").write_text("MARK")
  shutil.rmtree(at / link) if link == "tokenizer" else (at / link).unlink()
  (at / link).symlink_to(secret / link.removeprefix("tokenizer").removeprefix("/"))
  with pytest.raises(ConfigError, match="a link out of this folder"):
    export.main([str(at), f"--out={tmp_path / 'out'}"])
  assert not any("MARK" in file.read_text(errors="replace") for file in (tmp_path / "out").glob("*"))
