"""The floating-point operations that training a model takes, which throughput and MFU are counted in."""

import math

from models import windows
from models.lora import adapter_weights
from models.mlps import MLPS
from models.sizes import ModelSizes


def train_flops_per_example(sizes: ModelSizes) -> float:
  """Floating-point operations that one forward and backward pass over one example needs. MFU counts these.

  They are 6 for each weight of a matrix product at each position, and 12 · heads · head_dim for each pair of a query
  and a key that attention needs, in each block: in a local one, those that its window shows. A weight that is not
  trained counts 4. An embedding of patches counts 4, or 2 if it is not trained, because pixels need no gradient. Only
  the experts that work on a token count. Recomputation by remat is not counted: that would give hardware FLOPs
  utilization.

  With a causal mask, half of all pairs are needed, and the diagonal. Packed documents count as one text. They do not
  see each other, but no kernel skips their pairs.
  """
  return _train_flops(sizes, sizes.predicts.causal, pixels=-2)


def palm_flops_per_example(sizes: ModelSizes) -> float:
  """The operations as PaLM counts them (arXiv:2204.02311, appendix B): all pairs, causal or not, and 6 for patches.

  Most published MFUs count so. The count can exceed what a step computes: kernels skip what a causal mask hides. A
  window counts on both sides.
  """
  return _train_flops(sizes, False, pixels=0)


def _train_flops(sizes: ModelSizes, causal: bool, pixels: int) -> float:
  """The FLOPs, with `pixels` added for each weight of an embedding of patches that is trained."""
  t = sizes.positions
  mlps = sizes.width * sum(stack.layers * _mlp_weights(stack.sizes) for stack in sizes.stacks)
  blocks = sizes.depth * sum(sizes.mixes.products(sizes).values()) + mlps
  head = math.prod(sizes.predicts.head()[0]) * sizes.predicts.predictions() / t
  each, patches = (4, 2) if sizes.lora else (6, 6 + pixels)
  weights = each * (blocks + head) + patches * sizes.reads.embedding_products()
  pairs = sum(group.layers * windows.pairs(t, group.sizes.shown, causal) for group in sizes.groups.values())
  attention = 6 * pairs * sizes.mixes.per_pair(sizes)
  return t * (weights + sizes.depth * 6 * adapter_weights(sizes)) + attention


def _mlp_weights(sizes: ModelSizes) -> int:
  """How many weights of an MLP and a router work on a token, divided by the width."""
  experts, products = sizes.experts, len(MLPS[sizes.mlp].products)
  return products * sizes.dense_width + (3 * experts.per_token * experts.width + experts.count if experts else 0)
