#!/usr/bin/env bash
# With weights in bfloat16, Adam's second moment in optax never decays: 0.999 is 1 there.
#
# Expected: moments in bfloat16 are coarse, but they follow the gradients, and forget them over some thousand steps.
# Happens: the number nearest to 0.999 in bfloat16 is 1, so a moment only grows, until what is added is too small to
# change it. A weight that had large gradients once has small steps for ever.
# Lost: learning, without an error or a NaN. Keep the weights that optax sees in float32, or take b2=0.99.
# Versions: jax 0.10.2, optax 0.2.8, Python 3.11, CPU; 2026-11-27.
# After 2,000 gradients of 1, 5,000 of 0 and 1,000 of 0.01. Output:
#   float32: second moment 0.0022, step 0.213
#   bfloat16: second moment 0.5000, step 0.0132
#   bfloat16, b2=0.99: second moment 0.0001, step 1.19

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.11}" -m venv "$folder/venv"
cd "$folder"
venv/bin/pip install --quiet --no-compile --disable-pip-version-check jax==0.10.2 optax==0.2.8 numpy==2.4.6
venv/bin/python - <<'END'
import os

os.environ["JAX_PLATFORMS"] = "cpu"
import jax, jax.numpy as jnp, optax

def trained(dtype, **b2):
  adam = optax.scale_by_adam(**b2)
  state, update = adam.init(jnp.ones(1, dtype)), jax.jit(adam.update)
  for steps, gradient in ((2000, 1.0), (5000, 0.0), (1000, 0.01)):
    for _ in range(steps):
      step, state = update(jnp.full(1, gradient, dtype), state)
  assert state.nu.dtype == dtype
  name = ", ".join([jnp.dtype(dtype).name, *(f"{key}={value}" for key, value in b2.items())])
  print(f"{name}: second moment {float(state.nu[0]):.4f}, step {float(step[0]):.3g}")
  return float(state.nu[0]), float(step[0])

moment, step = trained(jnp.float32)
assert moment < 0.003 and step > 0.2
moment, step = trained(jnp.bfloat16)
assert moment == 0.5 and step < 0.015
moment, step = trained(jnp.bfloat16, b2=0.99)
assert moment < 0.001 and step > 0.5
END
