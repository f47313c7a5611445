"""Runner: who runs a program's parts, and sums gradients over devices.

A runner takes a program, a layout and its transfers (transfers.py). It supplies the sums of gradients and of an
evaluation, and what writes text. strategy.py jits these. It declares once what it cannot do (`limits`), for the error,
the search and the start-up line. Each runner is one file, and choice.py chooses one:

    automatic.py       the compiler inserts what the layout needs
    by_hand.py         gradients are summed by hand, once a step, if a batch has several parts
    stages/staged.py   stages take turns, by a schedule
    pmapped.py         inside `jax.pmap`
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax

from errors import ConfigError
from models.generate import Sampling, TextWriter
from models.sizes import ModelSizes
from strategies.execution.constraints import Constraints
from strategies.execution.transfers import Transfers
from strategies.layout import Layout
from training.optimizer import Optimizer
from training.program import Batch, Params, Program, Sums

if TYPE_CHECKING:
  from strategies.execution.stages.schedule import Schedule


class Asked(Protocol):
  """What limits depend on. A Program has it."""

  @property
  def sizes(self) -> ModelSizes: ...
  @property
  def optimizer(self) -> Optimizer: ...


class Limit(NamedTuple):
  """A value of a config field that a runner cannot use.

  Attributes:
    why: the reason, as a clause.
    fix: what to use.
    instead: the value that runs in its place, with a warning; None: it is an error.
  """

  field: str
  value: Any
  why: str
  fix: str
  instead: Any = None

  def __str__(self) -> str:
    happens = "is not possible here" if self.instead is None else f"runs as {self.instead!r}"
    return f"{self.field}={self.value!r} {happens}, because {self.why}; use {self.fix}"


@dataclasses.dataclass(frozen=True)
class Runner:
  """Runs a program under a resolved layout. The base class of all runners.

  Attributes:
    fallbacks: the limits because of which the program is not quite the one that was asked for.
    schedule: the pipeline's schedule; None without a pipeline.
    microbatches: the parts into which the runner itself splits an accumulation part.
    described: what the start-up line says of the runner; "" if nothing.
  """

  program: Program
  layout: Layout
  transfers: Transfers
  fallbacks: tuple[Limit, ...] = ()
  schedule: "Schedule | None" = None
  microbatches: int = 1
  described: str = ""

  @staticmethod
  def limits(layout: Layout, program: Asked) -> list[Limit]:
    """What this runner cannot do of such a program under a layout."""
    return []

  @property
  def sharding(self) -> Constraints:
    """Says where arrays are outside a `shard_map`."""
    return Constraints.outside(self.layout, self.transfers)

  def gradient_sums(self, params: Params, batch: Batch, step: jax.Array) -> tuple[Sums, Params]:
    """Sums over the global batch, and the summed loss's gradient in the trained parameters, stored as the state is."""
    raise NotImplementedError

  def eval_sums(self, params: Params, batch: Batch) -> Sums:
    """Sums over the global batch, without dropout and augmentation."""
    raise NotImplementedError

  def text_writer(self, params: Params, sampling: Sampling, sharding: Constraints) -> TextWriter:
    """Writes texts with these parameters. `sharding` says where the texts are."""
    return self.program.text_writer(params, sampling, sharding)

  def jit(self, function: Callable[..., Any], **options: Any) -> Any:
    """Jits a function of a state or of parameters, and a batch: it compiles at its first call.

    `options` are those of `jax.jit`.
    """
    return jax.jit(function, **options)


def check_limits(found: Sequence[Limit]) -> None:
  """Raises ConfigError if no value can run in place of one that a runner cannot use."""
  for limit in found:
    if limit.instead is None:
      raise ConfigError(str(limit))


def within_limits(sizes: ModelSizes, found: Sequence[Limit]) -> ModelSizes:
  """The model with the values that run in place of those that a runner cannot use.

  Raises ConfigError as `check_limits` does.
  """
  check_limits(found)
  for limit in found:
    sizes = dataclasses.replace(sizes, **{limit.field.removeprefix("model."): limit.instead})
  return sizes
