#!/usr/bin/env bash
# The TPU compiler replaces a reduce-scatter over a whole three-dimensional slice by an all-reduce.
#
# Expected: psum_scatter becomes a reduce-scatter, which sends half of what an all-reduce sends.
# Happens: so it does on v5e:2x4 and v6e:2x4. On v5p:2x2x2 and v5p:4x4x4 each chip gets the whole sum and keeps a slice,
# in float32 and in bfloat16, in the order of devices that JAX recommends. No flag or message says so.
# Lost: half of the bandwidth for FSDP's gradients on one axis over a whole v5p slice, and the memory of a whole sum.
# Versions: jax 0.10.2, libtpu 0.0.42.1, Python 3.11, Linux on x86-64, no TPU; 2026-11-27. Output:
#   v5e:2x4: reduce-scatter
#   v6e:2x4: reduce-scatter
#   v5p:2x2x2: all-reduce
#   v5p:4x4x4: all-reduce

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
from jax.sharding import NamedSharding, PartitionSpec as P

def compiled(slice_name, dtype):
  topology = topologies.get_topology_desc(platform="tpu", topology_name=slice_name)
  mesh = topologies.make_mesh(topology, (len(topology.devices),), ("d",))
  scatter = lambda x: jax.lax.psum_scatter(x, "d", tiled=True)
  f = jax.jit(jax.shard_map(scatter, mesh=mesh, in_specs=P(), out_specs=P("d"), check_vma=False))
  x = jax.ShapeDtypeStruct((4096, 1024), dtype, sharding=NamedSharding(mesh, P()))
  text = f.lower(x).compile().as_text()
  return sorted(set(re.findall(r" (all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(", text)))

for name, sent in (("v5e:2x4", "reduce-scatter"), ("v6e:2x4", "reduce-scatter"), ("v5p:2x2x2", "all-reduce"),
                   ("v5p:4x4x4", "all-reduce")):
  kinds = compiled(name, jnp.float32)
  print(f"{name}: {', '.join(kinds)}", flush=True)
  assert kinds == [sent] == compiled(name, jnp.bfloat16)
END
