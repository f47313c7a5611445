"""Begins a run: from the newest intact checkpoint of its workdir, with the parameters of another run, or from scratch.

A run can resume under another strategy, or on another number of devices.
"""

import dataclasses
import functools
import json
from collections.abc import Callable

from checkpointing import history, initial, record
from checkpointing.memory import recovery
from checkpointing.memory.tier import Tier
from checkpointing.reading import FOLDER, INDEX, read_record, read_tree, steps
from checkpointing.record import Record
from errors import JobConfigError
from models.parameters import joined
from runtime import processes
from runtime.storage.bucket import Folder, Location
from strategies import Strategy
from training.loop import LoopState
from training.program import TrainState

Found = tuple[TrainState, Record]  # a state, and the record of its checkpoint


@dataclasses.dataclass(frozen=True)
class Start:
  """The beginning of a run.

  Attributes:
    loop: the state of its loop.
    record: that of its checkpoints.
    lines: to print.
    source: what it resumed from: "checkpoint" or "memory"; "" if it begins.
  """

  state: TrainState
  loop: LoopState
  record: Record
  lines: list[str]
  source: str = ""


def begin(
  workdir: Location, init_from: str, strategy: Strategy, run: Record, warn: Callable[[str], None],
  tier: Tier | None = None,
) -> Start:  # fmt: skip
  """Restores the newest checkpoint in `workdir`. Without one, starts with new parameters or those of `init_from`.

  If the hosts' memory holds a newer state, restores that.

  Those of `init_from` are evaluated first, in a run that evaluates as it goes: that is what training starts from.

  Args:
    init_from: another run's workdir or checkpoint, or a model folder; "" for new parameters.
    run: the record of this run (record.make).
    warn: called with a message for each damaged checkpoint that is skipped.
    tier: saves in the hosts' memory, if there are any.
  """
  program, abstract = strategy.program, strategy.abstract_state()
  others = program.of_base(abstract.params)
  changing = dataclasses.replace(abstract, params=program.changing(abstract.params))
  if tier and tier.every:
    in_memory = functools.partial(recovery.restore, tier, changing, run, warn=warn)
    found = restore(workdir / FOLDER, changing, run, warn, in_memory)
    tier.keep_only(tier.complete)  # not before: storage may have had nothing newer that is whole
  else:
    found = restore(workdir / FOLDER, changing, run, warn)
  if found:
    state, saved = found
    loop = LoopState(**saved["loop"])
    source = "memory" if tier and tier.complete else "checkpoint"
    where = ", from the hosts' memory" if source == "memory" else ""
    lines = [f"resumed   at step {loop.step}, saved by {saved['strategy']}{where}"]
    lines += [f"note      {change}" for change in record.changes(saved, run) + record.jump(saved, program.optimizer)]
    run = run | {"data": history.continued(saved["data"], run["data"], loop.step), "context": saved["context"]}
    if others:
      params = initial.load_base(init_from, others, program, run, saved["base"])
      state, run = dataclasses.replace(state, params=joined(state.params, params)), run | {"base": saved["base"]}
    return Start(state, loop, run, lines, source)
  state = strategy.init(run["config"]["seed"])
  if not init_from:
    return Start(state, LoopState(), run, [])
  own = program.changing(state.params) if others else {}
  state = dataclasses.replace(state, params=own)  # makes room
  given = initial.load(init_from, others or abstract.params, program, run)
  run = run | {"base": initial.base_of(init_from, given.params, program)} if others else run
  lines, length = [f"initial   parameters of {given.whose}"], run["context"]
  lines += [f"note      {note}" for note in given.notes]
  if not program.traits.is_image and 0 < given.context < length:
    lines.append(f"note      model.seq_len={length} is more than the {given.context} tokens that they were made for")
  run = run | {"context": max(length, given.context)}
  state = dataclasses.replace(state, params=joined(own, given.params))
  return Start(state, LoopState(evaluated=False), run, lines)


def restore(
  folder: Location, abstract: TrainState, now: Record, warn: Callable[[str], None],
  in_memory: Callable[[int], Found | None] = lambda step: None,
) -> Found | None:  # fmt: skip
  """The newest intact checkpoint, in the layout of `abstract`, and its record. None if there is no checkpoint.

  Renames damaged checkpoints and warns. Raises ConfigError if this run, with record `now`, may not resume from the
  checkpoint, or if there are checkpoints but none can be read.

  Args:
    in_memory: gives a state that is newer than a step, if the hosts' memory has one; asked before each checkpoint.
  """
  found = processes.on_process_zero(
    lambda: [[step, read_record(folder / str(step))] for step in sorted(steps(folder), reverse=True)]
  )
  damaged: list[tuple[int, str]] = []  # (step, reason)
  for step, saved in [*found, [-1, None]]:
    whole = in_memory(step)
    source = f"step {whole[1]['loop']['step']} in the hosts' memory" if whole else f"checkpoint {step}"
    if whole is None and step >= 0:
      whole, why = _read(folder / str(step), step, abstract, saved, now)
      damaged += [] if whole else [(step, why)]
    if whole is None:
      continue
    for bad, reason in damaged:  # only now: if none can be read, all stay as they are
      aside = processes.on_process_zero(functools.partial(_set_aside, folder / str(bad)))
      warn(
        f"checkpoint {bad} in {str(folder)!r} is damaged ({reason}) and was renamed to {aside}; resuming from {source}"
      )
    return whole
  if found or processes.on_process_zero(lambda: bool(list(folder.glob("damaged-*")))):
    reasons = "; ".join(f"{step}: {why}" for step, why in damaged)
    raise JobConfigError(
      f"workdir: none of the checkpoints in {str(folder)!r} can be read ({reasons or 'all are damaged'}); "
      "restore them from a copy, or name another workdir"
    )
  return None


def _read(
  folder: Location, step: int, abstract: TrainState, saved: Record | None, now: Record
) -> tuple[Found | None, str]:
  """What is in a checkpoint with record `saved`; or None, and why it is damaged."""
  where = f"checkpoint {step} in {str(folder.parent)!r}"
  if saved is None:
    return None, "its record cannot be read"
  with processes.raise_together():
    record.check_version(saved, now, where)  # first: only then is the rest of the record known
  if saved["loop"]["step"] != step:  # later checkpoints would be removed as older ones
    return None, f"its record is of step {saved['loop']['step']}"
  with processes.raise_together():
    record.check_same_run(saved, now, where)
    record.check_arrays(saved, abstract, now.get("shapes", {}), where)
  state, why = read_tree(folder, abstract, saved)
  return (None if state is None else (state, saved)), why


def _set_aside(folder: Location) -> str:
  """Renames a damaged checkpoint, so that its step can be saved again and nothing is lost."""
  name = next(name for n in range(1, 1000) if not (folder.parent / (name := f"damaged-{folder.name}-{n}")).exists())
  if isinstance(folder, Folder):
    folder.rename(folder.parent / name)
    others = [step for step in steps(folder.parent) if str(step) != folder.name]
    (folder.parent / INDEX).write(json.dumps(others).encode())
  else:
    folder.rename(folder.parent / name)
  return name
