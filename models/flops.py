"""The floating-point operations that training a model takes, which throughput and MFU are counted in."""

import math

from models.lora import adapter_weights
from models.mlps import MLPS
from models.sizes import ModelSizes


def train_flops_per_example(sizes: ModelSizes) -> float:
  """Floating-point operations that one forward and backward pass over one example needs. MFU counts these.

  They are 6 for each weight of a matrix product at each position, and 12 · heads · head_dim for each pair of a query
  and a key that attention needs, in each block. A weight that is not trained counts 4. An embedding of patches counts
  4, or 2 if it is not trained, because pixels need no gradient. Only the experts that work on a token count.
  Recomputation by remat is not counted: that would give hardware FLOPs utilization.

  With a causal mask, half of all pairs are needed, and the diagonal. Packed documents count as one text. They do not
  see each other, but no kernel skips their pairs.
  """
  t = sizes.positions
  return _train_flops(sizes, t * (t + 1) / 2 if sizes.predicts.causal else t**2, pixels=-2)


def palm_flops_per_example(sizes: ModelSizes) -> float:
  """The operations as PaLM counts them (arXiv:2204.02311, appendix B): all pairs, causal or not, and 6 for patches.

  Most published MFUs count so. The count can exceed what a step computes: kernels skip what a causal mask hides.
  """
  return _train_flops(sizes, sizes.positions**2, pixels=0)


def _train_flops(sizes: ModelSizes, pairs: float, pixels: int) -> float:
  """The FLOPs for this many pairs, with `pixels` added for each weight of an embedding of patches that is trained."""
  t = sizes.positions
  mlps = sizes.width * sum(stack.layers * _mlp_weights(stack.sizes) for stack in sizes.stacks)
  blocks = sizes.depth * sum(sizes.mixes.products(sizes).values()) + mlps
  head = math.prod(sizes.predicts.head()[0]) * sizes.predicts.predictions() / t
  each, patches = (4, 2) if sizes.lora else (6, 6 + pixels)
  weights = each * (blocks + head) + patches * sizes.reads.embedding_products()
  attention = 6 * pairs * sizes.mixes.per_pair(sizes)
  return t * (weights + sizes.depth * 6 * adapter_weights(sizes)) + sizes.depth * attention


def _mlp_weights(sizes: ModelSizes) -> int:
  """How many weights of an MLP and a router work on a token, divided by the width."""
  experts, products = sizes.experts, len(MLPS[sizes.mlp].products)
  return products * sizes.dense_width + (3 * experts.per_token * experts.width + experts.count if experts else 0)
