"""Foreign text is shown as text, by every command: no escape sequence of it reaches a terminal or a log."""

import contextlib
import io
import json
import re
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from helpers import ROOT
from kept import make
from reporting_runs import made

import errors
from checkpointing import reading
from configs import base
from errors import ConfigError, visible
from job import attempt
from reporting import heartbeat, prometheus
from reporting.appender import warn
from reporting.metrics import Writer
from runtime import command_line, processes
from runtime.stderr import Visible
from tools import checkpoint, evaluate, export, generate, prepare, profile, report
from training.loop import LoopState

EVIL = "\x1b]0;title\x07\x1b[2J\x9b31m\x7f\x08\r\u202e\u2028"  # sets a title, clears, colours, goes back, reorders
SHOWN = r"\x1b]0;title\x07\x1b[2J\x9b31m\x7f\x08"
ACTS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u202e]")


def kept_run(folder: Path) -> Path:
  """A workdir with this in its name and its record."""
  at = folder / f"run{EVIL}"
  with zipfile.ZipFile(make.FOLDER / "runs" / "windows" / "workdir.zip") as archive:
    archive.extractall(at)
  file = reading.newest(at) / reading.RECORD
  saved = json.loads(file.read_text())
  saved |= {"strategy": EVIL, "command": EVIL, "versions": {EVIL: EVIL}}
  saved["data"]["names"] = [EVIL]
  file.write_text(json.dumps(saved))
  return at


def of_checkpoint(folder: Path) -> None:
  checkpoint.main([str(kept_run(folder))])


def of_export(folder: Path) -> None:
  out = folder / f"out{EVIL}"
  export.main([str(kept_run(folder)), f"--out={out}"])
  card = (out / "README.md").read_text()
  assert not ACTS.search(card)
  assert "\\\\x1b\\]0;title" in card.replace(SHOWN, "") or SHOWN in card


def of_report(folder: Path) -> None:
  report.main([str(made(folder / f"run{EVIL}"))])


def of_prepare(folder: Path) -> None:
  """Names of files and of fields, and the text itself."""
  data = folder / f"data{EVIL}"
  data.mkdir()
  (data / f"a{EVIL}.txt").write_text(f"text {EVIL} " * 30)
  (data / f"b{EVIL}.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(20))
  config = base.get_config("lm")
  config.model.seq_len, config.data.cache_dir = 16, str(folder / "cache")
  prepare.main(config, [str(data)], folder / "a.png")


def of_prepare_with_classes(folder: Path) -> None:
  rows = [{"text": f"words {i}", "label": EVIL * (i % 2) or "other"} for i in range(200)]
  (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
  config = base.get_config("lm")
  config.model.seq_len, config.model.objective = 16, "class"
  config.data.cache_dir, config.data.packing = str(folder / "cache"), "documents"
  prepare.main(config, [str(folder / "rows.jsonl")], folder / "a.png")


def of_a_sentence(folder: Path) -> None:
  raise ConfigError(f"data.text_field={EVIL} is not in row 1 of a.jsonl; use one of {EVIL}")


def of_generate(folder: Path) -> None:
  text = SimpleNamespace(decode=lambda ids: "".join(map(chr, ids)), ends=())
  writing = generate.Writing(text, [65], [])
  for character in EVIL:
    writing.add(ord(character))
  writing.done = True
  generate.show(iter([[writing]]), [f"prompt {EVIL}"], lambda part: print(part, end="", flush=True))


def of_profile(folder: Path) -> None:
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(profile, "text", lambda workdir, top: f"{EVIL} in {workdir}\n")
    profile.main([str(folder / EVIL.replace("/", ""))])


def of_the_probe(folder: Path) -> None:
  beat = {name: {str: EVIL, dict: {}}.get(kind, 1) for name, kind in heartbeat.READ.items()}
  (folder / heartbeat.FOLDER).mkdir()
  (folder / heartbeat.FOLDER / "0.json").write_text(json.dumps(beat | {"began": 2**40}))
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sys, "argv", ["heartbeat", str(folder), "0"])
    patch.setattr(heartbeat, "AGAIN", 0.0)
    with pytest.raises(SystemExit):
      heartbeat.main()


def of_a_job(folder: Path) -> None:
  output = attempt.Output(folder)
  output.open(1)
  output.take(0, f"line {EVIL}\n")
  output.say(f"the last line was {output.last(0)}")
  output.release()
  output.close()
  attempt.show(1, f"{EVIL}\n")
  assert (log := (folder / "1.log").read_text()).startswith(f"[0] line {SHOWN}")
  assert not ACTS.search(log)


def of_a_run(folder: Path) -> None:
  with Writer(folder, LoopState(), 1) as writer:
    writer.say(f"sample {EVIL}")
  warn(f"{EVIL} cannot be written")


COMMANDS = [
  of_checkpoint, of_report, of_prepare, of_prepare_with_classes, of_a_sentence, of_generate, of_profile, of_the_probe,
  of_a_job, of_a_run, pytest.param(of_export, marks=pytest.mark.full),
]  # fmt: skip


def shown_by(command: Callable[[Path], object], folder: Path, capsys: pytest.CaptureFixture) -> None:
  with contextlib.suppress(SystemExit), command_line.bad_input_ends_the_program():
    command(folder)
  shown = "".join(capsys.readouterr())
  assert SHOWN in shown
  assert not ACTS.search(shown), repr(ACTS.search(shown))


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.__name__)
def test_control_characters_are_shown_as_text(
  command: Callable[[Path], object], tmp_path: Path, capsys: pytest.CaptureFixture
):
  shown_by(command, tmp_path, capsys)


@pytest.mark.full
@pytest.mark.parametrize("tool", [generate, evaluate], ids=["generate", "evaluate"])
def test_a_model_writes_text_alone(
  tool: object, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
  monkeypatch.setattr(tool, "start_jax", lambda config: jax.devices())
  (tmp_path / f"{EVIL}.txt").write_text(f"{EVIL} " * 20)
  workdir = shutil.move(kept_run(tmp_path), tmp_path / "run")
  path = f"--data.path={tmp_path}/{EVIL}.txt"
  asked = {generate: [f"--prompt={EVIL}", "--length=40"], evaluate: [path, f"--data.cache_dir={tmp_path}/cache"]}[tool]
  shown_by(lambda _: tool.main([str(workdir), *asked]), tmp_path, capsys)


def test_what_prometheus_reads_has_no_control_characters():
  metric = prometheus.Metric("step", "The last step.", [({"host": EVIL}, 1.0)])
  text = prometheus.exposition([metric], {"run": f'a\n"{EVIL}'})
  assert not ACTS.search(text)
  assert text.count("\n") == 3
  assert re.fullmatch(r'meshwright_step\{run="(.*)",host="(.*)"\} 1.0', text.splitlines()[2])[1].startswith(
    r"a\n\"\\x1b"
  )


def test_each_command_shows_text_through_the_one_function():
  """A command that does not run in this block would print what it is given."""
  for file in [ROOT / "train.py", *sorted((ROOT / "tools").glob("*.py"))]:
    source = file.read_text()
    if '__name__ == "__main__"' in source:
      assert "bad_input_ends_the_program()" in source or "command_line.run(" in source, file


def test_honest_text_stays_as_it_is():
  honest = "naïve 中文 עברית עִבְרִית فارسی\u200cها 👩\u200d👩\u200d👧 a\u00a0b\u3000c × → “…” \\x1b \u00ad"
  assert visible(honest) == honest
  assert visible("a\tb\nc", "\n\t") == "a\tb\nc"
  assert visible("a\tb\nc\udcff") == r"a\tb\nc\udcff"
  assert errors.first_line(ValueError(f"x{EVIL}")).isprintable()


def test_a_bar_is_drawn_and_a_title_is_not_set():
  shown = io.StringIO()
  Visible(shown, bars=True).write("\r 3/10\x1b[A\x1b]0;title\x07\n")
  assert shown.getvalue() == "\r 3/10\x1b[A\\x1b]0;title\\x07\n"


def test_a_traceback_is_shown_as_text(capsys: pytest.CaptureFixture):
  with contextlib.suppress(RuntimeError), command_line.bad_input_ends_the_program():
    raise RuntimeError(EVIL)
  sys.excepthook(RuntimeError, RuntimeError(EVIL), None)
  sys.excepthook = sys.__excepthook__
  assert not ACTS.search(capsys.readouterr().err)


def test_a_process_that_fails_alone_shows_its_traceback_as_text(
  capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
  def fails(_: object) -> None:
    raise RuntimeError(EVIL)

  hook = sys.excepthook
  monkeypatch.setattr(sys, "argv", ["train.py"])
  monkeypatch.setattr(processes, "failed_alone", lambda error: True)
  monkeypatch.setattr(processes, "end_at_once", sys.exit)
  monkeypatch.setattr(command_line.app, "run", lambda main, flags_parser: main([]))
  monkeypatch.setattr(command_line, "CONFIG", SimpleNamespace(value=None))
  with pytest.raises(SystemExit):
    command_line.run(fails)
  sys.excepthook = hook
  shown = capsys.readouterr().err
  assert "RuntimeError" in shown
  assert not ACTS.search(shown)
