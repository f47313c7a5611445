#!/usr/bin/env bash
# A shard_map over one mesh axis gathers arrays whose dimension another axis splits unevenly.
#
# Expected: an axis that a shard_map leaves to the compiler stays as it is. 7 rows on 2 devices are 4 and 3 rows, and a
# computation on them sends nothing, in a shard_map over another axis or without one.
# Happens: without a shard_map nothing is sent. In one, every device gathers all 7 rows first, without a warning. With 8
# rows, nothing is sent in either case.
# Lost: memory and time, wherever a vocabulary or a width does not divide: each device has the whole table of tokens.
# Instead: pad the array before the shard_map, and cut it in its first line.
# Versions: jax 0.10.2, Python 3.11, four simulated CPU devices; jax 0.12.0 does the same; 2026-11-28. Output:
#   8 rows, without a shard_map: []
#   8 rows, in a shard_map over another axis: []
#   7 rows, without a shard_map: []
#   7 rows, in a shard_map over another axis: ['all-gather']

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.11}" -m venv "$folder/venv"
cd "$folder"
venv/bin/pip install --quiet --no-compile --disable-pip-version-check jax==0.10.2
JAX_PLATFORMS=cpu venv/bin/python - <<'END'
import jax
import jax.numpy as jnp
from jax.lax import with_sharding_constraint
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 4)
mesh = jax.make_mesh((2, 2), ("manual", "auto"), axis_types=(AxisType.Auto,) * 2)
jax.set_mesh(mesh)
rows_split = NamedSharding(mesh, P("auto"))

def sent(rows, inside):
  def twice(x):
    return with_sharding_constraint(2 * x, P("auto"))

  def run(x):  # 8 rows come and go; in between there are so many
    x = with_sharding_constraint(x[:rows], P("auto"))
    if inside:
      x = jax.shard_map(twice, in_specs=P(), out_specs=P(), axis_names={"manual"}, check_vma=False)(x)
    else:
      x = twice(x)
    return jnp.pad(x, [(0, 8 - rows), (0, 0)])

  jitted = jax.jit(run, in_shardings=rows_split, out_shardings=rows_split)
  text = jitted.lower(jax.ShapeDtypeStruct((8, 1024), "float32")).compile().as_text()
  kinds = ("all-gather", "all-reduce", "all-to-all", "collective-permute")
  found = [kind for kind in kinds if f"{kind}(" in text]
  print(f"{rows} rows, {'in a shard_map over another axis' if inside else 'without a shard_map'}: {found}")
  return found

assert sent(8, False) == sent(8, True) == sent(7, False) == []
assert sent(7, True) == ["all-gather"]
END
