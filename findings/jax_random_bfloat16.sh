#!/usr/bin/env bash
# In bfloat16 jax.random has 128 values to draw: sampling from logits in bfloat16 never reaches most of a vocabulary.
#
# Expected: logits are rounded to bfloat16, but draws from them are as random as ever.
# Happens: random bits become a number in bfloat16 first, one of 128. Of 50,257 tokens with equal logits, categorical
# draws only some of the first thousand: many share the largest Gumbel noise, and the first of those is taken. bernoulli
# of 0.1% is true in 0.8% of cases. normal has 128 values, none of them beyond 3.
# mode="high" is right for bernoulli, but categorical still prefers the first tokens: they have the mean 13,293.
# Lost: texts written from a model's bfloat16 logits, and weights initialized in bfloat16. Draw in float32.
# Versions: jax 0.10.2, numpy 2.4.6, Python 3.11, CPU; 2026-11-27. Output:
#   float32: tokens up to 50,208; bernoulli(0.001) 0.0010; normal has 942,524 values, up to 4.65
#   bfloat16: tokens up to 713; bernoulli(0.001) 0.0077; normal has 128 values, up to 2.89
#   mean token with mode=high: float32 25,175, bfloat16 13,293

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.11}" -m venv "$folder/venv"
cd "$folder"
venv/bin/pip install --quiet --no-compile --disable-pip-version-check jax==0.10.2 numpy==2.4.6 ml_dtypes==0.6.0
venv/bin/python - <<'END'
import os

os.environ["JAX_PLATFORMS"] = "cpu"
import jax, jax.numpy as jnp
import numpy as np

def tokens(dtype, mode):
  sample = lambda key: jax.random.categorical(key, jnp.zeros(50_257, dtype), mode=mode)
  return jax.jit(jax.vmap(sample))(jax.random.split(jax.random.key(0), 300))

def drawn(dtype):
  key, million = jax.random.key(0), (1_000_000,)
  last = int(tokens(dtype, "low").max())
  share = float(jax.random.bernoulli(key, jnp.asarray(0.001, dtype), million).mean())
  normal = np.asarray(jax.random.normal(key, million, dtype)).astype(np.float32)
  values, largest = len(np.unique(normal)), float(np.abs(normal).max())
  print(f"{np.dtype(dtype)}: tokens up to {last:,}; bernoulli(0.001) {share:.4f}; "
        f"normal has {values:,} values, up to {largest:.2f}")
  return last, share, values, largest

last, share, values, largest = drawn(jnp.float32)
assert last > 49_000 and abs(share - 0.001) < 1e-4 and values > 900_000 and largest > 4.5
last, share, values, largest = drawn(jnp.bfloat16)
assert last < 1_000 and share > 0.007 and values == 128 and largest < 3

means = [float(tokens(dtype, "high").mean()) for dtype in (jnp.float32, jnp.bfloat16)]
print("mean token with mode=high: float32 {:,.0f}, bfloat16 {:,.0f}".format(*means))
assert means[0] > 23_000 and means[1] < 15_000
END
