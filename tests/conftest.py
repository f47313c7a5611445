"""Eight simulated devices and a shared compilation cache for all tests."""

import ctypes
import gc
import importlib.metadata
import os
import signal
from collections.abc import Iterator
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
# LLVM's optimizations take most of the compile time. Tiny programs need neither them nor parallel compilation.
FASTER = " --xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
if importlib.metadata.version("jaxlib").startswith("0.10."):
  FASTER += " --xla_cpu_use_fusion_emitters=false"  # newer versions abort on this flag
given = os.environ.get("XLA_FLAGS", "")
if FASTER not in given:  # a worker inherits them; flags given twice would be another key of the compilation cache
  os.environ["XLA_FLAGS"] = given + FASTER

# A shell's background job ignores SIGINT, and what `nohup` starts SIGHUP. So would what these start.
for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
  if signal.getsignal(stop) == signal.SIG_IGN:
    signal.signal(stop, signal.default_int_handler if stop == signal.SIGINT else signal.SIG_DFL)

import jax
import pytest
from browser import browser  # noqa: F401  # a fixture of all tests
from buckets import bucket, impatient, in_memory  # noqa: F401  # three more

from runtime.devices import give_threads

pytest_plugins = ["budget", "shares", "skips"]

jax.config.update("jax_num_cpu_devices", 8)
give_threads(8)
CACHE = {
  "jax_compilation_cache_dir": str(Path("~/.cache/meshwright/tests").expanduser()),
  "jax_persistent_cache_min_compile_time_secs": 0,
  # As the analysis of a step asks for, which reads the scopes of its operations: so it finds what another test has
  # compiled. Lines of code are left out, because those of the caller are among them.
  "jax_compilation_cache_include_metadata_in_key": True,
  "jax_traceback_in_locations_limit": 0,
}

gc.set_threshold(200_000, 50, 1000)  # tracing creates many long-lived objects, so frequent collections are slow


def use_cache() -> None:
  for name, value in CACHE.items():
    if getattr(jax.config, name) != value:
      jax.config.update(name, value)


use_cache()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
  """Puts the tests of a strategy and a variant side by side, from all files that take them from `variants.runner_of`.

  So one worker runs them, and traces and lowers the step once.
  """
  pairs = {item: pair for item in items if hasattr(item, "module") and (pair := _pair(item))}
  if pairs:
    place = {item: number for number, item in enumerate(items)}
    last = next(item.module for item in reversed(items) if item in pairs)
    at = min(place[item] for item in pairs if item.module is last)
    items.sort(key=lambda item: (at, *pairs[item]) if item in pairs else (place[item],))


def _pair(item: pytest.Item) -> tuple[str, str] | None:
  given = item.callspec.params if hasattr(item, "callspec") else {}
  is_shared = hasattr(item.module, "runner_of") and given.keys() >= {"name", "variant"}
  return (given["variant"], given["name"]) if is_shared else None


class Memory:
  """Frees the memory of a worker when it has grown: traces and programs of thousands of tests add up to 12 GB."""

  STEP = 4 << 30  # bytes
  limit = STEP

  @staticmethod
  def held() -> int:
    """The memory of this process in bytes; 0 where it is not known."""
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if pages.exists() else 0

  @classmethod
  def free(cls) -> None:
    if cls.held() > cls.limit:
      jax.clear_caches()
      gc.collect()
      if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)  # or the C library keeps what was freed
      cls.limit = cls.held() + cls.STEP


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
  yield
  Memory.free()


@pytest.fixture(autouse=True)
def same_cache() -> Iterator[None]:
  """A run in a test sets up a cache of its own. The tests after it go on with this one, and fill it."""
  yield
  use_cache()
