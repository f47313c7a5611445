"""Eight simulated devices and a shared compilation cache for all tests."""

import gc
import importlib.metadata
import os
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
# LLVM's optimizations take most of the compile time. Tiny programs need neither them nor parallel compilation.
FASTER = " --xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
if importlib.metadata.version("jaxlib").startswith("0.10."):
  FASTER += " --xla_cpu_use_fusion_emitters=false"  # newer versions abort on this flag
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + FASTER

import jax
from browser import browser  # noqa: F401  # a fixture of all tests
from buckets import bucket, impatient, in_memory  # noqa: F401  # three more

from runtime.devices import give_threads

pytest_plugins = ["budget", "halves", "skips"]

jax.config.update("jax_num_cpu_devices", 8)
give_threads(8)
jax.config.update("jax_compilation_cache_dir", str(Path("~/.cache/meshwright/tests").expanduser()))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)

gc.set_threshold(200_000, 50, 1000)  # tracing creates many long-lived objects, so frequent collections are slow
