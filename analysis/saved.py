"""What the backward pass keeps of the forward pass, read from JAX's own trace of the model: exact, and nothing is run.

A device that has a part of the heads, of the MLP and of the batch computes a smaller model of the same width. So the
blocks are traced in these smaller sizes, for one example; every strategy's share follows from that.
"""

import dataclasses
import functools

import jax
from flax import nnx

from models.config import ModelConfig
from models.transformer import REMAT_POLICIES, VIEWS, Transformer, bind, save_all_but

SAVE_ALL = save_all_but(VIEWS)  # every value of a block, for measuring


def bytes_per_example(model: ModelConfig, heads: int, mlp: int, layers: int, remat: str | None = None) -> int:
  """Bytes kept for one example by `layers` blocks on a device that has 1/heads of the heads and 1/mlp of the MLP.

  `remat` stands in for the model's own, if given; "all" gives all values that a block has. Each is in proportion to the
  heads, to the MLP or to neither, and there once or in each block: six traces tell all.
  """
  traced_here = functools.partial(traced, model, remat or model.remat)
  sizes = {"heads": (model.kv_heads, heads), "mlp": (model.mlp_width, mlp)}

  def by(layers: int) -> int:
    whole = found = traced_here(layers=layers)
    for part, (size, shards) in sizes.items():
      if shards > 1:
        few = next(n for n in range(2, size + 1) if size % n == 0)
        in_part = (whole - traced_here(layers=layers, **{part: few})) * few // (few - 1)
        found -= in_part - in_part // shards
    return found

  return by(1) + (layers - 1) * (by(2) - by(1)) if layers > 1 else by(1)


@functools.cache
def traced(model: ModelConfig, remat: str, heads: int = 1, mlp: int = 1, layers: int = 1) -> int:
  """`bytes_per_example`, from a trace of such a part of the model."""
  part = dataclasses.replace(
    model,
    heads=model.heads // heads,
    kv_heads=model.kv_heads // heads,
    mlp_width=model.mlp_width // mlp,
    depth=layers,
    vocab_size=1,
  )
  policy = SAVE_ALL if remat == "all" else REMAT_POLICIES[remat]
  _, params = nnx.split(nnx.eval_shape(lambda: Transformer(part, nnx.Rngs(params=0))), nnx.Param)
  shapes = nnx.to_pure_dict(params)

  def kept(examples: int) -> int:
    x = jax.ShapeDtypeStruct((examples, model.positions, model.width), model.dtype)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), examples)) if model.dropout else None
    blocks = lambda params, x, keys: bind(part, params).run_blocks(x, keys=keys, policy=policy)[0]
    vjp = lambda params, x, keys: jax.vjp(functools.partial(blocks, keys=keys), params, x)[1]
    leaves = jax.eval_shape(lambda *given: jax.tree.leaves(vjp(*given)), shapes, x, keys)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

  return kept(2) - kept(1)  # weights, and the angles of positions, are the same for both
