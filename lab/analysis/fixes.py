"""Changes to a config that make a step fit into a device's memory, and what they cost."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import strategies
from errors import ConfigError
from lab.analysis import host, memory, predict, theory
from lab.analysis.case import Case
from models.sizes import REMAT, ModelSizes
from strategies.execution.mesh import resolve
from strategies.layout import Layout


def fixes(name: str, case: Case, capacity: float) -> list[dict[str, Any]]:
  """Changes to the config that are predicted to make a step fit into `capacity` bytes.

  Each has the predicted bytes ("total") and what it costs: "flops", relative to those of `case`, and the bytes that a
  device sends in a step, and moves to its host, beyond those of `case` ("sent", "to_host").
  """
  remat = lambda policy: dataclasses.replace(case, sizes=dataclasses.replace(case.sizes, remat=policy))
  changes = [(name, f"model.remat={policy}", remat(policy)) for policy in REMAT[REMAT.index(case.sizes.remat) + 1 :]]
  if case.optimizer.can_stream and not case.optimizer.on_host:
    on_host = dataclasses.replace(case.optimizer, on_host=True)
    changes.append((name, "optimizer.on_host=True", dataclasses.replace(case, optimizer=on_host)))
  if case.gather == "step" and case.batch_parts > 1 and not case.schedule:
    changes.append((name, "gather=part", dataclasses.replace(case, gather="part")))
  for base, also in [(case, "")] if case.repeats else [(case, ""), (remat("full"), "model.remat=full ")]:
    changes += [(other, also + fields, changed) for other, fields, changed in _split_further(name, base)]
  possible = [
    (change, changed, memory.of(changed).total)
    for strategy, change, changed in changes
    if not strategies.limits(strategy, changed.layout, changed)
  ]
  return [
    {"change": change, "total": total} | _cost(case, changed)
    for change, changed, total in possible
    if total <= capacity
  ]


def _split_further(name: str, case: Case) -> Iterator[tuple[str, str, Case]]:
  """The batch in more parts, and other layouts, each with its strategy and the config fields that select it."""
  divides = lambda changed: changed.batch_size % (changed.layout.shards("batch") * changed.batch_parts) == 0
  for accumulation in (case.accumulation * parts for parts in (2, 4, 8, 16, 32)):
    if divides(changed := dataclasses.replace(case, accumulation=accumulation)):
      yield name, f"accumulation={accumulation}", changed
  for other, fields, layout, sizes in _layouts(name, case):
    schedule = case.schedule if layout.axes("layers") else None
    by_hand = case.by_hand and bool(schedule)
    if divides(changed := dataclasses.replace(case, layout=layout, sizes=sizes, schedule=schedule, by_hand=by_hand)):
      yield other, fields, changed


def cheapest(found: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
  """The cheapest of some fixes, in their order of cost, each of another kind if there are enough kinds."""
  ordered = sorted(found, key=lambda fix: (round(fix["flops"], 2), fix["sent"], fix["to_host"], -fix["total"]))
  kind = lambda fix: re.sub(r"^model\.remat=\S+ |=\S+", "", fix["change"])
  first = list({kind(fix): fix for fix in reversed(ordered)}.values())
  chosen = (sorted(first, key=ordered.index) + [fix for fix in ordered if fix not in first])[:count]
  return sorted(chosen, key=ordered.index)


def _cost(before: Case, after: Case) -> dict[str, float]:
  sent, to_host = (lambda case: sum(row.bytes for row in theory.sent(case))), lambda case: sum(host.to_host(case))
  return {
    "flops": predict.flops(after) / predict.flops(before),
    "sent": sent(after) - sent(before),
    "to_host": to_host(after) - to_host(before),
  }


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
      idle = layout.axes("experts") and not sizes.experts
      if str(layout) not in seen and layout.uses_every_axis() and not other_stages and not idle:
        seen.add(str(layout))
        if other == name:
          fields = [f"mesh.{axis}={n}" for axis, n in layout.mesh.items() if n != case.layout.mesh.get(axis)]
        else:
          fields = [f"strategy={other}", *([f"mesh.model={size}"] if size else [])]
        yield other, " ".join(fields), layout, sizes
