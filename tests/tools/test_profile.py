"""Traces: what is read of each kind of device, the figures by hand-computed times, and the command on a real run."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers import config, one_sentence
from jax.profiler import ProfileData

import train
from lab.analysis import profile, trace
from runtime import hardware
from tools import profile as command

US = 1e-6  # the times of hand-made events are microseconds
Made = tuple[str, float, float, dict[str, object]]  # name, start, end, stats
TINY = {
  "model__depth": 2, "model__width": 32, "model__heads": 8, "model__kv_heads": 8, "model__seq_len": 8,
  "data__name": "synthetic", "steps": 4, "eval_examples": 8, "eval_batch_size": 8, "sample_length": 0,
}  # fmt: skip


def plane(name: str, lines: dict[str, Sequence[Made]], stats: dict[str, object] | None = None) -> str:
  """A plane in protobuf's text format."""
  names = sorted({event[0] for events in lines.values() for event in events})
  keys = sorted({k for events in lines.values() for event in events for k in event[3]} | set(stats or {}))
  text = f'name: "{name}"\n'
  for i, of in enumerate(names):
    text += f'event_metadata {{ key: {i} value {{ id: {i} name: "{of}" }} }}\n'
  for i, of in enumerate(keys):
    text += f'stat_metadata {{ key: {i} value {{ id: {i} name: "{of}" }} }}\n'

  def written(values: dict[str, object]) -> str:
    kinds = {k: f"int64_value: {v}" if isinstance(v, int) else f'str_value: "{v}"' for k, v in values.items()}
    return "".join(f"stats {{ metadata_id: {keys.index(k)} {kind} }} " for k, kind in kinds.items())

  for i, (line, events) in enumerate(lines.items()):
    text += f'lines {{ id: {i} name: "{line}"\n'
    for of, start, end, values in events:
      times = f"offset_ps: {int(start * 1e6)} duration_ps: {int((end - start) * 1e6)}"
      text += f"events {{ metadata_id: {names.index(of)} {times} {written(values)} }}\n"
    text += "}\n"
  return f"planes {{ {text} {written(stats or {})} }}\n"


def message(**fields: object) -> bytes:
  """A message in protobuf's wire format. `_N` is field N: text or bytes, or a list of them."""
  out = b""
  for name, values in fields.items():
    for value in values if isinstance(values, list) else [values]:
      data = value if isinstance(value, bytes) else str(value).encode()
      size = bytes([len(data)]) if len(data) < 128 else bytes([len(data) & 127 | 128, len(data) >> 7])
      out += bytes([int(name[1:]) << 3 | 2]) + size + data
  return out


def programs(name: str, instructions: dict[str, tuple[str, str]]) -> bytes:
  """A plane that holds a compiled program: instruction → operation and op_name."""
  found = [message(_1=i, _2=operation, _7=message(_2=origin)) for i, (operation, origin) in instructions.items()]
  hlo = message(_1=message(_1=name, _3=message(_2=found)))
  return message(_1=message(_2="/host:metadata", _4=message(_2=message(_2=name, _5=message(_6=hlo)))))


def read(planes: str, compiled: bytes = b"") -> trace.Trace:
  """Reads a trace of these planes, which a run of two steps recorded."""
  host = plane("/host:CPU", {"python": [("train", 0, 1, {"step_num": n}) for n in (7, 8)]})
  return trace.read([ProfileData.text_proto_to_serialized_xspace(host + planes) + compiled], "train")


def gpu() -> trace.Trace:
  """Two steps of 100 µs on a GPU: 40 of arithmetic, then an all-gather of 40, 10 of which arithmetic hides."""
  names = {"hlo_module": "jit_train_step", "program_id": 3}
  compute, copies, more = [], [], []
  for t in (0, 100):
    compute += [("gemm_kernel", t, t + 40, names | {"hlo_op": "gemm.1"})]
    compute += [("loop_kernel", t + 45, t + 55, names | {"hlo_op": "command_buffer_1"})]
    copies += [("ncclDevKernel_AllGather_RING_LL", t + 45, t + 85, names | {"hlo_op": "all-gather-start.2"})]
    more += [("MemcpyD2D", t + 90, t + 95, {})]
  lines = {"Stream #13(Kernel)": compute, "Stream #14(Kernel)": copies, "Stream #15(MemcpyD2D)": more}
  lines["_counters_"] = [("power", 0, 1000, {})]
  return read(plane("/device:GPU:0", lines, {"gpu_device_name": "NVIDIA H100 80GB HBM3"}))


def test_a_gpus_time_is_read_from_its_streams():
  found = gpu()
  assert found.steps == (7, 8)
  (device,) = found.devices
  assert device.kind == "NVIDIA H100 80GB HBM3"
  assert {event.name for event in device.ran} == {"gemm.1", "loop_kernel", "all-gather-start.2", "MemcpyD2D"}
  figures = profile.profile(found)
  # Each step is busy from 0 to 40, 45 to 85 and 90 to 95 µs. The second one ends with its last operation, at 85 µs.
  assert figures.median == pytest.approx((100 + 85) / 2 * US)
  assert figures.idle.mean == pytest.approx((15 + 5) / 185)
  assert figures.exposed.mean == pytest.approx((30 + 30) / 185)
  assert list(figures.operations)[:2] == ["gemm.1", "all-gather-start.2"]
  assert figures.operations["gemm.1"].seconds == pytest.approx(40 * US)
  assert figures.operations["loop_kernel"].count == 1
  (((kind, axes), cost),) = profile.collectives(found, lambda name: ("data",)).items()
  assert (kind, axes, cost.count, cost.seconds) == ("all-gather", ("data",), 1, pytest.approx(40 * US))


def test_a_tpus_time_is_read_from_its_operations_and_transfers():
  """An all-gather is in flight from 10 to 80 µs, beside a product until 60. The core waits for it from 60 to 80."""
  ops, flights, modules = [], [], []
  for t in (0, 100):
    ops += [
      ("%all-gather-start.1 = (f32[8]) all-gather-start(%p)", t, t + 10, {}),
      ("%while.4 = (f32[8]) while(%p)", t + 10, t + 95, {}),
      ("%fusion.2 = f32[8] fusion(%p)", t + 10, t + 60, {}),
      ("%all-gather-done.1 = f32[8] all-gather-done(%a)", t + 60, t + 80, {}),
      ("%custom.7 = f32[8] fusion(%p)", t + 80, t + 95, {}),
    ]
    flights += [("all-gather-start.1", t + 10, t + 80, {}), ("copy-start.3", t + 95, t + 99, {})]
    modules += [("jit_train_step(42)", t, t + 95, {})]
  lines = {"Steps": [("7", 0, 100, {})], "XLA Modules": modules, "XLA Ops": ops, "Async XLA Ops": flights}
  origins = {"fusion.2": ("fusion", "jit(train_step)/jvp(mlp)/dot_general"), "custom.7": ("all-reduce", "psum")}
  found = read(plane("/device:TPU:0", lines), programs("jit_train_step(42)", origins))
  assert [(device.kind, len(device.ran), len(device.sent)) for device in found.devices] == [("TPU", 8, 4)]
  figures = profile.profile(found)
  assert figures.median == pytest.approx((100 + 95) / 2 * US)
  assert figures.idle.mean == pytest.approx(5 / 195)  # between the steps, where only a copy is in flight
  assert figures.exposed.mean == pytest.approx(2 * (10 + 20 + 15) / 195)
  assert figures.origins["fusion.2"].op_name == "jit(train_step)/jvp(mlp)/dot_general"
  measured = profile.collectives(found, lambda name: (name,))
  assert measured["all-gather", ("all-gather-start.1",)] == profile.Cost(1, pytest.approx(80 * US))
  assert measured["all-reduce", ("custom.7",)] == profile.Cost(1, pytest.approx(15 * US))


def test_a_device_that_waits_more_shows_in_the_range():
  names = {"hlo_module": "jit_train_step", "program_id": 3}
  planes = ""
  for number, length in enumerate((50, 90)):
    events = [("kernel", t, t + length, names | {"hlo_op": "dot.1"}) for t in (0, 100)]
    end = [("kernel", t + 99, t + 100, names | {"hlo_op": "dot.2"}) for t in (0, 100)]
    planes += plane(f"/device:GPU:{number}", {"Stream #1": events + end})
  idle = profile.profile(read(planes)).idle
  assert (idle.mean, idle.low, idle.high) == pytest.approx((0.29, 0.09, 0.49))


def test_the_training_step_is_the_program_that_runs_once_a_step():
  """An evaluation of three batches takes longer, and has an operation of the same name."""
  step = {"hlo_module": "jit_train_step", "program_id": 3, "hlo_op": "dot.1"}
  evaluation = {"hlo_module": "jit_eval_step", "program_id": 4, "hlo_op": "dot.1"}
  events = [("k", t, t + 10, step) for t in (0, 100)] + [("k", t, t + 20, evaluation) for t in (20, 40, 60)]
  found = profile.profile(read(plane("/device:GPU:0", {"Stream #1": events})))
  assert {name: cost.count for name, cost in found.operations.items()} == {"dot.1": 1, "jit_eval_step(4)/dot.1": 1.5}
  assert found.median == pytest.approx((100 + 10) / 2 * US)
  assert found.idle.mean == pytest.approx(30 / 110)


@pytest.mark.parametrize("events", [[], [("k", 0, 1, {"hlo_module": "jit_f", "hlo_op": "dot.1"})]])
def test_a_trace_without_whole_steps_is_refused(events: list[Made]):
  with pytest.raises(profile.Unreadable, match=r"nothing that a device ran|2 whole steps"):
    profile.profile(read(plane("/device:GPU:0", {"Stream #1": events})))


@pytest.mark.parametrize(
  "event, operation, kind",
  [
    ("all-gather-start.1", "all-gather-start", "all-gather"),
    ("reduce-scatter-done.1", "async-done", "reduce-scatter"),
    ("psum.3", "all-reduce", "all-reduce"),
    ("all-reduce-scatter.5", "fusion", "reduce-scatter"),
    ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", None, "collective-permute"),
    ("all-to-all.8", None, "all-to-all"),
    ("gather.2", "gather", None),
    ("reduce.2", None, None),
  ],
)
def test_collectives_are_told_from_other_operations(event: str, operation: str | None, kind: str | None):
  known = {"jit_f(1)": {event: trace.Origin(operation, "")}} if operation else {}
  assert profile.kind_of(trace.Event(event, "jit_f(1)", 0, 1), trace.Device("GPU", known, ())) == kind


@pytest.mark.parametrize(
  "op_name, short",
  [
    ("jit(train_step)/jvp()/while/body/closed_call/mlp/dot_general", "forward/mlp/dot_general"),
    ("jit(train_step)/transpose(jvp(head))/dot_general", "backward/head/dot_general"),
    (
      "jit(train_step)/transpose(jvp())/while/body/closed_call/checkpoint/rematted_computation/mul",
      "backward/recompute/mul",
    ),
    ("jit(train_step)/jit(_where)/select_n", "select_n"),
    ("jit(train_step)/(mul:mul:jvp()/reduce_sum)", "mul + forward/reduce_sum"),
    ("jit(train_step)/jvp()/bts,bsh->bth/dot_general", "forward/bts,bsh->bth/dot_general"),
    ("", ""),
  ],
)
def test_scopes_are_short(op_name: str, short: str):
  assert profile.scope(op_name) == short


def test_a_program_from_the_compilation_cache_is_found_by_its_name():
  """Its events name it with the number that it had when it was compiled."""
  names = {"hlo_module": "jit_train_step", "program_id": 13, "device_ordinal": 0}
  ops = [("psum.3", t, t + 10, names | {"hlo_op": "psum.3"}) for t in (0, 100)]
  loop = [("loop", t, t + 100, names | {"hlo_op": "while.1"}) for t in (0, 100)]
  instructions = {"psum.3": ("all-reduce", "psum"), "while.1": ("while", "")}
  found = read(plane("/host:CPU", {"thread": ops + loop}), programs("jit_train_step(15)", instructions))
  (device,) = found.devices
  assert [(event.name, event.program) for event in device.ran] == [("psum.3", "jit_train_step(13)")] * 2
  assert profile.profile(found).origins["psum.3"].op_name == "psum"
  assert profile.profile(found).exposed.mean == pytest.approx(20 / 110)


def test_a_program_is_found_although_another_has_its_number():
  """The process may have given the number that a cached program was compiled with to another program of that name."""
  names = {"hlo_module": "jit_train_step", "program_id": 13, "device_ordinal": 0}
  ops = [("psum.3", t, t + 10, names | {"hlo_op": "psum.3"}) for t in (0, 100)]
  other = programs("jit_train_step(13)", {"psum.2": ("all-gather", "other"), "add.1": ("add", "other")})
  ran = programs("jit_train_step(15)", {"psum.3": ("all-reduce", "psum")})
  found = read(plane("/host:CPU", {"thread": ops}), other + ran)
  assert profile.profile(found).origins == {"psum.3": ("all-reduce", "psum")}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """The workdir of a run that recorded two steps."""
  workdir = tmp_path_factory.mktemp("recorded")
  train.train(config("fsdp", profile__start=1, profile__steps=2, **TINY), workdir)
  return workdir


@pytest.mark.full
def test_the_command_reads_a_run(recorded: Path, capsys: pytest.CaptureFixture):
  command.main([str(recorded), "--top=50"])
  printed = capsys.readouterr().out
  assert printed.startswith("steps 1 to 2, on 8 × CPU: ")
  assert "No times are predicted: the peak speeds of 'cpu' are not known." in printed
  rows = [line.split() for line in printed.splitlines()]
  # fsdp gathers 7 weights of each of the 2 blocks, forward and backward, the embedding and the head.
  assert ["all-gather", "data", "30"] in [row[:3] for row in rows]
  assert any(row[1:2] and row[1].startswith(("forward/", "backward/")) for row in rows)
  headings = [i for i, row in enumerate(rows) if row[:1] in (["operation"], ["collective"])]
  assert headings[1] - headings[0] == 50 + 4  # with two lines, the rest, and an empty line


@pytest.mark.full
def test_every_collective_of_the_compiled_step_is_in_the_trace(recorded: Path):
  """The trace's names are those of the program that explain compiles, and each runs as often as that says."""
  (file,) = command.recording(recorded).glob("*.xplane.pb")
  found = trace.read([file.read_bytes()], "train")
  expected, missing = command.predicted(command.config_of(recorded), found.devices)
  assert "cpu" in missing
  counts = {name: cost.count for name, cost in profile.profile(found).operations.items()}
  assert len(expected) > 10
  assert expected.keys() <= counts.keys()
  assert {kind for kind, _ in profile.collectives(found, lambda name: ())} == {e.kind for e in expected.values()}


@pytest.mark.full
def test_predicted_times_are_printed_where_the_peaks_are_known(
  recorded: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
  figures = hardware.Chip(flops=1e12, memory=1e9, bandwidth=1e11, link=1e6)
  monkeypatch.setattr(command, "chip", lambda kind: figures)
  command.main([str(recorded)])
  printed = capsys.readouterr().out
  assert "No times" not in printed
  row = next(line.split() for line in printed.splitlines() if line.startswith("all-gather  "))
  # Each device sends 7/8 of every weight, 4 bytes a parameter, at 1 MB/s: blocks twice, embedding and head once.
  block = 4 * 32 * 32 + 3 * 32 * 128
  sent = 7 / 8 * 4 * (2 * 2 * block + 2 * 256 * 32)
  assert float(row[-2]) == pytest.approx(1e3 * sent / 1e6, abs=0.1)
  assert row[-1] == "ms"


@pytest.mark.full
def test_another_machine_predicts_nothing_and_says_why(recorded: Path):
  devices = (trace.Device("NVIDIA H100 80GB HBM3", {}, ()),) * 8
  expected, missing = command.predicted(command.config_of(recorded), devices)
  assert (expected, missing) == ({}, "the run had 8 × NVIDIA H100 80GB HBM3, and this machine has 8 × CPU")


def test_a_workdir_without_a_profile_is_refused(tmp_path: Path):
  with one_sentence("workdir=", "--config.profile.steps=5"):
    command.main([str(tmp_path)])
