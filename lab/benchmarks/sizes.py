"""Writes the table of docs/choosing-sizes.md: from which size on a step is bound by arithmetic, with worked problems.

    python -m tools.benchmark sizes

An inequality needs two figures of a device (runtime/hardware.py): FLOP/s, and bytes/s of its links. Beside it stands
what the planner's formulas say of the same model on the same devices (lab/analysis/theory.py, predict.py).
"""

import dataclasses

import strategies
from configs import base
from lab.analysis import predict, theory
from lab.analysis.case import Case, ring_share
from lab.analysis.shapes import model_of
from lab.analysis.topology import Machine, machine_of
from lab.benchmarks.pages import ROOT, fill
from models.sizes import ModelSizes
from strategies.execution.mesh import resolve
from training import settings

PAGE = ROOT / "docs" / "choosing-sizes.md"
LENGTH = 256  # of the sequences
MANY = 64 * LENGTH  # tokens


@dataclasses.dataclass(frozen=True)
class Problem:
  """A strategy, a model and devices, and the condition under which arithmetic takes longer than sending.

  Attributes:
    axes: over which it sends.
    factor: of `FLOP/s ÷ bytes/s` in the least number of tokens.
    divided: by how many devices what is sent is divided first.
  """

  name: str
  params: float
  topology: str
  axes: tuple[str, ...]
  condition: str
  factor: float = 1.0
  divided: int = 1
  mesh: dict[str, int] = dataclasses.field(default_factory=dict)

  @property
  def where(self) -> Machine:
    return machine_of(self.topology)

  def case(self, tokens: float) -> Case:
    """The step with about so many tokens for each group of devices that work on the same tokens."""
    config = base.get_config("lm", self.name)
    config.model.update(model_of(self.params, LENGTH) | {"dtype": "bfloat16", "remat": "dots"})
    sizes: ModelSizes = settings.program(config, self.where.platform).sizes
    layout = resolve(strategies.layout_of(self.name), self.where.count, self.mesh)
    shards = layout.shards("batch")
    return Case(layout, sizes, shards * max(1, round(tokens / LENGTH)), compiler=self.where.platform)

  def devices(self) -> int:
    """The devices of a group along the axes."""
    return self.case(LENGTH).devices(self.axes)

  def bandwidth(self) -> float:
    """Bytes/s that a device sends along the axes."""
    return self.where.links(self.case(LENGTH).layout.mesh).bandwidth("all-gather", self.axes)

  def ratio(self) -> float:
    """FLOPs in the time of a byte."""
    return self.where.chip.flops / self.bandwidth()

  def least(self) -> float:
    """By the inequality: the tokens of a group from which on arithmetic takes longer."""
    return self.factor * ring_share(self.devices()) * self.ratio() / self.divided

  def by_plan(self) -> float:
    """The same by the planner's formulas: where products and messages of the blocks take equally long."""
    case = self.case(MANY)
    links = self.where.links(case.layout.mesh)
    rows = [row for row in theory.sent(case) if row.axes == self.axes]
    sent = sum((row.bytes - row.edges) / links.bandwidth(row.kind, row.axes) for row in rows)
    return MANY * sent / (predict.block_flops(case) / self.where.chip.flops)

  def share(self, tokens: float) -> float:
    """Of a step at best: the time of its arithmetic."""
    case = self.case(tokens)
    times = predict.times(case, self.where.chip, self.where.links(case.layout.mesh))
    return times.compute / times.seconds

  def shares(self) -> list[float]:
    """With a quarter of the least tokens, with the least, and with four times as many."""
    return [self.share(times * self.least()) for times in (1 / 4, 1, 4)]


class OfWidth(Problem):
  """Tensor parallelism: the devices among which a block can be split, whatever the tokens are."""

  def most(self) -> float:
    """By the inequality. 20 bytes of each number of the stream: 6 gathers and 4 scatters in bfloat16."""
    sizes = self.case(LENGTH).sizes
    keys = sizes.width * sizes.kv_heads // sizes.heads
    block = 2 * sizes.width * (sizes.width + keys) + 3 * sizes.width * sizes.mlp_width
    return 1 + 6 / 20 * block / sizes.width / self.ratio()

  def by_plan_most(self) -> float:
    """With n devices, n - 1 times as much is sent for each FLOP."""
    return 1 + (self.devices() - 1) * MANY / self.by_plan()

  def shares(self) -> list[float]:
    """Of 2, 4 and 8 devices."""
    host = self.topology.rpartition("x")[0]
    return [dataclasses.replace(self, topology=f"{host}x{count}").share(MANY) for count in (2, 4, 8)]


DATA, ALL = "T > ⅔ · (n − 1)/n · C/W", "T > (n − 1)/n · C/W"
PROBLEMS = (
  Problem("data_parallel", 1e9, "h100:1x8", ("data",), DATA, 2 / 3),
  Problem("fsdp", 7e9, "v5p:4x4x4", ("data",), ALL),
  Problem("fsdp", 7e9, "h100:32x8", ("data",), ALL),
  OfWidth("tensor_parallel", 8e9, "h100:1x8", ("model",), "n < 1 + 0.3 · B/D · W/C"),
  Problem("two_d", 70e9, "h100:32x8", ("data",), ALL, mesh={"model": 8}),
  Problem(
    "hsdp", 7e9, "h100:32x8", ("replica",), "T > ⅔ · (r − 1)/r · C/(n · W)", 2 / 3, divided=8, mesh={"replica": 32}
  ),
)


def table() -> str:
  """A row for each problem."""
  lines = [
    "| Strategy | Arithmetic takes longer if | For example | C/W, FLOPs a byte | So | Its share of `plan`'s step |",
    "|---|---|---|---|---|---|",
  ]
  for one in PROBLEMS:
    what = f"{one.params / 1e9:g}B on {one.topology}" + "".join(f", {axis}={size}" for axis, size in one.mesh.items())
    found = f"n ≤ {int(one.most())}" if isinstance(one, OfWidth) else f"T > {one.least():,.0f}"
    shares = ", ".join(f"{share:.0%}" for share in one.shares())
    lines.append(f"| {one.name} | {one.condition} | {what} | {one.ratio():,.0f} | {found} | {shares} |")
  return "\n".join(lines)


def parts() -> dict[str, str]:
  return {"sizes": table()}


def main() -> None:
  PAGE.write_text(fill(PAGE.read_text(), parts()))
  print(table())
