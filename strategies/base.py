"""Strategy: the interface that train.py, the tools and the tests use, and its implementation for every SPMD layout.

training/program.py holds the mathematics, without devices. Here each of its functions becomes a jitted program over the
mesh. The layout gives the shardings of inputs and outputs; the compiler inserts the communication.
"""

import contextlib
import functools
import math
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from errors import ConfigError, one_of
from models.dimensions import map_dims
from models.generate import Texts, generate, text_keys
from models.sampling import Sampling
from strategies.layout import Layout
from strategies.mesh import OnMesh
from strategies.sharding import MeshSharding
from strategies.sums import SummedOnce
from training.program import Batch, Metrics, Params, Program, Sums, TrainState

if TYPE_CHECKING:
  from strategies.pipeline.table import Schedule

GATHER = ("auto", "part", "step")


class Strategy:
  """A Program laid out on a mesh.

  Attributes:
    layout: the resolved Layout; `layout.mesh` holds the size of every mesh axis.
    mesh: the devices in that shape, or an AbstractMesh to lower without devices.
    section: the config section whose fields are passed to the constructor; None if there is none.
    microbatches: how many microbatches the strategy itself splits a batch into.
    schedule: the schedule of a pipeline with several stages; None without one.
    gathers_once: whether weights that `embed` splits are gathered, and their gradients scattered, once a step and not
      for each part of the batch.
    axes_by_hand: the mesh axes over which gradients are summed by hand, and not by the compiler.
  """

  section: str | None = None
  microbatches = 1
  schedule: "Schedule | None" = None

  def __init__(self, layout: Layout, program: Program, mesh: Mesh | AbstractMesh, *, gather: str = "auto"):
    layout.check_divides(program.model.sizes())
    layout = layout.for_positions(program.model.positions)
    self.gathers_once = one_of("gather", gather, GATHER) == "step"
    self.axes_by_hand = layout.axes_by_hand(self.gathers_once) if program.accumulation > 1 else ()
    if self.axes_by_hand and type(program) is Program:
      program = SummedOnce(**vars(program), axes=self.axes_by_hand, gathers_once=self.gathers_once)
    self.layout, self.program, self.mesh = layout, program, mesh
    # With a single part, gradients go straight to where the optimizer needs them.
    state_layout = layout.of("state")
    sharding = MeshSharding(layout.place(gradients=state_layout.embed) if program.accumulation == 1 else layout)
    replicated, shapes = NamedSharding(mesh, P()), jax.eval_shape(program.init, jax.random.key(0))
    params = self._shardings(layout, program.dims())
    self.state_sharding = TrainState(
      step=replicated,  # type: ignore[arg-type]  # the same tree, with shardings for arrays
      params=params,
      # Adam's moments are sharded like their weights, or into more pieces. The compiler then updates the pieces, and
      # gathers the new weights because the step's output has them whole.
      opt_state=self._shardings(state_layout, program.rule.dims, program.optimizer.on_host),
    )
    self.batch_sharding = NamedSharding(mesh, layout.spec(("batch",)))
    self._abstract_state = jax.tree.map(
      lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes, self.state_sharding
    )
    self._init = jax.jit(program.init, out_shardings=self.state_sharding)
    self._jit_train_step = functools.partial(
      jax.jit,
      functools.partial(program.train_step, sharding=sharding),
      in_shardings=(self.state_sharding, self.batch_sharding),
      out_shardings=(self.state_sharding, replicated),
      donate_argnums=0,
    )
    self._train_step = self._plain_train_step = self._jit_train_step()
    self._eval_step = jax.jit(
      functools.partial(program.eval_step, sharding=sharding),
      in_shardings=(params, self.batch_sharding),
      out_shardings=replicated,
    )
    self._gradients = jax.jit(
      functools.partial(program.gradients, sharding=sharding),
      in_shardings=(self.state_sharding, self.batch_sharding),
      out_shardings=(replicated, program.trained(params)),
    )
    # Texts are not split over devices.
    writer = functools.partial(program.writer, sharding=sharding.place(batch=None, sequence=None))
    self._generate = jax.jit(
      lambda params, sampling, prompt, key, length: generate(writer(params, sampling), prompt, length=length, key=key),
      static_argnums=(1, 4),
      out_shardings=replicated,
    )
    self._begin_texts = jax.jit(
      lambda params, sampling, prompts, lengths, key, size: writer(params, sampling).begin(
        prompts, lengths, text_keys(key, len(prompts)), size=size
      ),
      static_argnums=1,
      static_argnames="size",
    )
    # Rows of given texts are. They have any length, so their positions stay whole.
    self._log_likelihoods = jax.jit(
      lambda params, *texts: program.writer(params, Sampling(), sharding.place(sequence=None)).log_likelihoods(*texts),
      out_shardings=replicated,
    )
    self._go_on = jax.jit(
      lambda params, sampling, cache, rest: writer(params, sampling).go_on(rest._replace(cache=cache)),
      static_argnums=1,
      donate_argnums=2,
    )

  def _shardings(self, layout: Layout, dims: Any, on_host: bool = False) -> Any:
    """The shardings of arrays with these dimensions, placed as in this layout. Numbers are always on the device."""
    sharding = lambda names: NamedSharding(self.mesh, layout.spec(names))
    return map_dims(lambda names: _on_host(sharding(names)) if on_host and names else sharding(names), dims)

  def compile_with(self, options: dict[str, Any]) -> None:
    """Sets the compiler options of the training step (compiler_options.py), unless a subclass has a step of its own."""
    if options and self._train_step is self._plain_train_step:
      self._train_step = self._jit_train_step(compiler_options=options)

  def init(self, seed: int) -> TrainState:
    """The state at step 0. It is created sharded: no device ever holds more than its part."""
    with self._on_mesh():
      return self._init(jax.random.key(seed))

  def abstract_state(self) -> TrainState:
    """The state's shapes, dtypes and shardings, for restoring and ahead-of-time compilation."""
    return self._abstract_state

  def abstract_batch(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes, dtypes and shardings of a global training batch."""
    return {
      name: jax.ShapeDtypeStruct((batch_size, *field.shape), field.dtype, sharding=self.batch_sharding)
      for name, field in self.program.example_shapes().items()
    }

  def rows(self, batch_size: int) -> np.ndarray:
    """The rows of a global batch that this process supplies."""
    return OnMesh(self.batch_sharding).rows(batch_size)

  def shard(self, host_batch: dict[str, np.ndarray], batch_size: int) -> Batch:
    """Makes a global batch from the rows that this process supplies."""
    return OnMesh(self.batch_sharding).shard(host_batch, batch_size)

  def train_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    """Runs one update. Donates `state`; use the returned one. The metrics are replicated scalars, not awaited yet."""
    with self._on_mesh():
      return self._train_step(state, batch)

  def eval_step(self, state: TrainState, batch: Batch) -> Sums:
    """Sums of loss, correct predictions and count over the batch. Padding does not count."""
    with self._on_mesh():
      return self._eval_step(state.params, batch)

  def gradients(self, state: TrainState, batch: Batch) -> tuple[Metrics, Params]:
    """The mean loss and its gradient in what is trained, before clipping. It is sharded like the parameters."""
    with self._on_mesh():
      return self._gradients(state, batch)

  def generate(self, state: TrainState, prompt: np.ndarray, *, length: int, seed: int, temperature: float) -> jax.Array:
    """Continues prompts [B, P] by `length` tokens. The result is replicated."""
    with self._on_mesh():
      sampling = Sampling(temperature=temperature)
      return self._generate(state.params, sampling, prompt, jax.random.key(seed), length)

  def begin_texts(
    self, params: Params, prompts: np.ndarray, lengths: np.ndarray, *, size: int, seed: int, sampling: Sampling
  ) -> Texts:
    """Reads prompts [B, P] with these lengths [B], padded at the right, and writes the first token of each.

    Args:
      size: how many tokens a text may have.
    """
    with self._on_mesh():
      return self._begin_texts(params, sampling, prompts, lengths, jax.random.key(seed), size=size)

  def go_on(self, params: Params, texts: Texts, sampling: Sampling) -> Texts:
    """Writes one more token of each text. Donates the cache, so `texts` cannot be continued again."""
    with self._on_mesh():
      return self._go_on(params, sampling, texts.cache, texts._replace(cache=None))

  def log_likelihoods(self, params: Params, tokens: np.ndarray, counted: np.ndarray) -> jax.Array:
    """The log-likelihood of each text [B]: the sum over its tokens [B, T + 1] that count [B, T + 1], but the first.

    B must be a multiple of the devices that split the batch. The result is replicated.
    """
    with self._on_mesh():
      return self._log_likelihoods(params, tokens, counted)

  def lower_train_step(self, batch_size: int, **options: Any) -> jax.stages.Lowered:
    """The training step, lowered but not compiled. `options` are those of `jax.stages.Traced.lower`."""
    with self._on_mesh():
      return self._train_step.trace(self._abstract_state, self.abstract_batch(batch_size)).lower(**options)

  def describe(self, name: str) -> str:
    """One line with the strategy's name, its mesh, and the mesh axes of each logical dimension."""
    if self.layout.device_count == 1:
      return name if name == "single" else f"{name} on one device: nothing to split, so this is the single-device run"
    mesh = " × ".join(f"{axis}={size}" for axis, size in self.layout.mesh.items())
    return f"{name} on mesh {mesh}; {', '.join(self.layout.placed(' × '))}"

  def _on_mesh(self) -> contextlib.AbstractContextManager:
    """A context in which sharding constraints refer to this mesh."""
    return jax.set_mesh(self.mesh) if isinstance(self.mesh, Mesh) else jax.sharding.use_abstract_mesh(self.mesh)

  def check_batch(self, field: str, batch_size: int, accumulation: int = 1) -> None:
    """Raises ConfigError unless a global batch splits evenly over the devices and into its parts."""
    parts = {
      "devices that split the batch": self.layout.shards("batch"),
      "accumulation": accumulation,
      "pipeline.microbatches": self.microbatches,
    }
    unit = math.prod(parts.values())
    if batch_size < 1 or batch_size % unit:
      shown = " × ".join(f"{n} ({name})" for name, n in parts.items() if n > 1 or name.startswith("devices"))
      raise ConfigError(
        f"{field}={batch_size} is not a multiple of {shown}; use {max(1, round(batch_size / unit)) * unit}"
      )


def _on_host(sharding: NamedSharding) -> NamedSharding:
  """The same sharding in the host's memory. GPUs that are not there do not know their memories; their mesh need not."""
  found = sharding.with_memory_kind("pinned_host")
  return (
    found if found.memory_kind else NamedSharding(sharding.mesh.abstract_mesh, sharding.spec, memory_kind="pinned_host")
  )
