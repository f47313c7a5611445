"""Changes to a config that make a step fit into a device's memory."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import strategies
from errors import ConfigError
from lab.analysis import memory
from lab.analysis.case import Case
from models.sizes import REMAT, ModelSizes
from strategies.execution.mesh import resolve
from strategies.layout import Layout


def fixes(name: str, case: Case, capacity: float) -> list[dict[str, Any]]:
  """Changes to the config that are predicted to make a step fit into `capacity` bytes, with the predicted bytes."""
  remat = lambda policy: dataclasses.replace(case, sizes=dataclasses.replace(case.sizes, remat=policy))
  changes = [(name, f"model.remat={policy}", remat(policy)) for policy in REMAT[REMAT.index(case.sizes.remat) + 1 :]]
  if case.optimizer.can_stream and not case.optimizer.on_host:
    on_host = dataclasses.replace(case.optimizer, on_host=True)
    changes.append((name, "optimizer.on_host=True", dataclasses.replace(case, optimizer=on_host)))
  full, also = (case, "") if case.repeats else (remat("full"), "model.remat=full ")
  divides = lambda changed: changed.batch_size % (changed.layout.shards("batch") * changed.batch_parts) == 0
  for accumulation in (case.accumulation * parts for parts in (2, 4, 8, 16, 32)):
    if divides(changed := dataclasses.replace(full, accumulation=accumulation)):
      changes.append((name, f"{also}accumulation={accumulation}", changed))
  if case.gather == "step" and case.batch_parts > 1 and not case.schedule:
    changes.append((name, "gather=part", dataclasses.replace(case, gather="part")))
  for other, fields, layout, sizes in _layouts(name, full):
    schedule = case.schedule if layout.axes("layers") else None
    by_hand = case.by_hand and bool(schedule)
    changed = dataclasses.replace(full, layout=layout, sizes=sizes, schedule=schedule, by_hand=by_hand)
    if divides(changed):
      changes.append((other, f"{also}{fields}", changed))
  possible = [
    (change, memory.of(changed).total)
    for strategy, change, changed in changes
    if not strategies.limits(strategy, changed.layout, changed)
  ]
  return [{"change": change, "total": total} for change, total in possible if total <= capacity]


def _layouts(name: str, case: Case) -> Iterator[tuple[str, str, Layout, ModelSizes]]:
  """Other layouts of the same devices, each with its strategy, the config fields that select it, and the model there.

  They are this strategy on its default mesh or with another size of `model`, and other strategies without stages.
  """
  seen = {str(case.layout)}
  positions = case.sizes.positions
  could_split = strategies.layout_of(name).on(**case.layout.mesh).for_positions(positions)
  sequence_parallel = could_split.axes("sequence") == case.layout.axes("sequence")  # the config's field
  for other in strategies.names():
    template = strategies.layout_of(other)
    for size in (None, 2, 4, 8, 16) if "model" in template.mesh else (None,):
      try:
        layout = resolve(template, case.layout.device_count, {"model": size})
        layout = layout.for_positions(positions, sequence_parallel)
        layout.check_divides(case.sizes.shardable())
        sizes = strategies.with_way(case.sizes, layout)
      except ConfigError:
        continue
      same_stages = other == name and layout.shards("layers") == case.layout.shards("layers")
      other_stages = layout.axes("layers") and not same_stages
      if str(layout) not in seen and layout.uses_every_axis() and not other_stages:
        seen.add(str(layout))
        if other == name:
          fields = [f"mesh.{axis}={n}" for axis, n in layout.mesh.items() if n != case.layout.mesh.get(axis)]
        else:
          fields = [f"strategy={other}", *([f"mesh.model={size}"] if size else [])]
        yield other, " ".join(fields), layout, sizes
