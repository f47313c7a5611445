"""The inputs of tools.failures: their defaults, and where each default comes from."""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from lab.analysis.failures import DEVICES, PUBLISHED, Job, Rates
from lab.failure_policies import Times, spares_for
from runtime.hardware import CHIPS

HOUR, DAY = 3600.0, 86_400.0
_LLAMA3 = "published: {} in 54 days on 16,384 GPUs (arXiv:2407.21783)".format
_RSC1 = "published: 6.50 in 1,000 days of a host, of any kind (arXiv:2410.21680)"
RATES = {"llama3": (_LLAMA3(268), _LLAMA3(53), _LLAMA3(98)), "rsc1": (_RSC1, _RSC1, _RSC1)}  # of the first three
STATE = 12  # bytes of a parameter in a checkpoint: the weight and AdamW's two moments, in float32
# 405 billion parameters on 8,960 GPUs (table 8 of arXiv:2407.20143): seconds that training waits for a save, seconds
# until it is complete, and seconds to load it.
SAVED = "published: 405e9 parameters on 8,960 GPUs (arXiv:2407.20143)"
SAVED_ON, SAVED_PARAMETERS, WAITS, COMPLETE, LOADS = 8960, 405e9, 0.59, 51.06, 129.49


class Value(NamedTuple):
  """An input in seconds, and where it comes from."""

  seconds: float
  source: str


@dataclasses.dataclass(frozen=True)
class Inputs:
  """What is simulated. `values` has each input by the name of its flag."""

  job: Job
  times: Times
  spares: int
  values: dict[str, Value]


def inputs(
  devices: int,
  work: float,
  parameters: float,
  rates: str = "llama3",
  storage: float | None = None,
  spares: int | None = None,
  given: Mapping[str, float] | None = None,
) -> Inputs:
  """The inputs of a job.

  Args:
    devices: a multiple of 8.
    work: seconds of training.
    parameters: of the model.
    rates: whose failures, a key of `PUBLISHED`.
    storage: bytes a second between a host and storage; by default saves and restores are as fast as published ones.
    spares: hosts that stand by; by default enough for nearly all times.
    given: seconds that replace defaults, by name.
  """
  found: dict[str, Value] = {}

  def put(name: str, seconds: float, source: str) -> float:
    found[name] = Value(given[name], "given") if given and name in given else Value(seconds, source)
    return found[name].seconds

  published = PUBLISHED[rates]
  failures = Rates(
    put("mtbf", published.device * HOUR, RATES[rates][0]) / HOUR,
    put("host-mtbf", published.host * HOUR, RATES[rates][1]) / HOUR,
    put("other-mtbf", published.other * HOUR, RATES[rates][2]) / HOUR,
  )
  state = STATE * parameters / devices  # bytes of a device
  scale = parameters / SAVED_PARAMETERS * SAVED_ON / devices
  scaled = f"{SAVED}; times {scale:.3g}, the state of a device"
  copy = put("copy", WAITS * scale, scaled)
  if storage is None:
    write, restore = put("write", (COMPLETE - WAITS) * scale, scaled), put("restore", LOADS * scale, scaled)
  else:
    seconds = state * DEVICES / storage
    predicted = f"predicted: {state * DEVICES / 1e9:.3g} GB of a host at {storage / 1e9:g} GB/s"
    write, restore = put("write", seconds, predicted), put("restore", seconds, predicted)
  send = state / CHIPS["NVIDIA H100"].network
  fetch = put("fetch", copy + send, "predicted: a copy, and a host's part over H100s' network at its peak")
  step = put(
    "step",
    6 * parameters * 2**24 / (16_384 * 400e12),
    "predicted: 16.8e6 tokens on 16,384 GPUs, each at 400 TFLOP/s (arXiv:2407.21783)",
  )
  start = put("start", 10 * 60, "published: under 10 minutes to detect and diagnose, on average (arXiv:2402.15627)")
  job = Job(devices, work, failures, start, put("repair", DAY, "assumed: we know of no published figure"))
  return Inputs(job, Times(copy, write, restore, send, fetch, step), spares or spares_for(job), found)
