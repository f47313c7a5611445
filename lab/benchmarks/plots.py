"""Draws the plots of a throughput record.

A plot carries the digest of its record in its metadata (`Record`), so that a test can recognize an outdated plot.
"""

from pathlib import Path

from lab.benchmarks.figures import Record, Result, rows

KINDS = ("speed", "memory")


def draw(folder: Path, name: str, record: Record, digest: str) -> None:
  """Writes NAME-speed.png and NAME-memory.png."""
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot

  measured = [row for row in rows(record) if not row.error]
  counts = sorted({row.devices for row in measured})
  labels = list(dict.fromkeys(row.row for row in measured))
  simulated = record["hardware"]["simulated"]
  word = "simulated devices" if simulated else "devices"
  width = 0.8 / max(1, len(counts))
  for kind in KINDS:
    figure, axes = pyplot.subplots(figsize=(10, 4), layout="constrained")
    for place, count in enumerate(counts):
      here = [row for row in measured if row.devices == count]
      x = [labels.index(row.row) + (place - (len(counts) - 1) / 2) * width for row in here]
      heights = [_height(row, kind) for row in here]
      color = matplotlib.colormaps["viridis"](0.1 + 0.8 * place / max(1, len(counts) - 1))
      axes.bar(x, heights, width * 0.92, color=color, label=f"{count} {word}" if count > 1 else "1 device")
      if kind == "speed":
        below = [row.relative.median - row.relative.low for row in here]
        above = [row.relative.high - row.relative.median for row in here]
        axes.errorbar(x, heights, yerr=(below, above), fmt="none", ecolor="0.3", elinewidth=0.8, capsize=1.5)
      else:
        predicted = [(at, row.predicted["bytes"] / 1e6) for at, row in zip(x, here, strict=True) if _bytes(row)]
        if predicted:
          axes.plot(*zip(*predicted, strict=True), "_", color="red", markersize=8, label="predicted" * (place == 0))
    axes.set_xticks(range(len(labels)), labels, rotation=20)
    if kind == "speed":
      axes.axhline(1, color="0.5", linewidth=0.8, linestyle="--")
      axes.set_ylabel("throughput, single device = 1")
      axes.set_title(f"{name}: " + ("overhead on shared cores, not scaling" if simulated else "throughput"))
    else:
      axes.set_ylabel("memory of a device, MB")
      axes.set_title(f"{name}: memory of a device, " + ("as compiled" if simulated else "peak"))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=5, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.18))
    figure.savefig(folder / f"{name}-{kind}.png", dpi=110, metadata={"Record": digest})
    pyplot.close(figure)


def _height(row: Result, kind: str) -> float:
  return row.relative.median if kind == "speed" else (row.bytes or 0) / 1e6


def _bytes(row: Result) -> bool:
  return bool(row.predicted and row.predicted.get("bytes"))


def digest_of(picture: Path) -> str | None:
  """The digest of the record that a plot was drawn from."""
  from PIL import Image

  with Image.open(picture) as image:
    return image.info.get("Record")
