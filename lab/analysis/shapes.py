"""The sizes of models to plan for, from their number of parameters alone."""

import math

from errors import ConfigError

# Llama 3 (arXiv:2407.21783, table 3): 8.03 and 70.6 billion parameters, with 8 key heads.
LLAMA3 = {
  "8B": {"width": 4096, "depth": 32, "heads": 32, "kv_heads": 8, "mlp_width": 14_336, "vocab_size": 128_256},
  "70B": {"width": 8192, "depth": 80, "heads": 64, "kv_heads": 8, "mlp_width": 28_672, "vocab_size": 128_256},
}
NEAR = 0.02  # how far a number of parameters may be from that of a published model


def size_of(shape: dict[str, int]) -> int:
  """The parameters of a model of this shape, without those of its norms."""
  width, keys = shape["width"], shape["width"] * shape["kv_heads"] // shape["heads"]
  block = 2 * width * (width + keys) + 3 * width * shape["mlp_width"]
  return 2 * width * shape["vocab_size"] + shape["depth"] * block


def model_of(params: float, length: int) -> dict[str, int]:
  """The sizes of a Llama-shaped model with about this many parameters, for sequences of this length.

  Near a size of Llama 3 they are the published ones. The proportions of others are Llama's (Touvron et al. 2023,
  arXiv:2302.13971): heads of 128, width = 128 × depth, and an MLP of 8/3 the width. Raises ConfigError if no such model
  has about this many parameters.
  """
  if not 1e7 <= params <= 1e13:
    raise ConfigError(f"params={params:g} does not fit a model with Llama's proportions; use 1e8 to 1e12")
  for shape in LLAMA3.values():
    if abs(params / size_of(shape) - 1) < NEAR:
      return shape | {"seq_len": length}
  sizes = []
  for heads in (*range(4, 16, 4), *range(16, 257, 8)):  # common numbers of devices divide these
    width = 128 * heads
    mlp = round(8 / 3 * width / 256) * 256
    per_block = 4 * width * width + 3 * width * mlp
    depth = max(1, round((params - 2 * width * 32_000) / per_block))
    depth = max(4, round(depth / 4) * 4)  # stages can divide this
    count = 2 * width * 32_000 + depth * per_block
    sizes.append((abs(count / params - 1) + abs(math.log(depth / heads)), heads, depth, mlp, count))
  _, heads, depth, mlp, count = min(sizes)
  if abs(count / params - 1) > 0.2:
    raise ConfigError(f"params={params:g} does not fit a model with Llama's proportions; use 1e8 to 1e12")
  named = {"width": 128 * heads, "depth": depth, "heads": heads, "kv_heads": heads, "mlp_width": mlp}
  return named | {"seq_len": length, "vocab_size": 32_000}


def mixture_of(params: float, active: float, experts: int, length: int) -> dict[str, int]:
  """The sizes of a mixture with about this many parameters, of which so many work on a token.

  The active part has the proportions of `model_of`, with its MLP in equal pieces: the experts of a token. Raises
  ConfigError if so many experts do not make such a model.
  """
  if not 0 < active < params:
    raise ConfigError(
      f"active={active:g} must be below params={params:g}, the size with all experts; use a smaller one"
    )
  dense = model_of(active, length)
  of_mlps = dense["depth"] * 3 * dense["width"] * dense["mlp_width"]
  chosen = round(experts / (1 + (params - active) / of_mlps))
  width = round(dense["mlp_width"] / max(chosen, 1) / 128) * 128
  total = active - of_mlps + experts * dense["depth"] * 3 * dense["width"] * width
  if not chosen or not width or abs(total / params - 1) > 0.2:
    raise ConfigError(
      f"experts={experts} do not make a model of params={params:g} with active={active:g}; use about "
      f"{max(2, round(2 * (1 + (params - active) / of_mlps)))} experts or a multiple"
    )
  return dense | {"experts": experts, "experts_per_token": chosen, "expert_width": width}
