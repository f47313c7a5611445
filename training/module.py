"""The program of any flax.nnx module: a model of your own, under every strategy whose axes split something of it.

A subclass of `ModuleProgram` says how the module is made, what its loss is for each example, which fields it reads and,
in one function, which dimensions of its weights have which names. docs/fork.md shows one.
"""

import abc
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from errors import ConfigError
from models.dimensions import UNSHARDED, Dims, Sharding, resized
from models.keys import Purpose
from models.parameters import chosen, named, nested
from training import counting
from training.program import STATISTICS, Batch, Params, Program, Sums, Traits

OF_WEIGHTS = ("embed", "heads", "mlp", "vocab", "experts")  # the dimensions that weights of a module may have


class Definition(NamedTuple):
  """A module without its arrays. Lists in a module have numbers in a path; in the parameters their names are strings.

  Attributes:
    variables: the place of each variable, and the variable with a shape in place of its array.
    shapes: the shape of each, by its name, such as "layers/0/kernel".
    statistics: the names of those that are a BatchStat.
  """

  graph: nnx.GraphDef
  variables: list[tuple[tuple[Any, ...], nnx.Variable]]
  shapes: dict[str, tuple[int, ...]]
  statistics: frozenset[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModuleProgram(Program, abc.ABC):
  """A program whose model is a flax.nnx module. Its variables are of the kinds Param and BatchStat.

  A BatchStat, such as the mean of nnx.BatchNorm, is stored among the parameters and is not trained. It is computed from
  the whole global batch or, with accumulation, from each part of it, one after another.

  Attributes:
    name: the name under which it is registered, `model.name`.
  """

  name: str

  @abc.abstractmethod
  def module(self, rngs: nnx.Rngs) -> nnx.Module:
    """Makes the module with random weights."""

  @abc.abstractmethod
  def losses(self, module: Any, batch: Batch, keys: jax.Array | None) -> dict[str, jax.Array]:
    """The `loss` of each example [B], and other numbers of each that are reported as means, such as `accuracy`.

    Args:
      module: in training mode or, in evaluation, in evaluation mode (`nnx.Module.eval`).
      keys: a random key for each example [B]; None in evaluation.
    """

  @property
  @abc.abstractmethod
  def measures_of_examples(self) -> tuple[str, ...]:
    """The names that `losses` returns beside `loss`."""

  def dims_of(self, name: str, shape: tuple[int, ...]) -> Dims:
    """The names of the dimensions of a weight (models/dimensions.py), such as "dense/kernel".

    By default the largest dimension of each weight with several is `embed`, which FSDP splits.
    """
    largest = max(range(len(shape)), key=lambda at: (shape[at], at), default=0)
    return tuple("embed" if len(shape) > 1 and at == largest else None for at in range(len(shape)))

  @property
  def traits(self) -> Traits:
    measures = {name: name for name in self.measures_of_examples}
    return Traits(self.name, measures=measures, keeps_statistics=bool(self.definition().statistics))

  @functools.cache  # noqa: B019 - equal programs share it, and there are few
  def definition(self) -> Definition:
    """The module's structure. Allocates nothing."""
    graph, state = nnx.split(nnx.eval_shape(lambda: self.module(nnx.Rngs(jax.random.key(0)))))
    variables = nnx.to_flat_state(state)
    by_name = {name_of(path): variable for path, variable in variables}
    for name, variable in by_name.items():
      if not isinstance(variable, nnx.Param | nnx.BatchStat):
        raise ConfigError(
          f"model.name={self.name!r} has the variable {name!r} of kind {type(variable).__name__}, which steps do not "
          "carry on; use nnx.Param or nnx.BatchStat, and for random numbers the keys that `losses` is given"
        )
    shapes = {name: variable.get_value().shape for name, variable in by_name.items()}
    statistics = frozenset(name for name, variable in by_name.items() if isinstance(variable, nnx.BatchStat))
    return Definition(graph, list(variables), shapes, statistics)

  def parameters(self, module: nnx.Module) -> Params:
    """The variables of a module, as nested dicts of arrays."""
    return nested((name_of(path), v.get_value()) for path, v in nnx.to_flat_state(nnx.split(module)[1]))

  def bound(self, params: Params) -> nnx.Module:
    """The module with these parameters."""
    definition, arrays = self.definition(), dict(named(params))
    flat = [(path, variable.replace(arrays[name_of(path)])) for path, variable in definition.variables]
    module: nnx.Module = nnx.merge(definition.graph, nnx.from_flat_state(flat))
    return module

  def init_params(self, key: jax.Array) -> Params:
    return self.parameters(self.module(nnx.Rngs(Purpose.WEIGHTS.key(key))))

  @functools.cache  # noqa: B019 - as `definition`
  def dims_by_name(self) -> dict[str, Dims]:
    """What `dims_of` says of each variable. Raises ConfigError if that cannot be."""
    found = {name: self.dims_of(name, shape) for name, shape in self.definition().shapes.items()}
    for name, dims in found.items():
      shape, given = self.definition().shapes[name], [dim for dim in dims or () if dim]
      fits = isinstance(dims, tuple) and len(dims) == len(shape)
      if not fits or len({*given}) < len(given) or not {*given} <= {*OF_WEIGHTS}:
        raise ConfigError(
          f"dims_of({name!r}, {shape}) returns {dims}; it must return a tuple with, for each dimension, None or one of "
          f"{', '.join(OF_WEIGHTS)}, each once"
        )
    return found

  def dims(self) -> dict[str, Any]:
    return nested(self.dims_by_name().items())

  def shardable(self) -> list[tuple[str, str, int]]:
    each = [(name, at, dim) for name, dims in self.dims_by_name().items() for at, dim in enumerate(dims)]
    return [(dim, f"{name}.shape[{at}]", self.definition().shapes[name][at]) for name, at, dim in each if dim]

  def trained(self, params: Params) -> Params:
    return chosen(params, lambda path: name_of(path) not in self.definition().statistics)

  def frozen(self, params: Params) -> Params:
    return chosen(params, lambda path: name_of(path) in self.definition().statistics)

  def flops(self) -> tuple[float, float]:
    """Those of the products and convolutions in the gradient of one example."""
    fields = self.example_shapes().items()
    example = {name: jax.ShapeDtypeStruct((1, *field.shape), field.dtype) for name, field in fields}
    params = jax.eval_shape(lambda: self.init_params(jax.random.key(0)))
    step = jax.ShapeDtypeStruct((), jnp.int32)
    counted = counting.flops(jax.make_jaxpr(self.part_gradient_sums)(params, example, step))
    return counted, counted

  def updated(self, params: Params, sums: Sums, finite: jax.Array) -> Params:
    """The parameters with the new statistics."""
    old, new = self.statistics(params), dict[str, Any](sums).get(STATISTICS, {})
    return self.with_statistics(params, jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, old))

  def no_sums(self, step: jax.Array | None) -> Sums:
    return {name: jnp.zeros(()) for name in ("loss", *self.measures_of_examples)} | {"count": jnp.zeros((), jnp.int32)}

  def loss_sums(
    self, params: Params, batch: Batch, step: jax.Array | None, sharding: Sharding = UNSHARDED
  ) -> tuple[jax.Array, Sums]:
    params = self._whole(params, sharding)
    batch = {name: sharding.activation(x, "batch", *(None,) * (x.ndim - 1)) for name, x in batch.items()}
    module, mask = self.bound(params), batch["mask"]
    keys = None if step is None else self.example_keys(batch["id"], step, Purpose.DROPOUT)
    module.eval() if step is None else module.train()
    if axes := _axes_by_hand():
      for _, part in nnx.iter_modules(module):
        if isinstance(part, nnx.BatchNorm):
          part.axis_name = axes  # type: ignore[assignment]
    values, reported = self.losses(module, batch, keys), ("loss", *self.measures_of_examples)
    for name in reported:
      if name not in values or jnp.shape(values[name]) != mask.shape:
        found = f"an array {jnp.shape(values[name])}" if name in values else f"only {', '.join(values)}"
        raise ConfigError(
          f"losses of model.name={self.name!r} returns {found}, but {name!r} must be there for each example, "
          f"{mask.shape}"
        )
    sums: dict[str, Any] = {name: jnp.sum(jnp.where(mask, values[name], 0)) for name in reported}
    sums |= {"count": jnp.sum(mask)}
    if step is not None and self.traits.keeps_statistics:
      sums[STATISTICS] = self.frozen(self.parameters(module))
    return sums["loss"], sums

  def _whole(self, params: Params, sharding: Sharding) -> Params:
    """The parameters, gathered along `embed`. Where this is done by hand, they come with padding, which is cut off."""

    def whole(name: str, w: jax.Array) -> jax.Array:
      dims, shape = self.dims_by_name()[name], self.definition().shapes[name]
      gathered = sharding.gather(w, dims)
      sizes = zip(dims, shape, gathered.shape, strict=True)
      return resized(gathered, [size if dim == "embed" else held for dim, size, held in sizes])

    return nested((name, whole(name, w)) for name, w in named(params))

  def gradient_sums(self, *given: Any, **more: Any) -> tuple[Sums, Params]:
    sums, gradients = super().gradient_sums(*given, **more)
    if axes := _axes_by_hand():  # whoever runs this by hand adds up sums over the devices, and these are equal on all
      equal = dict[str, Any](sums).get(STATISTICS, {})
      sums = sums | {STATISTICS: jax.tree.map(lambda x: x / jax.lax.psum(1, axes), equal)} if equal else sums
    return sums, gradients


def _axes_by_hand() -> tuple[str, ...]:
  """The mesh axes over which this code is manual: in a `shard_map` or a pmap, a device has only rows of its own."""
  return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def name_of(path: Sequence[Any]) -> str:
  """The name of a variable, such as "layers/0/kernel"."""
  return "/".join(map(str, path))
