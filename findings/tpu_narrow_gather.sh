#!/usr/bin/env bash
# The TPU compiler moves a conversion to int8 or float8 behind the all-gather, and gathers float32.
#
# Expected: weights that are converted before they are gathered are sent in the narrow type, as those in bfloat16 are.
# Happens: for int8 and float8 the gather comes first, in float32, and sends four times the bytes. With an
# optimization_barrier between the two, the narrow type is sent.
# Lost: what float8 was chosen for. The values are the same, so only the compiled program shows it.
# Versions: jax 0.10.2, libtpu 0.0.42.1, Python 3.11, Linux on x86-64, no TPU; 2026-11-27. Output:
#   v5e:2x4: bfloat16 gathered as bf16, with a barrier as bf16
#   v5e:2x4: int8 gathered as f32, with a barrier as s8
#   v5e:2x4: float8_e4m3fn gathered as f32, with a barrier as f8e4m3fn
#   and the same lines for v5p:2x2x2

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.11}" -m venv "$folder/venv"
cd "$folder"
venv/bin/pip install --quiet --no-compile --disable-pip-version-check jax==0.10.2 libtpu==0.0.42.1 numpy==2.4.6
venv/bin/python - <<'END'
import os, re

os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1")
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

TYPES = ("bfloat16", "bf16", "bf16"), ("int8", "f32", "s8"), ("float8_e4m3fn", "f32", "f8e4m3fn")

def gathered(mesh, dtype, barrier):
  def gather(x):
    narrow = x.astype(dtype)
    narrow = jax.lax.optimization_barrier(narrow) if barrier else narrow
    return jax.lax.with_sharding_constraint(narrow, NamedSharding(mesh, P()))

  x = jax.ShapeDtypeStruct((4096, 1024), jnp.float32, sharding=NamedSharding(mesh, P("d")))
  text = jax.jit(gather).lower(x).compile().as_text()
  (kind,) = set(re.findall(r"= (\w+)\[\S+ all-gather\(", text))
  return kind

for name in ("v5e:2x4", "v5p:2x2x2"):
  topology = topologies.get_topology_desc(platform="tpu", topology_name=name)
  mesh = Mesh(topology.devices, ("d",))
  for dtype, plain, narrow in TYPES:
    kinds = gathered(mesh, dtype, False), gathered(mesh, dtype, True)
    print(f"{name}: {dtype} gathered as {kinds[0]}, with a barrier as {kinds[1]}", flush=True)
    assert kinds == (plain, narrow)
END
