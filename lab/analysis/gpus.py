"""NVIDIA GPUs to compile for without having one: what the compiler must know of each kind, and how it is loaded.

XLA's GPU compiler is part of JAX's CUDA plugin. It compiles for a description of a GPU and needs no driver.
"""

import contextlib
import dataclasses
from collections.abc import Iterator

import jax
from jax._src import xla_bridge
from jax._src.cudnn import fused_attention_stablehlo
from jax._src.lib import xla_client
from jax.experimental import topologies

from errors import ConfigError
from runtime.devices import has_gpu_compiler

# Without a GPU the compiler cannot time several ways to run a product, so it takes its first choice.
OPTIONS = {"xla_gpu_autotune_level": 0}
NOT_KNOWN = (
  "Without a GPU the compiler cannot time its kernels: it does not choose the fastest ones for the products, and does "
  "not know the working memory of cuDNN's attention."
)
CUDNN = 91000  # the version whose attention is assumed


@dataclasses.dataclass(frozen=True)
class Target:
  """What CUDA reports of a GPU. The values are those in XLA's repository, under xla/backends/gpu/target_config.

  Attributes:
    capability: the major version of its compute capability.
    cores: streaming multiprocessors.
    clock: GHz.
    l2, memory: bytes.
    bandwidth: bytes/s of its memory.
    units: float32 units of a core.
    shared: bytes of shared memory of a core; a block can have 1 kB less.
    per_host: the most GPUs that a host has.
  """

  kind: str
  capability: int
  cores: int
  clock: float
  l2: int
  memory: int
  bandwidth: int
  units: int = 128
  shared: int = 233_472
  per_host: int = 16

  @property
  def config(self) -> str:
    """The same as a GpuTargetConfigProto of XLA, in text form."""
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  shared_memory_per_block: 49152 shared_memory_per_core: {self.shared}
  shared_memory_per_block_optin: {self.shared - 1024}
  core_count: {self.cores} fpus_per_core: {self.units} clock_rate_ghz: {self.clock} l2_cache_size: {self.l2}
  memory_bandwidth: {self.bandwidth} device_memory_size: {self.memory}
  cuda_compute_capability {{ major: {self.capability} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: {CUDNN // 10_000} minor: {CUDNN // 100 % 100} }}
runtime_version {{ major: 13 }}
device_description_str: "{self.kind}"
"""


TARGETS = {
  "a100": Target(
    "NVIDIA A100-SXM4-80GB", 8, 108, 1.41, 41_943_040, 85_100_068_864, 2_039_040_000_000, units=64, shared=167_936
  ),
  "h100": Target("NVIDIA H100 80GB HBM3", 9, 132, 1.98, 52_428_800, 84_942_979_072, 3_352_320_000_000),
  "h200": Target("NVIDIA H200", 9, 132, 1.98, 52_428_800, 151_397_597_184, 4_800_000_000_000),
  "b200": Target("NVIDIA B200", 10, 148, 1.965, 132_644_864, 191_514_411_008, 7_672_320_000_000),
  "gb200": Target("NVIDIA GB200", 10, 152, 2.062, 135_528_448, 197_897_748_480, 7_928_064_000_000, per_host=4),
}


def devices(version: str, hosts: int, per_host: int) -> list[jax.Device]:
  """GPUs to lower and compile programs for, in the order of their hosts (jax.experimental.topologies).

  From here on this process itself computes on the CPU, unless JAX runs already. Raises ConfigError if the CUDA plugin
  is not installed.
  """
  if not has_gpu_compiler():
    name = f"{version}:{hosts}x{per_host}"
    raise ConfigError(
      f"topology={name!r} needs the GPU compiler, which is not installed; pip install '.[gpu-topology]'"
    )
  if not xla_bridge.backends_are_initialized():
    jax.config.update("jax_platforms", "cpu")  # otherwise the plugin refuses to load without a GPU
  jax.devices()
  if jax.default_backend() != "gpu":
    _answer(capability=(TARGETS[version].capability, 0))
  if not xla_client.pjrt_plugin_initialized("cuda"):
    xla_client.initialize_pjrt_plugin("cuda")
  shape = f"1x{hosts}x{per_host}"  # slices × hosts × GPUs of a host
  target = TARGETS[version].config
  return list(topologies.get_topology_desc(platform="cuda", target_config=target, topology=shape).devices)


@contextlib.contextmanager
def assumed() -> Iterator[None]:
  """A context in which cuDNN's attention can be traced on a machine that has no GPU."""
  names = ("check_cudnn_version", "check_compute_capability", "is_cuda_compute_capability_equal")
  before = {name: getattr(fused_attention_stablehlo, name) for name in names}
  _answer(capability=(9, 0))
  try:
    yield
  finally:
    for name, function in before.items():
      setattr(fused_attention_stablehlo, name, function)


def _answer(capability: tuple[int, int]) -> None:
  """Answers what JAX asks of this machine's GPU and cuDNN before it traces cuDNN's attention."""
  version = lambda text: tuple(int(part) for part in text.split("."))
  fused_attention_stablehlo.check_cudnn_version = lambda: CUDNN
  fused_attention_stablehlo.check_compute_capability = lambda least: capability >= version(least)
  fused_attention_stablehlo.is_cuda_compute_capability_equal = lambda wanted: capability == version(wanted)
