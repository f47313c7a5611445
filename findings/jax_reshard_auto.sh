#!/usr/bin/env bash
# jax.device_put inside a jit, and jax.reshard anywhere, ask for whole copies in vain if mesh axes are Auto.
#
# Expected: both give the sharding that was asked for, or an error, as reshard does if the spec names an axis.
# Happens: asked for P(), a whole copy on each device, they return an array that is still sharded. device_put outside of
# jit obeys, and so does with_sharding_constraint. With Explicit axes, device_put and reshard always obey.
# Lost: control. Code that looks like an all-gather is none, and what follows is sent in another way.
# Versions: jax 0.10.2, Python 3.11, 8 simulated CPU devices; 2026-11-27. Output:
#   Auto: device_put P(), in jit P('data',); reshard P('data',), in jit P('data',); constraint P(), in jit P()
#   Explicit: device_put P(), in jit P(None, None); reshard P(None, None), in jit P(None, None)

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
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 8)

def sharded(axis_type):
  """For each way to ask for whole copies: is the result sharded still, outside and inside of jit?"""
  mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
  x, whole = jax.device_put(jnp.ones((64, 16)), NamedSharding(mesh, P("data"))), NamedSharding(mesh, P())
  ways = {"device_put": jax.device_put, "reshard": jax.reshard}
  if axis_type == AxisType.Auto:
    ways["constraint"] = jax.lax.with_sharding_constraint
  with jax.set_mesh(mesh):
    asked = {name: lambda x, way=way: way(x, whole) for name, way in ways.items()}
    results = {name: [f(x).sharding, jax.jit(f)(x).sharding] for name, f in asked.items()}
  print(f"{axis_type.name}:", "; ".join(f"{name} {a.spec}, in jit {b.spec}" for name, (a, b) in results.items()))
  return {name: [not s.is_fully_replicated for s in each] for name, each in results.items()}

auto = sharded(AxisType.Auto)
assert auto == {"device_put": [False, True], "reshard": [True, True], "constraint": [False, False]}
assert sharded(AxisType.Explicit) == {"device_put": [False, False], "reshard": [False, False]}

END
