#!/usr/bin/env bash
# On CPUs jax.lax.ragged_dot multiplies each row by the matrices of all groups, not by that of its own.
#
# Expected: the product of 64 rows, sorted by group, costs the same for 1 group and for 32: each row meets one matrix.
# Happens: the program grows with the number of groups, and so does that of both gradients. Memory grows, too.
# Lost: the point of a mixture of experts. On CPUs 32 experts cost as much as if every token went to all of them.
# Versions: jax 0.10.2, Python 3.11, CPU; 2026-11-27. Output (a dense product is 65,536 FLOPs):
#   1 group: 67,648 FLOPs, gradients 65,664 and 67,776
#   32 groups: 2,359,459 FLOPs, gradients 2,228,387 and 2,490,723

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.11}" -m venv "$folder/venv"
cd "$folder"
venv/bin/pip install --quiet --no-compile --disable-pip-version-check jax==0.10.2 numpy==2.4.6
venv/bin/python - <<'END'
import os

os.environ["JAX_PLATFORMS"] = "cpu"
import jax, jax.numpy as jnp

def costs(groups):
  sizes = jnp.full(groups, 64 // groups)
  product = lambda rows, weights: jax.lax.ragged_dot(rows, weights, sizes)
  total = lambda rows, weights: product(rows, weights).sum()
  arguments = jnp.ones((64, 32)), jnp.ones((groups, 32, 16))
  programs = [jax.jit(f).lower(*arguments).compile() for f in (product, jax.grad(total, 0), jax.grad(total, 1))]
  forward, left, right = (program.cost_analysis()["flops"] for program in programs)
  print(f"{groups} group{'s' * (groups > 1)}: {forward:,.0f} FLOPs, gradients {left:,.0f} and {right:,.0f}")
  return forward, left, right

one, many = costs(1), costs(32)
dense = 2 * 64 * 32 * 16
assert all(cost < 1.1 * dense for cost in one)
assert all(cost > 32 * dense for cost in many)
END
