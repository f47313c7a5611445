"""Eight simulated devices and a shared compilation cache for all tests."""

import gc
import importlib.metadata
import os
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
# LLVM's optimizations and the fusion emitters take most of the time it takes to compile; tiny programs need neither.
# Nor are they worth being cut up to be compiled in parallel.
FASTER = " --xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
if tuple(map(int, importlib.metadata.version("jax").split(".")[:2])) < (0, 11):
  FASTER += " --xla_cpu_use_fusion_emitters=false"  # later ones do not know it, and end the process
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + FASTER

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_compilation_cache_dir", str(Path("~/.cache/meshwright/tests").expanduser()))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)

gc.set_threshold(200_000, 50, 1000)  # traces are many small objects that live: looking through them takes its time
