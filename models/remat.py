"""Rematerialization: what a block's backward pass reuses from the forward pass, and what it computes again."""

from collections.abc import Callable

import jax

from models.attention import OUTPUT
from models.cores import CUDNN, RESULTS

# The gather of a weight, and views of the result. None may outlive the block, so the backward pass repeats them.
VIEWS = frozenset(
  {"sharding_constraint", "all_gather", "optimization_barrier", "reshape", "transpose", "convert_element_type"}
)

# Cheap to recompute from values that the backward pass reads anyway; saving them would cost more.
ELEMENTWISE = frozenset({"mul", "div", "sub", "logistic"})

Policy = Callable[..., bool]  # a policy of `jax.checkpoint`


def save_all_but(names: frozenset[str]) -> Policy:
  """A remat policy that saves the results of all primitives except these."""
  return lambda primitive, *_, **__: primitive.name not in names


def save_any(*policies: Policy) -> Policy:
  """A remat policy that saves what any of these saves."""
  return lambda *given, **named: any(policy(*given, **named) for policy in policies)


# What a block's backward pass reuses from the forward pass. "minimal" recomputes only what is cheap: gathers and
# elementwise operations. "dots" saves only the results of matrix products and of attention kernels. "full" saves only
# the block's input.
REMAT_POLICIES: dict[str, Policy] = {
  "minimal": save_all_but(VIEWS | ELEMENTWISE),
  "dots": save_any(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    jax.checkpoint_policies.save_only_these_names(OUTPUT, RESULTS),  # OUTPUT: a device's own positions of a product
    lambda primitive, *_, **__: primitive.name == CUDNN,
  ),
  "full": jax.checkpoint_policies.nothing_saveable,
}
