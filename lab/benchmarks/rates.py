"""Fits what a step really takes to measured and published steps, and predicts each of them from the others.

    python -m tools.benchmark rates             # fits, writes the record, and the table of docs/evidence.md
    python -m tools.benchmark rates --tables    # writes the table from the existing record

Takes a few seconds and needs no devices. The time of a step is that of its products, of attention and of memory traffic
at the peak (lab/analysis/predict.py), each times a constant of the platform, and what the links expose
(`lab.analysis.reached.Rates`). Products never take less than at the peak. Attention's constant is measured apart on
GPUs: by the kernel's time in the record of `make accelerator`. On TPUs it is that of products. So each platform has two
constants to fit. The fit is the least sum of the squares of relative errors. Put its constants into `RATES` then.
"""

import argparse
import dataclasses
import json
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from configs import base
from lab.analysis import predict
from lab.analysis.reached import Rates
from lab.analysis.roofline import Roofline
from lab.analysis.topology import machine_of
from lab.benchmarks import header, published
from lab.benchmarks.pages import RESULTS, fill
from lab.benchmarks.predictions import PAGE, RECORDS, case_on, config
from lab.benchmarks.sections import table

RECORD = RESULTS / "rates.json"
MEASURED = RESULTS / "accelerator-1-nvidia-h100-80gb-hbm3.json"
NO_LOOP = "its blocks are in no loop"
LATER = RESULTS / "accelerator-1-nvidia-h200.json"  # measured after the fit, and with NO_LOOP
OURS = "ours"
MIDDLE = 912e12  # between the peaks of an H100 SXM and an H100 NVL


@dataclasses.dataclass(frozen=True)
class Row:
  """A measured step, and the times of its parts at the peak by our formulas.

  Attributes:
    group: rows of the same source are not independent of each other.
    seconds: measured.
    best: the least seconds, with the figures of the devices that ran it.
  """

  group: str
  what: str
  platform: str
  seconds: float
  times: Roofline
  best: float
  unlike: str = ""


def ours() -> list[Row]:
  """The steps of this repository that were measured on a GPU, from the records of `make accelerator`."""
  steps, later = (json.loads(file.read_text())["steps"] for file in (MEASURED, LATER))
  model, small, on_h200 = (
    one["values"] for one in (steps["language_model"], steps["throughput"], later["language_model"])
  )
  timed = [second for done in small["cells"]["single/1"]["rounds"] for second in done["seconds"]]
  rows = []
  for device, preset, strategy, batch_size, seconds, unlike in (
    ("H100", model["preset"], "fsdp", model["batch_size"], model["step_ms"] / 1e3, ""),
    ("H100", "throughput_gpu", "single", small["config"]["batch_size"], statistics.median(timed), ""),
    ("H200", on_h200["preset"], "fsdp", on_h200["batch_size"], on_h200["step_ms"] / 1e3, NO_LOOP),
  ):
    where, asked = machine_of(f"{device.lower()}:1x1"), base.get_config(preset, strategy)
    asked.batch_size = batch_size
    case = case_on(where, asked)
    times = predict.times(case, where.chip, where.links(case.layout.mesh))
    rows.append(Row(OURS, f"`{preset}`, 1 {device}", "gpu", seconds, times, times.seconds, unlike))
  return rows


def others(slower: float | None = None) -> list[Row]:
  """The published steps, with the figures of the devices that ran them.

  Args:
    slower: the peak of torchtitan's H100s, which is not known; by default as in `published.SLOWER`.
  """
  rows = []
  for one in published.ROWS:
    case, where = published.case_of(one)
    figures = one.figures | ({"flops": slower} if slower and one.figures else {})
    chip = dataclasses.replace(where.chip, **figures)
    times = predict.times(case, chip, where.links(case.layout.mesh))
    narrow = predict.block_flops(case) / 2 / chip.flops if one.float8 else 0.0
    times = dataclasses.replace(times, compute=times.compute - narrow)
    seconds = published.measured(one, case)
    rows.append(Row(one.source, one.what, where.platform, seconds, times, times.seconds, one.unlike))
  for way in published.WAYS:
    where = machine_of(way.case[1])
    case = case_on(where, config(way.case))
    times = predict.times(case, where.chip, where.links(case.layout.mesh))
    what = f"{way.case[3]:,} tokens, {way.theirs}"
    rows.append(Row("MaxText-4687", what, where.platform, way.seconds, times, times.seconds, way.unlike))
  return rows


def of_attention() -> float:
  """The time of attention's kernel on a GPU over that at the peak: forward and backward, causal, heads of 128."""
  values = json.loads(MEASURED.read_text())["steps"]["attention"]["values"]
  row = next(row for row in values["rows"] if row["case"]["name"] == "causal, 16/16 heads of 128")
  pairs = values["batch"] * 16 * values["length"] * (values["length"] + 1) / 2
  return row["seconds"]["cudnn"] * machine_of("h100:1x1").chip.flops / (3.5 * 4 * 128 * pairs)  # as predict.py counts


def starts() -> dict[str, float]:
  """Seconds to compile a step: of our model on a GPU, which times its kernels meanwhile, and the median for TPUs."""
  cell = json.loads(MEASURED.read_text())["steps"]["throughput"]["values"]["cells"]["single/1"]
  cases = json.loads(RECORDS["tpu"].read_text())["cases"]
  return {"gpu": cell["compile_seconds"], "tpu": statistics.median(case["compile_seconds"] for case in cases)}


def fit(rows: Sequence[Row], attention: float | None) -> Rates:
  """The constants of the products and of memory that fit these rows best.

  Args:
    attention: its constant; None: that of products.
  """
  columns, left = [], []
  for row in rows:
    times = row.times
    alike = times.compute - (times.attention if attention else 0.0)
    columns.append([alike / (1 - times.idle) / row.seconds, times.memory / (1 - times.idle) / row.seconds])
    left.append(1 - (times.exposed + times.update + (attention or 0.0) * times.attention) / row.seconds)
  found, *_ = np.linalg.lstsq(np.array(columns), np.array(left))
  if found[0] < 1:  # no device is faster than its peak
    found = np.array([1.0, np.dot(np.array(left) - np.array(columns)[:, 0], np.array(columns)[:, 1])])
    found[1] /= np.sum(np.array(columns)[:, 1] ** 2)
  products, memory = float(found[0]), max(float(found[1]), 0.0)
  return Rates(products, attention or products, memory, 0.0, (), len(rows), 0.0, 0.0)


def errors(rows: Sequence[Row], attention: float | None) -> tuple[float, float]:
  """The median and the largest error of rows that are predicted from the others."""
  alone = lambda row: fit([other for other in rows if other is not row], attention).seconds(row.times)
  found = [abs(alone(row) / row.seconds - 1) for row in rows]
  return statistics.median(found), max(found)


def compared() -> dict[str, Any]:
  """The fit of both platforms, and each row as it is predicted from the others, and from other sources alone."""
  rows, attention, fitted = [*ours(), *others()], {"gpu": of_attention(), "tpu": None}, {}
  written = []
  for platform, constant in attention.items():
    here = [row for row in rows if row.platform == platform]
    used = [row for row in here if not row.unlike]
    apart_off = []
    for row in here:
      alone = fit([other for other in used if other is not row], constant).seconds(row.times)
      apart = fit([other for other in used if other.group != row.group], constant).seconds(row.times)
      apart_off += [] if row.unlike else [abs(apart / row.seconds - 1)]
      written.append(
        {
          "source": row.group, "what": row.what, "platform": platform, "seconds": row.seconds, "best": row.best,
          "expected": alone, "from_other_sources": apart, "unlike": row.unlike,
        }
      )  # fmt: skip
    found, (median, largest) = fit(used, constant), errors(used, constant)
    fitted[platform] = {
      "products": found.products, "attention": found.attention, "memory": found.memory, "start": starts()[platform],
      "rows": len(used), "median": median, "largest": largest,
      "from_other_sources": [statistics.median(apart_off), max(apart_off)],
    }  # fmt: skip
  if_middle = [row for row in [*ours(), *others(MIDDLE)] if row.platform == "gpu" and not row.unlike]
  fitted["gpu"]["with_middle"] = errors(if_middle, attention["gpu"])
  return {"command": "python -m tools.benchmark rates", "fitted": fitted, "rows": written}


def tables(record: dict[str, Any]) -> dict[str, str]:
  """The generated part of docs/evidence.md."""
  reasons = list(dict.fromkeys(row["unlike"] for row in record["rows"] if row["unlike"]))
  rows = []
  for row in record["rows"]:
    link = row["source"] if row["source"] == OURS else f"[{row['source']}]({published.SOURCES[row['source']]})"
    shown = (f"{row[name]:.3g}" for name in ("seconds", "best"))
    mark = f"<sup>{reasons.index(row['unlike']) + 1}</sup>" if row["unlike"] else ""
    rows.append((f"{link} {row['what']}", *shown, f"{row['expected'] / row['seconds'] - 1:+.0%}{mark}"))
  heads = ("Run", "Step, s", "At best", "Expected, off by")
  notes = "; ".join(f"<sup>{number}</sup> {reason}" for number, reason in enumerate(reasons, 1))
  of = lambda name, one: (
    f"{name}: products × {one['products']:.2f}, attention × {one['attention']:.2f}, memory × {one['memory']:.2f}; "
    f"errors: median {one['median']:.0%}, largest {one['largest']:.0%}; from other sources alone "
    + " and ".join(f"{error:.0%}" for error in one["from_other_sources"])
  )
  middle = " and ".join(f"{error:.0%}" for error in record["fitted"]["gpu"]["with_middle"])
  said = [
    f"{of('GPUs', record['fitted']['gpu'])}; with {MIDDLE / 1e12:.0f} TFLOP/s for torchtitan's {middle}.",
    f"{of('TPUs', record['fitted']['tpu'])}.",
  ]
  below = [f"Not fitted: {notes}.", "", *said, "", f"`{record['command']}`, by formula."]
  return {"rates": "\n".join([*table(heads, rows), "", *below])}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--tables", action="store_true", help="write the table from the existing record")
  if not parser.parse_args().tables:
    begun = header.started()
    header.write(RECORD, {**header.host(), **begun, **compared()})
  made = tables(json.loads(RECORD.read_text()))
  PAGE.write_text(fill(PAGE.read_text(), made))
  print(*made.values())
