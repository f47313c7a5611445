"""Step `throughput`: our step against that of transformers' Llama on one device, both compiled, in bfloat16.

Measures as lab/benchmarks/throughput.py does, with its rounds in turns and its processes, and with as many rounds as
the time allows.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from configs import base
from errors import ConfigError
from lab.benchmarks import cells, figures, rounds, throughput, torch_llama
from lab.benchmarks.accelerator.step import RESERVE, Aim, Measurement, Values, Verdict, Where
from lab.benchmarks.options import parse
from reporting.pages.units import mfu

PRESET, ROUNDS = "throughput_gpu", 5
PEER = "bfloat16, compiled"  # how the peer must have run


def check_peer(where: Where, run: rounds.Run | None = None) -> None:
  """Raises ConfigError if the peer cannot use the GPU."""
  program = str(Path(torch_llama.__file__))
  found = where.run((where.peer_python, "-P", program), {"task": "device"}, run=run)
  if "error" in found:
    raise ConfigError(f"PyTorch cannot be measured: {found['error']}")
  if found["device"] != "cuda":
    raise ConfigError(
      f"PyTorch {found['versions']['torch']} finds no GPU here; install a build for this GPU, or name a Python that "
      "has one with --peer-python"
    )


def measure(where: Where, run: rounds.Run | None = None) -> Values:
  """A throughput record of the single device and the peer. It has the rounds that were complete in time."""
  check_peer(where, run)

  def in_time(command: Sequence[str], spec: dict[str, Any]) -> dict[str, Any]:
    result = where.run(command, spec, run=run)
    if where.left() < RESERVE + 1:
      raise KeyboardInterrupt  # the time is over; rounds.measure keeps the complete rounds
    return result

  options, _ = parse([f"--rows={cells.PEER}", "--devices=1", f"--rounds={ROUNDS}"])
  options.peer_python = where.peer_python
  found = {"hardware": where.hardware, "versions": where.versions}
  try:
    return throughput.measure(base.get_config(PRESET, "single"), options, found, in_time)
  except KeyboardInterrupt:
    raise ConfigError("not one round of all cells fits into the time of this step") from None


def judge(values: Values) -> Verdict:
  ours, theirs = figures.row(values, f"{cells.REFERENCE}/1"), figures.peers(values)
  broken = [f"{row.name}: {row.error}" for row in (ours, *theirs) if row.error]
  broken += [] if theirs else [f"PyTorch was left out: {values['left_out'].get(cells.PEER, 'no cell')}"]
  for row in theirs:
    ran = values["cells"][row.name]["rounds"]
    broken += [f"{row.name} ran in {ran[0]['precision']}, not in {PEER}"] if ran and ran[0]["precision"] != PEER else []
  ratio = _ratio(theirs)
  if broken or ratio is None:
    return Verdict(tuple(broken))
  return Verdict(
    aim=Aim(f"{ratio:.2f} times the speed of {cells.PEER_NAME}, of {figures.PEER_AIM:.2f}", ratio >= figures.PEER_AIM)
  )


def _ratio(theirs: Sequence[figures.Result]) -> float | None:
  """Our speed over that of the peer's fastest row; None if it has no figures."""
  return 1 / theirs[0].relative.median if theirs and theirs[0].relative else None


def row(values: Values) -> list[str]:
  """The cells of the table: our speed, the fastest of the peer's, their ratio, and our MFU, as PaLM counts, too."""
  ours, theirs = figures.row(values, f"{cells.REFERENCE}/1"), [row for row in figures.peers(values) if not row.error]
  if ours.error or not theirs:
    return ["not measured"] * len(STEP.columns)
  speed = lambda row: f"{row.per_second:,.0f} tokens/s, {row.seconds.median * 1e3:,.0f} ms"
  versions = values["cells"][theirs[0].name]["rounds"][0]["versions"]
  peer = ", ".join(f"{name} {version}" for name, version in versions.items())
  known = figures.is_mfu(values) and ours.flops_share and ours.palm_share
  share = mfu(ours.flops_share, ours.palm_share) if known else "–"
  return [speed(ours), f"{speed(theirs[0])} ({peer})", f"{_ratio(theirs):.2f}", share]


STEP = Measurement(
  name="throughput",
  about=(
    f"the speed of a model of 256M parameters on one device, beside {cells.PEER_NAME} with torch.compile, in bfloat16"
  ),
  promise="PyTorch is not there, cannot use the GPU, or one of the two cannot be measured",
  aim=f"at least {figures.PEER_AIM:.1f} times its speed",
  measure=measure,
  judge=judge,
  columns=("Meshwright", cells.PEER_NAME, "Ratio", "MFU"),
  row=row,
  platforms=("gpu",),  # PyTorch has no compiled step for TPUs to compare with
)
