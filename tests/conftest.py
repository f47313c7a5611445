"""Eight simulated devices and a shared compilation cache for all tests."""

import os
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
# LLVM's optimizations and the fusion emitters take most of the time it takes to compile; tiny programs need neither.
FASTER = " --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + FASTER

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_compilation_cache_dir", str(Path("~/.cache/meshwright/tests").expanduser()))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
