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
from models.parameters import joined
from training import counting
from training.program import Batch, GradientSums, Params, Program, Sums, Traits, split_batch

OF_WEIGHTS = ("embed", "heads", "mlp", "vocab", "experts")  # the dimensions that weights of a module may have
STATISTICS = "statistics"  # of the batch, among its sums: the new values of the module's statistics


class Definition(NamedTuple):
  """A module without its arrays. Lists in a module have numbers in a path; in the parameters their names are strings.

  Attributes:
    paths: the place of each variable.
    variables: the variables, with shapes in place of arrays.
    is_statistic: whether each is a BatchStat.
  """

  graph: nnx.GraphDef
  paths: Sequence[tuple[Any, ...]]
  variables: Sequence[nnx.Variable]
  is_statistic: Sequence[bool]


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
    return Traits(self.name, measures=measures, keeps_statistics=any(self.definition().is_statistic))

  @functools.cache  # noqa: B019 - equal programs share it, and there are few
  def definition(self) -> Definition:
    """The module's structure. Allocates nothing."""
    graph, state = nnx.split(nnx.eval_shape(lambda: self.module(nnx.Rngs(jax.random.key(0)))))
    paths, variables = zip(*nnx.to_flat_state(state), strict=True)
    for path, variable in zip(paths, variables, strict=True):
      if not isinstance(variable, nnx.Param | nnx.BatchStat):
        raise ConfigError(
          f"model.name={self.name!r} has the variable {name_of(path)!r} of kind {type(variable).__name__}, which steps "
          "do not carry on; use nnx.Param or nnx.BatchStat, and for random numbers the keys that `losses` is given"
        )
    return Definition(graph, paths, variables, [isinstance(variable, nnx.BatchStat) for variable in variables])

  def parameters(self, module: nnx.Module) -> Params:
    """The variables of a module, as nested dicts of arrays."""
    flat = nnx.to_flat_state(nnx.split(module)[1])
    return nested({name_of(path): variable.get_value() for path, variable in flat})

  def bound(self, params: Params) -> nnx.Module:
    """The module with these parameters."""
    graph, paths, variables, _ = self.definition()
    arrays = [functools.reduce(lambda tree, key: tree[str(key)], path, params) for path in paths]
    flat = [(path, v.replace(x)) for path, v, x in zip(paths, variables, arrays, strict=True)]
    module: nnx.Module = nnx.merge(graph, nnx.from_flat_state(flat))
    return module

  def init_params(self, key: jax.Array) -> Params:
    return self.parameters(self.module(nnx.Rngs(Purpose.WEIGHTS.key(key))))

  def dims(self) -> dict[str, Any]:
    found = {}
    for path, variable in zip(self.definition().paths, self.definition().variables, strict=True):
      name, shape = name_of(path), variable.get_value().shape
      found[name] = dims = self.dims_of(name, shape)
      names = [dim for dim in dims or () if dim]
      if (
        not isinstance(dims, tuple)
        or len(dims) != len(shape)
        or len(set(names)) < len(names)
        or not {*names} <= {*OF_WEIGHTS}
      ):
        raise ConfigError(
          f"dims_of({name!r}, {shape}) returns {dims}; it must return a tuple with, for each dimension, None or one of "
          f"{', '.join(OF_WEIGHTS)}, each once"
        )
    return nested(found)

  def shardable(self) -> list[tuple[str, str, int]]:
    definition, found = self.definition(), []
    for path, variable in zip(definition.paths, definition.variables, strict=True):
      name, shape = name_of(path), variable.get_value().shape
      found += [(dim, f"{name}.shape[{at}]", shape[at]) for at, dim in enumerate(self.dims_of(name, shape)) if dim]
    return found

  def trained(self, params: Params) -> Params:
    return self._of(params, False)

  def frozen(self, params: Params) -> Params:
    return self._of(params, True)

  def _of(self, params: Params, statistics: bool) -> Params:
    """The statistics among the parameters, or all others; of those that `params` holds."""
    definition = self.definition()
    wanted = {
      name_of(path)
      for path, is_one in zip(definition.paths, definition.is_statistic, strict=True)
      if is_one == statistics
    }
    return _chosen(params, wanted)

  def flops(self) -> tuple[float, float]:
    """Those of the products and convolutions in the gradient of one example."""
    fields = self.example_shapes().items()
    example = {name: jax.ShapeDtypeStruct((1, *field.shape), field.dtype) for name, field in fields}
    params, step = jax.eval_shape(self.init_params, jax.random.key(0)), jax.ShapeDtypeStruct((), jnp.int32)
    counted = counting.flops(jax.make_jaxpr(self.part_gradient_sums)(params, example, step))
    return counted, counted

  def updated(self, params: Params, sums: Sums, finite: jax.Array) -> Params:
    """The parameters with the new statistics."""
    old, new = self.frozen(params), dict[str, Any](sums).get(STATISTICS, {})
    return joined(self.trained(params), jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, old))

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
    values, named = self.losses(module, batch, keys), ("loss", *self.measures_of_examples)
    for name in named:
      if name not in values or jnp.shape(values[name]) != mask.shape:
        found = f"an array {jnp.shape(values[name])}" if name in values else f"only {', '.join(values)}"
        raise ConfigError(
          f"losses of model.name={self.name!r} returns {found}, but {name!r} must be there for each example, "
          f"{mask.shape}"
        )
    sums: dict[str, Any] = {name: jnp.sum(jnp.where(mask, values[name], 0)) for name in named}
    sums |= {"count": jnp.sum(mask)}
    if step is not None and self.traits.keeps_statistics:
      sums[STATISTICS] = self.frozen(self.parameters(module))
    return sums["loss"], sums

  def _whole(self, params: Params, sharding: Sharding) -> Params:
    """The parameters, gathered along `embed`. Where this is done by hand, they come with padding, which is cut off."""
    shapes = jax.eval_shape(self.init_params, jax.random.key(0))
    cut = lambda w, whole, dims: resized(
      w, tuple(whole.shape[at] if dim == "embed" else w.shape[at] for at, dim in enumerate(dims))
    )
    gathered = jax.tree.map(sharding.gather, params, self.dims())
    return jax.tree.map(cut, gathered, shapes, self.dims())

  def gradient_sums(
    self,
    params: Params,
    batch: Batch,
    step: jax.Array,
    sharding: Sharding = UNSHARDED,
    of_part: GradientSums | None = None,
  ) -> tuple[Sums, Params]:
    """Sums over the batch. Each part of it begins with the statistics that the part before has left."""
    if self.accumulation == 1 or not self.traits.keeps_statistics:
      found = super().gradient_sums(params, batch, step, sharding, of_part)
    else:
      of_part = of_part or self.part_gradient_sums

      def add(carry: tuple[Params, tuple[Sums, Params]], part: Batch) -> tuple[Any, None]:
        statistics, total = carry
        sums, gradients = of_part(joined(self.trained(params), statistics), part, step, sharding)
        left: Any = sums.pop(STATISTICS)
        return (left, jax.tree.map(jnp.add, total, (sums, gradients))), None

      zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), self.trained(params))
      start = self.frozen(params), (self.no_sums(step), zeros)
      (statistics, found), _ = jax.lax.scan(add, start, split_batch(batch, self.accumulation, sharding))
      found[0][STATISTICS] = statistics  # type: ignore[assignment]
    sums: dict[str, Any] = {**found[0]}
    if STATISTICS in sums and (axes := _axes_by_hand()):  # whoever runs this by hand adds them up over the devices
      sums[STATISTICS] = jax.tree.map(lambda x: x / jax.lax.psum(1, axes), sums[STATISTICS])
    return sums, found[1]


def _axes_by_hand() -> tuple[str, ...]:
  """The mesh axes over which this code is manual: in a `shard_map` or a pmap, a device has only rows of its own."""
  return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def name_of(path: Sequence[Any]) -> str:
  """The name of a variable, such as "layers/0/kernel"."""
  return "/".join(map(str, path))


def nested(flat: dict[str, Any]) -> Params:
  """Values by name as nested dicts."""
  found: Params = {}
  for name, value in flat.items():
    *path, last = name.split("/")
    functools.reduce(lambda inner, part: inner.setdefault(part, {}), path, found)[last] = value
  return found


def _chosen(tree: Params, names: set[str], before: str = "") -> Params:
  """The entries of nested dicts that have these names."""
  found = {}
  for key, value in tree.items():
    inner = _chosen(value, names, f"{before}{key}/") if isinstance(value, dict) else value
    if inner if isinstance(value, dict) else before + key in names:
      found[key] = inner
  return found
