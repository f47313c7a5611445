#!/usr/bin/env bash
# jit of an optimizer's init puts the moments of sharded weights whole on one device, or on each.
#
# Expected: jit changes how fast init is, not where its results are.
# Happens: without jit, the moments are sharded as the weights are. With jit they do not depend on the weights' values,
# so nothing places them: they are whole on device 0, and with jax.set_mesh whole on every device.
# Lost: memory, eight times what a plan for eight devices says, or a failure for want of it. Give out_shardings.
# Versions: jax 0.10.2, optax 0.2.8, Python 3.11, 8 simulated CPU devices; 2026-11-27. Output:
#   init: 8 devices with a part of 8x16
#   jit(init): 1 device with a part of 64x16
#   jit(init) under set_mesh: 8 devices with a part of 64x16

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
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
weights = {"w": jax.device_put(jnp.ones((64, 16)), NamedSharding(mesh, P("data")))}
optimizer = optax.adam(1e-3)

def placed(name, state):
  parts = state[0].mu["w"].addressable_shards
  rows, columns = parts[0].data.shape
  print(f"{name}: {len(parts)} device{'s' * (len(parts) > 1)} with a part of {rows}x{columns}")
  return len(parts), rows

assert placed("init", optimizer.init(weights)) == (8, 8)
assert placed("jit(init)", jax.jit(optimizer.init)(weights)) == (1, 64)
with jax.set_mesh(mesh):
  assert placed("jit(init) under set_mesh", jax.jit(optimizer.init)(weights)) == (8, 64)

END
