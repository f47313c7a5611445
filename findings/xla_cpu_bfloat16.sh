#!/usr/bin/env bash
# On CPUs with bfloat16 units, XLA computes most products of bfloat16 matrices in float32.
#
# Expected: a product of two bfloat16 matrices uses the CPU's units for them (avx512_bf16 or amx_bf16), in any order.
# Happens: it does if the result is float32, and the left matrix is not transposed, nor the right one by `.T`. All others
# are converted to float32 first, also a product with a bfloat16 result. An einsum may transpose the right matrix, and a
# barrier round a flat copy keeps XLA from seeing that the left one is transposed.
# Lost: training in bfloat16 is no faster than in float32, because layers have bfloat16 results, and a weight's gradient
# is a product with a transposed left matrix.
# Versions: jax 0.10.2, Python 3.11, 2 cores of an Intel Xeon with amx_bf16; 2026-11-29. Other programs used the cores, so
# only the ratios mean something. Output, with the median speed of 2,048³ (float32: 1):
#   x @ w, bfloat16 result: float32, 0.7
#   x @ w, float32 result: bfloat16, 3.3
#   g @ w.T, float32 result: float32, 0.8
#   einsum of g and w: bfloat16, 4.0
#   x.T @ g, float32 result: float32, 0.9
#   the same with a barrier: bfloat16, 2.8

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.11}" -m venv "$folder/venv"
cd "$folder"
venv/bin/pip install --quiet --no-compile --disable-pip-version-check jax==0.10.2 numpy==2.4.6
venv/bin/python - <<'END'
import os, re, statistics, time

os.environ["JAX_PLATFORMS"] = "cpu"
import jax, jax.numpy as jnp

flat = lambda x: jax.lax.optimization_barrier(x.T.reshape(-1)).reshape(x.shape[::-1])
in_float32 = lambda a, b: jnp.dot(a, b, preferred_element_type=jnp.float32)
forms = {  # and whether XLA converts the matrices to float32
  "x @ w, bfloat16 result": (lambda x, w: x @ w, True),
  "x @ w, float32 result": (in_float32, False),
  "g @ w.T, float32 result": (lambda g, w: in_float32(g, w.T), True),
  "einsum of g and w": (lambda g, w: jnp.einsum("ij,kj->ik", g, w, preferred_element_type=jnp.float32), False),
  "x.T @ g, float32 result": (lambda x, g: in_float32(x.T, g), True),
  "the same with a barrier": (lambda x, g: in_float32(flat(x), g), False),
}
x = jax.random.normal(jax.random.key(0), (2048, 2048))
y = x.astype(jnp.bfloat16)
programs = {name: jax.jit(form).lower(y, y).compile() for name, (form, _) in forms.items()}
programs["float32"] = jax.jit(jnp.dot).lower(x, x).compile()
seconds = {name: [] for name in programs}
for turn in range(8):
  for name, run in programs.items():
    start = time.perf_counter()
    (run(x, x) if name == "float32" else run(y, y)).block_until_ready()
    seconds[name] += [time.perf_counter() - start] if turn else []
for name, (_, converted) in forms.items():
  is_converted = " f32[2048,2048]{1,0} convert(" in programs[name].as_text()
  speed = statistics.median(seconds["float32"]) / statistics.median(seconds[name])
  print(f"{name}: {'float32' if is_converted else 'bfloat16'}, {speed:.1f}")
  assert is_converted == converted

END
