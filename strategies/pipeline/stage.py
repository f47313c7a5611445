"""Runs a pipeline schedule on one stage, tick by tick. Read schedule.py first.

`run` is called inside a `shard_map` that is manual over `stage` and the axes of the batch. So arrays here are one
stage's part of the model and one device's part of the batch. The compiler shards them over the other mesh axes.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from models.dimensions import Dims
from models.parameters import bind
from models.transformer import Transformer
from strategies.pipeline.table import BACKWARD, FORWARD, Schedule
from strategies.sharding import MeshSharding, in_order
from training.program import Batch, Params, Program, Sums, no_sums

Row = dict[str, jax.Array]  # a unit in the schedule's table: column → scalar
Rows = dict[str, Row]  # what a stage does at one tick: kind of unit → row
Rebuild = Callable[[list[jax.Array], Params], Callable]  # residuals, weights → vjp
T = TypeVar("T")

# How many blocks one iteration of the scan over a chunk's layers runs. A scan stacks its residuals and then copies them
# to their slot. An unrolled scan writes to the slot directly: with 2 blocks a stage, 0.74 → 0.92 of single-device speed
# (measured once, when this was built).
UNROLL = 2


class Carry(NamedTuple):
  """What a stage keeps from tick to tick. The first three have a leading dimension of slots."""

  activation: jax.Array
  cotangent: jax.Array
  residuals: list[jax.Array]
  to_next: jax.Array  # the latest activation
  to_previous: jax.Array  # the latest cotangent
  sums: Sums
  gradients: tuple[Params, Params]  # summed so far, of `Stage.blocks` and `Stage.edges`


@dataclasses.dataclass(frozen=True)
class Stage:
  """One stage and the batch it works on. `step` is None in evaluation, which has no backward units."""

  program: Program
  schedule: Schedule
  sharding: MeshSharding
  index: jax.Array  # the number of this stage
  blocks: Params  # [chunks, layers of a chunk, ...]
  edges: Params  # the weights outside the blocks: every stage holds them, the first and the last stage use them
  batch: Batch  # [microbatches, b, ...]
  step: jax.Array | None

  def embed(self, edges: Params, row: Row) -> jax.Array:
    inputs = self.program.inputs(self.microbatch(row), self.step, self.sharding)
    return self.model(edges, self.weights(row)).embed(inputs, self.sharding)

  def run_chunk(self, weights: Params, x: jax.Array, row: Row) -> jax.Array:
    depth = jax.tree.leaves(weights)[0].shape[0]
    first_layer = (row["chunk"] * self.schedule.stages + self.index) * depth
    microbatch, model = self.microbatch(row), self.model(self.edges, weights)
    segments, keys = self.program.segments(microbatch), self.program.dropout_keys(microbatch, self.step)
    return model.run_blocks(
      x, segments=segments, keys=keys, sharding=self.sharding, first_layer=first_layer, unroll=UNROLL
    )[0]

  def loss(self, edges: Params, y: jax.Array, row: Row) -> tuple[jax.Array, Sums]:
    microbatch = self.microbatch(row)
    logits = self.model(edges, self.weights(row)).logits(y, self.sharding, self.program.segments(microbatch))
    return self.program.cross_entropy_sums(logits, self.program.targets(microbatch), self.program.counted(microbatch))

  def model(self, edges: Params, weights: Params) -> Transformer:
    return bind(self.program.model, {"blocks": weights, **edges})

  def weights(self, row: Row) -> Params:
    return jax.tree.map(lambda w: w[row["chunk"]], self.blocks)

  def microbatch(self, row: Row) -> Batch:
    return jax.tree.map(lambda x: x[row["microbatch"]], self.batch)

  def is_first(self, row: Row) -> jax.Array:
    return (self.index == 0) & (row["chunk"] == 0)

  def is_last(self, row: Row) -> jax.Array:
    return (self.index == self.schedule.stages - 1) & (row["chunk"] == self.schedule.chunks - 1)

  def forward(self, number: int, row: Row, carry: Carry) -> Carry:
    """Runs a chunk on the embedded microbatch or the previous stage's output, and the loss at the end of the model."""
    x = jax.lax.cond(
      self.is_first(row), lambda: self.embed(self.edges, row), lambda: self.pin(carry.activation[row["activation"]])
    )
    if self.step is None:
      carry = carry._replace(to_next=self.run_chunk(self.weights(row), x, row))
    else:
      y, residuals, _ = self.linearize(x, row)
      stores = [put(store, row["residuals"], r) for store, r in zip(carry.residuals, residuals, strict=True)]
      carry = carry._replace(to_next=y, residuals=stores)
    if not self.schedule.phases[number].finishes:
      return carry
    return once(f"finish_{number}", self.is_last(row), self.finish, row, carry)

  def finish(self, row: Row, carry: Carry) -> Carry:
    """Final norm, head and loss of a microbatch that has passed all blocks; in training also their gradients."""
    if self.step is None:
      return carry._replace(sums=add(carry.sums, self.loss(self.edges, carry.to_next, row)[1]))
    (edges, cotangent), sums = jax.grad(self.loss, argnums=(0, 1), has_aux=True)(self.edges, carry.to_next, row)
    blocks_so_far, edges_so_far = carry.gradients
    return carry._replace(
      sums=add(carry.sums, sums),
      cotangent=put(carry.cotangent, row["cotangent"], cotangent),
      gradients=(blocks_so_far, add(edges_so_far, edges)),
    )

  def backward(self, number: int, rebuild: Rebuild, row: Row, carry: Carry) -> Carry:
    """Computes the gradient of a chunk's weights and the cotangent of its input from the cotangent of its output."""
    vjp = rebuild([store[row["residuals"]] for store in carry.residuals], self.weights(row))
    weights, cotangent = vjp(carry.cotangent[row["cotangent"]])
    blocks, edges = carry.gradients
    blocks = jax.tree.map(lambda total, g: total.at[row["chunk"]].add(g), blocks, weights)
    carry = carry._replace(to_previous=cotangent, gradients=(blocks, edges))
    return once(f"embed_backward_{number}", self.is_first(row), self.embed_backward, row, carry)

  def embed_backward(self, row: Row, carry: Carry) -> Carry:
    _, vjp = jax.vjp(lambda edges: self.embed(edges, row), self.edges)
    blocks, edges = carry.gradients
    return carry._replace(gradients=(blocks, add(edges, *vjp(carry.to_previous))))

  def linearize(self, x: jax.Array, row: Row) -> tuple[jax.Array, list[jax.Array], Rebuild]:
    """A chunk's output, its residuals without the weights, and a function that rebuilds its vjp from both."""
    weights = self.weights(row)
    y, vjp = jax.vjp(lambda weights, x: self.run_chunk(weights, x, row), weights, x)
    leaves, tree = jax.tree.flatten(vjp)
    number = {id(w): i for i, w in enumerate(jax.tree.leaves(weights))}
    sources = [number.get(id(leaf)) for leaf in leaves]  # which weight a leaf is; None for a residual

    def rebuild(residuals: list[jax.Array], weights: Params) -> Callable:
      given, rest = jax.tree.leaves(weights), iter(residuals)
      return jax.tree.unflatten(tree, [next(rest) if i is None else given[i] for i in sources])

    residuals = [leaf for leaf, i in zip(leaves, sources, strict=True) if i is None]
    # Pin the residual stream before it is stored. Otherwise the compiler may split it by width, which suits the
    # weights' gradients, and send it between devices at every tick.
    residuals = [self.pin(r) if r.shape[1:] == x.shape else r for r in residuals]  # [layers, b, T, D]
    return y, residuals, jax.tree_util.Partial(rebuild)

  def pin(self, x: jax.Array) -> jax.Array:
    """Constrains the sharding of activations [..., b, T, D]."""
    return self.sharding.activation(x, *(None,) * (x.ndim - 3), "batch", None, None)

  def run(self) -> Carry:
    """Runs every tick of the schedule. The returned carry holds this stage's sums and gradients.

    Each phase is a scan of its own, whose body has the units and the exchanges of this phase only.
    """
    rows = jax.tree.map(lambda column: jnp.asarray(column)[:, self.index], self.schedule.table)  # [ticks]
    carry, rebuild = self.start(jax.tree.map(lambda column: column[0], rows[FORWARD]))
    carry = carry._replace(to_next=in_order((self.blocks, self.edges), carry.to_next))
    for number, phase in enumerate(self.schedule.phases):
      of_phase = jax.tree.map(lambda column, phase=phase: column[phase.first : phase.end], rows)
      carry, _ = jax.lax.scan(functools.partial(self.tick, number, rebuild), carry, of_phase)
    blocks, edges = carry.gradients
    sums, edges = in_order((carry.to_next, carry.to_previous), (carry.sums, edges))
    return carry._replace(sums=sums, gradients=(blocks, edges))

  def tick(self, number: int, rebuild: Rebuild | None, carry: Carry, rows: Rows) -> tuple[Carry, None]:
    """One tick of a phase. Cotangents travel while the forward unit runs, activations while the backward unit does."""
    phase, arrivals = self.schedule.phases[number], rows["arrivals"]
    send = lambda what, x: jax.lax.ppermute(x, "stage", phase.routes[what]) if what in phase.routes else None
    cotangent = send("cotangent", carry.to_previous)
    if FORWARD in phase.units:
      forward = functools.partial(self.forward, number)
      carry = once(f"forward_{number}", rows[FORWARD]["runs"], forward, rows[FORWARD], carry)
    if cotangent is not None:
      carry = carry._replace(cotangent=put(carry.cotangent, arrivals["cotangent"], cotangent))
    activation = send("activation", carry.to_next)
    if BACKWARD in phase.units:
      assert rebuild is not None
      backward = functools.partial(self.backward, number, rebuild)
      carry = once(f"backward_{number}", rows[BACKWARD]["runs"], backward, rows[BACKWARD], carry)
    if activation is not None:
      carry = carry._replace(activation=put(carry.activation, arrivals["activation"], activation))
    return carry, None

  def start(self, row: Row) -> tuple[Carry, Rebuild | None]:
    """The first carry, with empty slots and a spare one for values that nobody needs; and `rebuild` for `backward`."""

    def example() -> tuple:
      x = self.embed(self.edges, row)
      return x, *(self.linearize(x, row)[1:] if self.step is not None else ([], None))

    x, residuals, rebuild = jax.eval_shape(example)
    room = lambda what, x: jnp.zeros((self.schedule.slots[what] + 1, *x.shape), x.dtype)
    zeros = self.pin(jnp.zeros(x.shape, x.dtype))
    carry = Carry(
      activation=room("activation", x),
      cotangent=room("cotangent", x),
      residuals=[room("residuals", r) for r in residuals],
      to_next=zeros,
      to_previous=zeros,
      sums=no_sums(),
      gradients=self.zero_gradients(),
    )
    return carry, rebuild

  def zero_gradients(self) -> tuple[Params, Params]:
    """Zeros with the sharding of the stored weights, so that gradients are reduced to it when they are added."""

    def zeros(weights: jax.Array, dims: Dims) -> jax.Array:
      return jax.lax.with_sharding_constraint(
        jnp.zeros(weights.shape, self.program.model.param_dtype), self.sharding.layout.spec(dims)
      )

    dims = self.program.dims()
    blocks = jax.tree.map(lambda w, dims: zeros(w, (None, *dims)), self.blocks, dims["blocks"])
    return blocks, jax.tree.map(zeros, self.edges, {name: dims[name] for name in self.edges})


def once(name: str, wanted: jax.Array, work: Callable[[Any, T], T], row: Any, carry: T) -> T:
  """`work(row, carry)` if `wanted`, else `carry`: a loop of one iteration or none, in a named scope of the program.

  It is not a `lax.cond`, because XLA copies values that a branch only passes through, and the carry is large. A loop's
  carry is updated in place. The barrier makes the work depend on the iteration. Otherwise XLA would move parts of the
  work out of the loop and always run them.
  """

  def body(i: jax.Array, carry: T) -> T:
    row_now, carry, _ = jax.lax.optimization_barrier((row, carry, i))
    return work(row_now, carry)

  with jax.named_scope(name):
    return jax.lax.fori_loop(0, wanted.astype(jnp.int32), body, carry)


def put(store: jax.Array, slot: jax.Array, value: jax.Array) -> jax.Array:
  return jax.lax.dynamic_update_index_in_dim(store, value, slot, axis=0)


def add(a: Any, b: Any) -> Any:
  return jax.tree.map(jnp.add, a, b)
