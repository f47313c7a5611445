"""Rematerialization: what a block's backward pass reuses from the forward pass, and what it computes again.

A policy decides by the kind of operation. In addition, some values of a block have names (`NAMES`), and `model.saved`
lists those to save.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from errors import one_of

CUDNN = "dot_product_attention_fwd_wrapper"  # the primitive whose results cuDNN's backward pass reads again
KERNEL = "attention kernel"  # the name of what the backward passes of splash attention and of `blockwise` read again

SCALE = "scale"  # the name of what products in float8 multiply by, which is always saved
ADAPTER = "adapter"  # the name of the values between the halves of an adapter that writes to the residual stream

# What a block computes for one example of T positions, in the compute dtype: the values that have a name.
NAMES = {
  "block_input": "the residual stream before the block [T, D]; always saved",
  "query": "rotated queries [T, N, H]",
  "key": "rotated keys [T, K, H]",
  "value": "values [T, K, H]",
  "attended": "what each head has read [T, N, H]; of kernels and `blockwise`, all that their backward passes read",
  "attention_output": "what attention adds to the residual stream [T, D]",
  "mlp_gate": "the product with `gate` [T, F]",
  "mlp_up": "the product with `up` [T, F]",
  "mlp_hidden": "silu(gate) · up [T, F]",
}

# Operations that gather a weight or make views of it. No result may outlive the block, so the backward pass repeats
# them. If the weight is not trained, its gather is still one call, with a derivative that nobody asks for.
VIEWS = frozenset({
  "sharding_constraint", "all_gather", "optimization_barrier", "reshape", "transpose", "convert_element_type",
  "custom_vjp_call",
})  # fmt: skip

# Cheap to recompute from values that the backward pass reads anyway; saving them would cost more.
ELEMENTWISE = frozenset({"mul", "div", "sub", "logistic"})

Policy = Callable[..., Any]  # a policy of `jax.checkpoint`

# Values saved by name, once each device has kept only its own positions.
_output = jax.checkpoint_policies.save_only_these_names("attention_output", ADAPTER)
_results = jax.checkpoint_policies.save_only_these_names("attention_output", ADAPTER, KERNEL)


def save_all_but(primitives: frozenset[str]) -> Policy:
  """A remat policy that saves the results of all primitives except these. `_output` decides on values with a name."""
  return lambda primitive, *given, **named: (
    _output(primitive, *given, **named)
    if primitive.name == "name"
    else not (primitive.name in primitives or _cuts(primitive, **named) or _reads_bits(primitive, **named))
  )


def _cuts(primitive: Any, **named: Any) -> bool:
  """Whether a primitive cuts off ends of an array: the padding of a gathered weight, or the weights of other blocks."""
  return primitive.name == "pad" and any(min(low, high) < 0 for low, high, _ in named["padding_config"])


def _reads_bits(primitive: Any, **named: Any) -> bool:
  """Whether a primitive makes numbers of a weight's bits in float8."""
  return primitive.name == "bitcast_convert_type" and jnp.dtype(named["new_dtype"]).itemsize == 1


# What a block's backward pass reuses from the forward pass. "minimal" recomputes only what is cheap: gathers and
# elementwise operations. "dots" saves only the results of products with weights, of attention kernels and of
# `blockwise`. "full" saves only the block's input, and "offload" too, but in the host's memory. They decide by
# primitive: with a name for the gathered weight, the value before it and the reshape after it would still be saved.
REMAT_POLICIES: dict[str, Policy] = {
  "minimal": save_all_but(VIEWS | ELEMENTWISE),
  "dots": lambda primitive, *given, **named: (
    primitive.name == CUDNN
    or _results(primitive, *given, **named)
    or jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *given, **named)
  ),
  "full": jax.checkpoint_policies.nothing_saveable,
  "offload": jax.checkpoint_policies.nothing_saveable,
}


# The named values that these policies save by themselves, or compute from saved values without a product.
_SAVED = {
  "minimal": frozenset(NAMES),
  "dots": frozenset({"block_input", "query", "key", "value", "attention_output", "mlp_gate", "mlp_up"}),
}


def names_of(saved: str) -> frozenset[str]:
  """The names in a list with commas. Raises ConfigError for a name that does not exist."""
  return frozenset(one_of("model.saved", name.strip(), NAMES) for name in saved.split(",") if name.strip())


def saved_names(remat: str, saved: str = "") -> frozenset[str]:
  """The named values that the backward pass need not compute again with matrix products."""
  return _SAVED.get(remat, frozenset({"block_input"})) | names_of(saved)


def _contracted(x: Any, _: Any, *, dimension_numbers: Any, **given: Any) -> int:
  """How many numbers a product sums for each of its results."""
  return math.prod(x.shape[at] for at in dimension_numbers[0][0])


@functools.cache
def policy_of(remat: str, saved: str = "", rank: int = 0) -> Policy:
  """The policy of the fields `model.remat` and `model.saved`. "offload" moves the named values to the host, too.

  Args:
    rank: the rank of adapters. Their large results are never saved: such small products cost little to repeat.
  """
  names, others = names_of(saved), REMAT_POLICIES[remat]
  names |= {KERNEL} if "attended" in names else set()
  named = jax.checkpoint_policies.save_only_these_names(*names)
  if remat == "offload":
    names |= {"block_input"}
    named = jax.checkpoint_policies.save_and_offload_only_these_names(
      names_which_can_be_saved=(),
      names_which_can_be_offloaded=names,
      offload_src="device",
      offload_dst="pinned_host",
    )

  def policy(primitive: Any, *args: Any, **given: Any) -> Any:
    if primitive.name == CUDNN and "attended" in names:
      return True  # its results have no names, without which they cannot be offloaded
    if rank and primitive.name == "dot_general" and _contracted(*args, **given) == rank:
      return False
    if primitive.name == "name" and given["name"] == SCALE:
      return True
    chosen = named if primitive.name == "name" and given["name"] in names else others
    return chosen(primitive, *args, **given)

  return policy
