"""Metrics: lines that parse, event files that follow TensorFlow's format, and correct speeds."""

import json
import math
import os
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c

from reporting import metrics, speed, tensorboard
from runtime import hardware
from training.loop import LoopState


def read_events(folder: Path) -> list[Event]:
  """Decodes event files: records of length, checksum, data, checksum, as TensorFlow writes them."""
  events = []
  for file in sorted(folder.glob("events.out.tfevents.*")):
    raw, at = file.read_bytes(), 0
    while at < len(raw):
      length = int.from_bytes(raw[at : at + 8], "little")
      data = raw[at + 12 : at + 12 + length]
      assert int.from_bytes(raw[at + 12 + length : at + 16 + length], "little") == masked_crc32c(data)
      events.append(Event.FromString(data))
      at += 16 + length
  return events


def test_a_line_holds_step_split_and_values(tmp_path: Path, capsys: pytest.CaptureFixture):
  with metrics.Writer(tmp_path, LoopState(), 100) as writer:
    writer.write(10, "train", {"loss": 2.5, "tokens_per_second": 12345.6})
    writer.write(20, "validation", {"loss": math.nan})
  assert json.loads(writer.path.read_text().splitlines()[0]) == {
    "step": 10, "split": "train", "loss": 2.5, "tokens_per_second": 12345.6,
  }  # fmt: skip
  assert metrics.read(writer.path)[1] == {"step": 20, "split": "validation", "loss": None}
  assert "train       10/100  loss 2.5000  12,346 tokens/s" in capsys.readouterr().out


@pytest.mark.parametrize("why", ["Broken pipe", "No space left on device"])
def test_output_that_cannot_be_written_does_not_end_the_run(
  why: str, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
  """`train.py | head -1`, and a log on a full disk."""
  reader, pipe = os.pipe()
  os.close(reader)
  full = os.open("/dev/full", os.O_WRONLY)
  output = os.fdopen(os.dup(pipe if why == "Broken pipe" else full), "w")
  monkeypatch.setattr(metrics.sys, "stdout", output)
  with metrics.Writer(tmp_path, LoopState(), 100) as writer:
    for step in (10, 20):
      writer.write(step, "train", {"loss": 2.5})
  output.close()  # as on exit, which would fail if anything were left
  assert [line["step"] for line in metrics.read(writer.path)] == [10, 20]
  assert capsys.readouterr().err.count(f"error: standard output cannot be written ({why})") == 1


def test_half_a_line_does_not_swallow_the_next_one(tmp_path: Path):
  """A disk was full, and then the process was killed."""
  file = tmp_path / "journal.jsonl"
  file.write_bytes(b'{"event": "start"}\n{"event": "eval')
  for event in ("killed", "start"):
    journal = metrics.Appender(file)
    journal.write(json.dumps({"event": event}).encode() + b"\n")
    journal.close()
  assert [line["event"] for line in metrics.objects(metrics.lines_of(file))] == ["start", "killed", "start"]
  assert len(metrics.lines_of(file)) == 4


def lines_of_a_run(steps: int) -> list[dict[str, Any]]:
  """A line of training for each step, and after each third step an evaluation with the account of the job."""
  found: list[dict[str, Any]] = []
  for step in range(1, steps + 1):
    splits = ("train", "validation", "job") if step % 3 == 0 else ("train",)
    found += [{"step": step, "split": split, "loss": step / 7} for split in splits]
  return found


@pytest.mark.parametrize("torn", [b"", b'{"step": 31, "split": "tr', b"null\n", bytes(100_000)])
@pytest.mark.parametrize("step, evaluated", [(30, True), (30, False), (10, True), (7, False), (1, False), (99, True)])
def test_a_restart_keeps_the_lines_up_to_its_step(step: int, evaluated: bool, torn: bytes, tmp_path: Path):
  lines = lines_of_a_run(30)
  (tmp_path / "metrics.jsonl").write_bytes("".join(json.dumps(line) + "\n" for line in lines).encode() + torn)
  with metrics.Writer(tmp_path, LoopState(step=step, evaluated=evaluated), 100) as writer:
    writer.write(100, "train", {"loss": 0.0})
  kept = [one for one in lines if one["step"] < step]
  kept += [one for one in lines if one["step"] == step and (evaluated or one["split"] == "train")]
  assert metrics.read(writer.path) == [*kept, {"step": 100, "split": "train", "loss": 0.0}]
  assert metrics.last(writer.path, "validation") == next((x for x in kept[::-1] if x["split"] == "validation"), {})


def test_a_restart_reads_the_end_of_the_metrics_and_not_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  """Of 20,000 lines it parses those after the checkpoint and two before it, and leaves the file where it is."""
  file, parsed = tmp_path / "metrics.jsonl", [0]
  file.write_text("".join(json.dumps(line) + "\n" for line in lines_of_a_run(12_000)))
  whole, node = file.read_text(), file.stat().st_ino

  def counted(lines: Iterable[bytes], parse: Callable = metrics.objects) -> list[dict]:
    lines = list(lines)
    parsed[0] += len(lines)
    return parse(lines)

  monkeypatch.setattr(metrics, "objects", counted)
  with metrics.Writer(tmp_path, LoopState(step=11_997), 20_000) as writer:
    metrics.last(writer.path, "validation")
  assert parsed[0] < 20
  assert file.stat().st_ino == node
  assert file.read_text() == whole[: whole.index('{"step": 11998')]


def test_the_end_of_an_event_file_has_its_last_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  """What is before the end is not read: here it is damaged. An event that is cut off does not count."""
  with metrics.Writer(tmp_path, LoopState(), 100) as writer:
    for step in range(1, 200):
      writer.write(step, "train", {"loss": 2.5, "grad_norm": 1.5})
  (file,) = (tmp_path / "tensorboard").iterdir()
  events, whole = read_events(tmp_path / "tensorboard"), file.read_bytes()
  monkeypatch.setattr(tensorboard, "TAIL", 1000)
  assert tensorboard._last_time(file) == events[-1].wall_time
  file.write_bytes(bytes(5000) + whole[5000:-3])
  assert tensorboard._last_time(file) == events[-2].wall_time
  file.write_bytes(bytes(5000))
  assert tensorboard._last_time(file) == 0.0


def test_event_files_hold_the_same_values(tmp_path: Path):
  with metrics.Writer(tmp_path, LoopState(), 100) as writer:
    writer.write(10, "train", {"loss": 2.5})
    writer.write(20, "train", {"loss": 1.5})
  found = [(e.step, v.tag, v.simple_value) for e in read_events(tmp_path / "tensorboard") for v in e.summary.value]
  assert found == [(10, "train/loss", 2.5), (20, "train/loss", 1.5)]


def test_an_earlier_run_in_the_same_folder_is_kept(tmp_path: Path):
  for step in (1, 2, 3):
    with metrics.Writer(tmp_path, LoopState(), 10) as writer:
      writer.write(step, "train", {"loss": 1.0})
  kept = [metrics.read(tmp_path / name / "metrics.jsonl")[0]["step"] for name in ("previous-1", "previous-2", "")]
  assert kept == [1, 2, 3]
  for folder, step in (("previous-1", 1), ("", 3)):
    events = read_events(tmp_path / folder / "tensorboard")
    assert [e.step for e in events if e.summary.value] == [step]


def test_a_disabled_writer_writes_nothing(tmp_path: Path):
  with metrics.Writer(tmp_path, LoopState(), 10, enabled=False) as writer:
    writer.write(1, "train", {"loss": 1.0})
  assert list(tmp_path.iterdir()) == []


def test_a_line_without_step_or_split_is_no_measurement(tmp_path: Path):
  whole = {"step": 1, "split": "train", "loss": 2.5}
  lines = [whole, {"step": 2, "loss": 2.5}, {"split": "train", "loss": 2.5}]
  (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
  assert metrics.read(tmp_path / "metrics.jsonl") == [whole]
  assert metrics.last(tmp_path / "metrics.jsonl", "train") == whole


def test_measurements_are_flushed_to_disk_by_the_process_that_writes_them(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
  flushed = list[int]()
  monkeypatch.setattr(os, "fsync", flushed.append)
  with metrics.Writer(tmp_path, LoopState(), 10) as writer:
    writer.sync()
    assert flushed == [writer.file.descriptor]
  with metrics.Writer(tmp_path / "other", LoopState(), 10, enabled=False) as writer:
    writer.sync()
  assert len(flushed) == 1


def test_the_progress_bar_moves_to_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  made = list[types.SimpleNamespace]()

  def bar(**given: Any) -> types.SimpleNamespace:
    made.append(types.SimpleNamespace(n=given["initial"], given=given, moves=[], close=list))
    made[0].update = made[0].moves.append
    return made[0]

  monkeypatch.setattr(metrics, "tqdm", bar)
  monkeypatch.setattr(metrics.sys, "stderr", types.SimpleNamespace(isatty=lambda: True))
  with metrics.Writer(tmp_path, LoopState(step=5), 20) as writer:
    for step in (8, 5):
      writer.progress(step)
  assert (made[0].given["initial"], made[0].given["total"]) == (5, 20)
  assert made[0].moves == [3, 0]  # this bar stays at 5


def test_meter_divides_work_by_time(monkeypatch: pytest.MonkeyPatch):
  now = [100.0]
  monkeypatch.setattr(speed.time, "perf_counter", lambda: now[0])
  clock = speed.Clock()
  meter = speed.Meter(clock, items=1000, unit="tokens", flops=5e12, palm_flops=6e12, peak=100e12)
  now[0] += 50  # for example an evaluation, which does not count
  meter.restart(10)
  with clock("data"):
    now[0] += 0.5
  now[0] += 1.5
  assert meter.read(14) == {
    "tokens_per_second": 2000.0, "step_ms": 500.0, "data_wait": 0.25, "tflops_per_second": 10.0, "mfu": 0.1,
    "palm_mfu": 0.12,
  }  # fmt: skip


class Device:
  def __init__(self, kind: str, stats: dict | None = None):
    self.device_kind, self.stats, self.process_index = kind, stats, 0

  def memory_stats(self) -> dict | None:
    return self.stats


@pytest.mark.parametrize(
  "kind, peak",
  [
    ("NVIDIA H200", 989e12),
    ("NVIDIA A100-SXM4-80GB", 312e12),
    ("NVIDIA H100 PCIe", 756e12),
    ("TPU v5 lite", 197e12),
    ("TPU v5p", 459e12),
    ("NVIDIA L40S", None),  # not an L4
    ("NVIDIA H200 NVL", None),
    ("TPU7x", 1153.5e12),
    ("cpu", None),
  ],
)
def test_peaks_are_found_by_the_kind_of_device(kind: str, peak: float | None):
  assert hardware.peak_flops(Device(kind), "bfloat16") == peak
  assert hardware.peak_flops(Device(kind), "float32") is None  # the table holds bfloat16 only


def test_memory_is_reported_if_the_backend_knows_it():
  assert hardware.memory_in_use([Device("cpu"), Device("cpu")]) == {}
  devices = [Device("gpu", {"bytes_in_use": gib * 2**30}) for gib in (1, 3)]
  assert hardware.memory_in_use(devices) == {"memory_gib": 3.0}


def shown(folder: Path) -> dict[str, list[tuple[int, float, float]]]:
  """The points that TensorBoard shows: files by name, and what a START follows is dropped from its step on."""
  points: dict[str, list[tuple[int, float, float]]] = {}
  for event in read_events(folder):
    if event.HasField("session_log"):
      points = {tag: [point for point in known if point[0] < event.step] for tag, known in points.items()}
    for value in event.summary.value:
      points.setdefault(value.tag, []).append((event.step, value.simple_value, event.wall_time))
  return points


@pytest.mark.parametrize("behind", [0, 3600, -3600])
def test_a_curve_never_goes_back_whatever_clocks_say(behind: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  """The second host's clock is an hour behind, the third has the first's again. Each start begins at the last save."""
  now = [1.8e9]
  monkeypatch.setattr(tensorboard.time, "time", lambda: now[0])
  for attempt, start in enumerate((LoopState(), LoopState(step=4, evaluated=False), LoopState(step=6))):
    now[0] = 1.8e9 + 10 * attempt - (behind if attempt == 1 else 0)
    with metrics.Writer(tmp_path, start, 10) as writer:
      if attempt == 1:
        writer.write(4, "validation", {"loss": 40.0})
      for step in range(start.step + 1, start.step + 5):
        now[0] += 1
        writer.write(step, "train", {"loss": float(10 * attempt + step)})
        if step == 4:
          writer.write(4, "validation", {"loss": 40.0})  # made again: the checkpoint of step 4 was saved before it
  points = shown(tmp_path / "tensorboard")
  assert [step for step, _, _ in points["train/loss"]] == list(range(1, 11))
  assert [step for step, _, _ in points["validation/loss"]] == [4]
  assert [value for _, value, _ in points["train/loss"]] == [1, 2, 3, 4, 15, 16, 27, 28, 29, 30]
  times = [time for _, _, time in sorted(points["train/loss"])]
  assert times == sorted(times)
  lines = [(line["step"], line["split"]) for line in metrics.read(tmp_path / "metrics.jsonl")]
  assert sorted(set(lines)) == sorted(lines)
