#!/usr/bin/env bash
# In jax.nn.dot_product_attention, a query that may see no key sees all of them.
#
# Expected: zeros or NaN where the mask forbids everything, as for a padding position or a text of length 0.
# Happens: the result is the mean of all values, forbidden ones too: those of the future, or of padding. A score is
# replaced by a large negative number, the same for all keys, and softmax makes equal weights of equal scores.
# Lost: causality, in silence: a masked first token makes the outputs of its row depend on later tokens, and their
# values get gradients. Give each query one key to see, or set its result to 0.
# Versions: jax 0.10.2, Python 3.11, CPU; 2026-11-27. Output (values 0, 1, 2, 3):
#   mask of nothing: 1.5
#   key_value_seq_lengths=0: 1.5
#   causal, first key masked: first query 1.5, second query 1.0

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

x, values = jnp.zeros((1, 4, 1, 1)), jnp.arange(4.0).reshape(1, 4, 1, 1)

def attend(**masks):
  return jax.nn.dot_product_attention(x, x, values, **masks)[0, :, 0, 0].tolist()

nothing = attend(mask=jnp.zeros((1, 1, 4, 4), bool))
empty = attend(key_value_seq_lengths=jnp.array([0]))
causal = attend(is_causal=True, mask=jnp.array([False, True, True, True]).reshape(1, 1, 1, 4))
print(f"mask of nothing: {nothing[0]}\nkey_value_seq_lengths=0: {empty[0]}")
print(f"causal, first key masked: first query {causal[0]}, second query {causal[1]}")
assert nothing == empty == [1.5] * 4 and causal == [1.5, 1.0, 1.5, 2.0]
END
