"""Stage: runs a pipeline schedule on one stage, tick by tick. Read schedule.py and orders.py first.

`run` is called inside a `shard_map` that is manual over `stage` and the axes of the batch. So arrays here are one
stage's share of the model and one device's share of the batch. The compiler shards them over the other mesh axes. A
`Row` of the schedule's table says which microbatch and which chunk a unit works on.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from models import stacks
from models.dimensions import Dims
from models.ops.float8 import values_of, with_values
from models.ops.loss import Targets
from models.ops.routing import penalty
from models.ops.workarounds import in_order
from models.parameters import bind, joined
from models.remat import policy_of
from models.side_inputs import SideInputs
from models.stacks import Loop
from models.transformer import Transformer
from strategies.execution.constraints import Constraints
from strategies.execution.stages.schedule import BACKWARD, FORWARD, WEIGHTS, Schedule
from strategies.execution.stages.split import split_backward
from training.program import Batch, Params, Sums
from training.transformer import TransformerProgram

Row = dict[str, jax.Array]  # a unit in the schedule's table: column → scalar
Rows = dict[str, Row]  # what a stage does at one tick: kind of unit → row
Fixed = tuple[list[jax.Array], Params]  # what a backward pass reads besides the cotangent: residuals and weights
T = TypeVar("T")

# How many blocks one iteration of the scan over a chunk's layers runs. A scan stacks its residuals and then copies them
# to their slot. An unrolled scan writes to the slot directly: with 2 blocks a stage, 0.74 → 0.92 of single-device speed
# (measured once, when this was built).
UNROLL = 2

# The remat policy of the dense blocks before those that stages split.
REMAT_OF_FIRST = "minimal"


class Carry(NamedTuple):
  """What a stage keeps from tick to tick. The first four have a leading dimension of slots."""

  activation: jax.Array
  cotangent: jax.Array
  residuals: list[jax.Array]
  kept: Any  # what backward units leave to weight units (split.py)
  to_next: jax.Array  # the latest activation
  to_previous: jax.Array  # the latest cotangent
  sums: Sums
  gradients: Params  # of the trained `Stage.params`, summed so far; {} in evaluation


class Pullback(NamedTuple):
  """The backward pass of a chunk; empty in evaluation.

  Attributes:
    whole: (fixed, cotangent) → the gradients of the trained weights, and the cotangent of the input.
    early, late: `whole` in two halves (split.py), if the schedule has weight units. (fixed, cotangent) → the cotangent
      of the input, and what it keeps; (fixed, kept) → the gradients of the weights.
  """

  whole: Any = None
  early: Any = None
  late: Any = None


@dataclasses.dataclass(frozen=True)
class Stage:
  """What one stage holds, and how it runs its units. `step` is None in evaluation, which has no backward units."""

  program: TransformerProgram
  schedule: Schedule
  sharding: Constraints
  index: jax.Array  # the stage's number
  loop: Loop  # the blocks of a chunk
  params: Params  # of its stacks [chunks, `by_period`, ...]; other entries are for the first and the last stage
  batch: Batch  # [microbatches, b, ...]
  step: jax.Array | None

  def run(self) -> Carry:
    """Runs every tick of the schedule. The returned carry holds this stage's sums and gradients.

    Each phase is a scan of its own, whose body has the units and the exchanges of this phase only.
    """
    rows = jax.tree.map(lambda column: jnp.asarray(column)[:, self.index], self.schedule.table)  # [ticks]
    carry, pullback = self.start(jax.tree.map(lambda column: column[0], rows[FORWARD]))
    carry = carry._replace(to_next=in_order(self.params, carry.to_next))
    for number, phase in enumerate(self.schedule.phases):
      of_phase = jax.tree.map(lambda column, phase=phase: column[phase.first : phase.end], rows)
      carry, _ = jax.lax.scan(functools.partial(self.tick, number, pullback), carry, of_phase)
    sums, edges = in_order((carry.to_next, carry.to_previous), (carry.sums, self.edges_of(carry.gradients)))
    return carry._replace(sums=sums, gradients=carry.gradients | edges)

  def tick(self, number: int, pullback: Pullback, carry: Carry, rows: Rows) -> tuple[Carry, None]:
    """One tick of a phase. Cotangents travel while the forward unit runs, activations while other units do."""
    phase, arrivals = self.schedule.phases[number], rows["arrivals"]
    send = lambda what, x: jax.lax.ppermute(x, "stage", phase.routes[what]) if what in phase.routes else None
    run = lambda kind, work, carry: repeat(f"{kind}_{number}", rows[kind]["runs"], work, rows[kind], carry)
    cotangent = send("cotangent", carry.to_previous)
    if FORWARD in phase.units:
      carry = run(FORWARD, lambda row, _, carry: self.forward(number, row, carry), carry)
    if cotangent is not None:
      carry = carry._replace(cotangent=put(carry.cotangent, arrivals["cotangent"], cotangent))
    activation = send("activation", carry.to_next)
    if BACKWARD in phase.units:
      carry = run(BACKWARD, lambda row, _, carry: self.backward(number, pullback, row, carry), carry)
    if WEIGHTS in phase.units:
      carry = run(WEIGHTS, functools.partial(self.weight_unit, pullback), carry)
    if activation is not None:
      carry = carry._replace(activation=put(carry.activation, arrivals["activation"], activation))
    return carry, None

  def start(self, row: Row) -> tuple[Carry, Pullback]:
    """The first carry, with empty slots and a spare one for values that nobody needs; and the backward pass."""
    x = jax.eval_shape(self.embed, self.edges, row)
    residuals, kept, pullback = [], None, Pullback()
    if self.step is not None:
      _, _, residuals, whole = jax.eval_shape(self.linearize, x, row)
      pullback = Pullback(whole)
      if self.schedule.splits:
        pullback = Pullback(whole, *split_backward(whole, (residuals, self.weights(row)), x))
        kept = jax.eval_shape(pullback.early, (residuals, self.weights(row)), x)[1]
    room = lambda what, x: jnp.zeros((self.schedule.slots[what] + 1, *x.shape), x.dtype)
    zeros = self.pin(jnp.zeros(x.shape, x.dtype))
    carry = Carry(
      activation=room("activation", x),
      cotangent=room("cotangent", x),
      residuals=[room("residuals", r) for r in residuals],
      kept=jax.tree.map(functools.partial(room, "kept"), kept),
      to_next=zeros,
      to_previous=zeros,
      sums=self.program.no_sums(self.step),
      gradients={} if self.step is None else self.zero_gradients(),
    )
    return carry, pullback

  def forward(self, number: int, row: Row, carry: Carry) -> Carry:
    """Runs a chunk on the embedded microbatch or the previous stage's output, and the loss at the end of the model."""
    x = jax.lax.cond(
      self.is_first(row), lambda: self.embed(self.edges, row), lambda: self.pin(carry.activation[row["activation"]])
    )
    if self.step is None:
      y, _, routed = self.run_chunk(self.weights(row), x, row)
    else:
      y, routed, residuals, _ = self.linearize(x, row)
      stores = [put(store, row["residuals"], r) for store, r in zip(carry.residuals, residuals, strict=True)]
      carry = carry._replace(residuals=stores)
    carry = carry._replace(to_next=y, sums=add_to(carry.sums, routed))
    if not self.schedule.phases[number].finishes:
      return carry
    is_last = (self.index == self.schedule.stages - 1) & (row["chunk"] == self.schedule.chunks - 1)
    return once(f"finish_{number}", is_last, self.finish, row, carry)

  def finish(self, row: Row, carry: Carry) -> Carry:
    """Final norm, head and loss of a microbatch that has passed all blocks; in training also their gradients."""
    if self.step is None:
      return carry._replace(sums=add_to(carry.sums, self.loss(self.edges, carry.to_next, row)[1]))
    gradient = jax.grad(self.loss, argnums=(0, 1), has_aux=True)
    (edges, cotangent), sums = gradient(self.edges, carry.to_next, row)
    return carry._replace(
      sums=add_to(carry.sums, sums),
      cotangent=put(carry.cotangent, row["cotangent"], cotangent),
      gradients=add_to(carry.gradients, edges),
    )

  def backward(self, number: int, pullback: Pullback, row: Row, carry: Carry) -> Carry:
    """Computes the cotangent of a chunk's input and, unless weight units do it, the gradient of its weights."""
    cotangent = carry.cotangent[row["cotangent"]]
    if self.schedule.splits:
      before, kept = pullback.early(self.fixed(row, carry), cotangent)
      stores = jax.tree.map(lambda store, x: put(store, row["kept"], self.pinned(x)), carry.kept, kept)
      carry = carry._replace(to_previous=before, kept=stores)
    else:
      weights, before = pullback.whole(self.fixed(row, carry), cotangent)
      carry = self.with_gradient(weights, row, carry)._replace(to_previous=before)
    return once(f"embed_backward_{number}", self.is_first(row), self.embed_backward, row, carry)

  def weight_unit(self, pullback: Pullback, rows: Row, i: jax.Array, carry: Carry) -> Carry:
    """Computes the gradient of a chunk's weights, in the i-th of a tick's weight units."""
    row = {name: jnp.asarray(column)[rows["first"] + i, self.index] for name, column in self.schedule.weights.items()}
    kept = jax.tree.map(lambda store: store[row["kept"]], carry.kept)
    return self.with_gradient(pullback.late(self.fixed(row, carry), kept), row, carry)

  def fixed(self, row: Row, carry: Carry) -> Fixed:
    """The residuals and the weights of a unit."""
    return [store[row["residuals"]] for store in carry.residuals], self.weights(row)

  def with_gradient(self, weights: Params, row: Row, carry: Carry) -> Carry:
    """Adds the gradient of a chunk's weights."""
    before = {name: carry.gradients[name] for name in weights}
    after = jax.tree.map(lambda total, g: total.at[row["chunk"]].add(g), before, weights)
    return carry._replace(gradients=carry.gradients | after)

  def embed_backward(self, row: Row, carry: Carry) -> Carry:
    _, vjp = jax.vjp(lambda edges: self.embed(edges, row), self.edges)
    return carry._replace(gradients=add_to(carry.gradients, *vjp(carry.to_previous)))

  def embed(self, edges: Params, row: Row) -> jax.Array:
    """The embedded microbatch, after the blocks that come before those of all stages."""
    microbatch, model = self.microbatch(row), self.model(edges, self.weights(row))
    x = model.embed(self.program.inputs(microbatch, self.step, self.sharding), self.sharding)
    sizes = self.program.sizes
    if not sizes.first_layers:
      return x
    # Only `embed_backward` saves anything here, and for no later unit. So little need be computed again.
    policy, side = policy_of(REMAT_OF_FIRST, "", 0), self.side_inputs(model, microbatch, x)
    first = stacks.loops(sizes.kinds[: sizes.first_layers])
    return self.pin(model.run_blocks(x, side, self.sharding, loops=first, policy=policy)[0])

  def run_chunk(self, weights: Params, x: jax.Array, row: Row) -> tuple[jax.Array, jax.Array, Sums]:
    """A chunk's output, what its routers add to the loss, and their sums."""
    depth = len(self.loop.period) * self.loop.times
    first_layer = (row["chunk"] * self.schedule.stages + self.index) * depth
    if self.program.sizes.first_layers:
      first_layer += self.program.sizes.first_layers
    microbatch, model = self.microbatch(row), self.model(self.edges, weights)
    side = self.side_inputs(model, microbatch, x, self.program.targets(microbatch, self.sharding))
    y, routed = model.run_blocks(x, side, self.sharding, loops=[self.loop], first_layer=first_layer, unroll=UNROLL)
    return y, jnp.asarray(penalty(routed, self.program.sizes.experts), jnp.float32), routed

  def side_inputs(
    self, model: Transformer, microbatch: Batch, x: jax.Array, targets: Targets | None = None
  ) -> SideInputs:
    """What the blocks read beside x. Without targets, routers sum nothing."""
    segments, keys = self.program.segments(microbatch), self.program.dropout_keys(microbatch, self.step)
    counted = None if targets is None else model.counted(targets, segments, self.sharding)
    length = x.shape[1] * self.sharding.shards("positions")
    return SideInputs.of(model.sizes, length, segments=segments, keys=keys, counted=counted, sharding=self.sharding)

  def loss(self, edges: Params, y: jax.Array, row: Row) -> tuple[jax.Array, Sums]:
    program, microbatch = self.program, self.microbatch(row)
    targets, segments = program.targets(microbatch, self.sharding, self.step), program.segments(microbatch)
    return self.model(edges, self.weights(row)).head_loss_sums(y, targets, self.sharding, segments)

  @property
  def edges(self) -> Params:
    """The weights outside the blocks that are trained."""
    return self.edges_of(self.program.trained(self.params))

  def edges_of(self, params: Params) -> Params:
    """The entries of parameters outside the blocks of the stages."""
    return {name: entry for name, entry in params.items() if name not in self.loop.stacks}

  def model(self, edges: Params, weights: Params) -> Transformer:
    return bind(self.program.sizes, joined(edges, self.program.frozen(self.params)) | weights)

  def weights(self, row: Row) -> Params:
    """The weights of a chunk, by stack."""
    return jax.tree.map(lambda w: w[row["chunk"]], {name: self.params[name] for name in self.loop.stacks})

  def microbatch(self, row: Row) -> Batch:
    return jax.tree.map(lambda x: x[row["microbatch"]], self.batch)

  def is_first(self, row: Row) -> jax.Array:
    return (self.index == 0) & (row["chunk"] == 0)

  def linearize(self, x: jax.Array, row: Row) -> tuple[jax.Array, Sums, list[jax.Array], Callable]:
    """A chunk's output, the sums of its routers, its residuals without the weights, and `Pullback.whole`."""
    weights = self.weights(row)
    trained, others = self.program.trained(weights), self.program.frozen(weights)

    def run(values: Params, x: jax.Array) -> tuple[tuple[jax.Array, jax.Array], Sums]:
      y, added, routed = self.run_chunk(joined(with_values(trained, values), others), x, row)
      return (y, added), routed

    (y, _), vjp, routed = jax.vjp(run, values_of(trained), x, has_aux=True)
    # What the backward pass reads: some are weights, which need no slot. The others are residuals.
    read, tree = jax.tree.flatten(vjp)
    number_of = lambda x: next((i for i, w in enumerate(jax.tree.leaves(weights)) if w is x), None)
    numbers = list(map(number_of, read))

    def whole(fixed: Fixed, cotangent: jax.Array) -> tuple[Params, jax.Array]:
      residuals, weights = iter(fixed[0]), jax.tree.leaves(fixed[1])
      pull = jax.tree.unflatten(tree, [next(residuals) if i is None else weights[i] for i in numbers])
      return pull((cotangent, jnp.ones(())))  # what routers add to the loss counts as it is

    residuals = [self.pinned(x) for x, i in zip(read, numbers, strict=True) if i is None]
    return y, routed, residuals, jax.tree_util.Partial(whole)

  def pinned(self, x: jax.Array) -> jax.Array:
    """Pins a value of the residual stream, [layers, b, T, D], before it is stored.

    Otherwise the compiler may split it by width, which suits the weights' gradients, and send it between devices at
    every tick.
    """
    sizes = self.program.sizes
    stream = sizes.positions // self.sharding.shards("positions"), sizes.width
    return self.pin(x) if x.ndim == 4 and x.shape[2:] == stream else x

  def pin(self, x: jax.Array) -> jax.Array:
    """Constrains the sharding of activations [..., b, T, D]."""
    return self.sharding.activation(x, *(None,) * (x.ndim - 3), "batch", "sequence", None)

  def zero_gradients(self) -> Params:
    """Zeros for the gradients, sharded as the weights are over the mesh axes that are left to the compiler."""
    dims, params = self.program.dims(), values_of(self.params)

    def zeros(w: jax.Array, names: Dims) -> jax.Array:
      zeros = jnp.zeros(w.shape, jnp.float32)
      by_chunk = (None,) * (w.ndim - len(names))  # and by period
      return jax.lax.with_sharding_constraint(zeros, self.sharding.layout.spec((*by_chunk, *names)))

    return jax.tree.map(zeros, *map(self.program.trained, (params, dims)))


def once(name: str, wanted: jax.Array, work: Callable[[Any, T], T], row: Any, carry: T) -> T:
  """`work(row, carry)` if `wanted`, else `carry`."""
  return repeat(name, wanted, lambda row, _, carry: work(row, carry), row, carry)


def repeat(name: str, times: jax.Array, work: Callable[[Any, jax.Array, T], T], row: Any, carry: T) -> T:
  """Runs `work(row, i, carry)` for i from 0 to before `times`, in a loop in a named scope of the program.

  A unit that may not run is a loop too, of one iteration or none. It is not a `lax.cond`, because XLA copies values
  that a branch only passes through, and the carry is large. A loop's carry is updated in place. The barrier makes the
  work depend on the iteration. Otherwise XLA would move parts of the work out of the loop and always run them.
  """

  def body(i: jax.Array, carry: T) -> T:
    row_now, carry, i = jax.lax.optimization_barrier((row, carry, i))
    return work(row_now, i, carry)

  with jax.named_scope(name):
    return jax.lax.fori_loop(0, times.astype(jnp.int32), body, carry)


def put(store: jax.Array, slot: jax.Array, value: jax.Array) -> jax.Array:
  return jax.lax.dynamic_update_index_in_dim(store, value, slot, axis=0)


def add_to(total: dict[str, Any], some: dict[str, Any]) -> dict[str, Any]:
  """Adds to some of the entries of `total`."""
  return total | jax.tree.map(jnp.add, {name: total[name] for name in some}, some)
