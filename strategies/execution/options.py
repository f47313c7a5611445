"""What each compiler needs, so that communication runs while kernels do and sends no more than it must.

First, options for the training step. docs/evidence.md shows what remains exposed with them and without.

- GPUs: XLA's compiler has a scheduler that starts a collective early and awaits it where its result is needed. With
  these options it may do so with several collectives, and across the rounds of the scan over blocks. Larger thresholds
  for combining collectives left more exposed, so they are not here. The sources are
  https://docs.jax.dev/en/latest/gpu_performance_tips.html and the comments of
  https://github.com/openxla/xla/blob/main/xla/xla.proto; for OVERLAP_LIMIT, https://github.com/openxla/xla/pull/17749.
- TPUs: by default libtpu starts nothing ahead, and over a whole slice it gathers and scatters by all-reduces, which
  send twice the bytes. The options are from lists that TPU users publish: MaxText's benchmarks/xla_flags_library.py and
  the recipes of github.com/AI-Hypercomputer/tpu-recipes. `SPARSE_CORES` moves collectives to cores of their own, which
  v5p, v6e and TPU7x have.

The options are passed with the program, not in XLA_FLAGS. So other options in the user's environment stay as they are.

Second, whether gradients that are scattered are left to the compiler (`scatters`).
"""

import jax

from strategies.execution.collectives import fills_tiles
from strategies.layout import Layout
from training.program import Traits

CHOICES = ("recommended", "default")
Options = dict[str, str | bool | int]

_KINDS = ("all_gather", "reduce_scatter", "all_reduce")
_RENAMED = jax.__version_info__ >= (0, 11)  # XLA's options for pipelined collectives have new names

# Moves the collectives of a scan over blocks by one round, so that they run beside another block.
PIPELINED: Options = (
  {f"xla_gpu_pipeline_{kind}": "COLLECTIVE_PIPELINING_MODE_ON" for kind in _KINDS}
  if _RENAMED
  else {f"xla_gpu_enable_pipelined_{kind}": True for kind in _KINDS}
)
# How many collectives may be started before the first is awaited. With 1, the default, a block's weights are gathered
# one after another, and only the last gather runs beside products. With more than 4, tensor parallelism hides less.
# They share one stream, so devices send them one after another and in the same order.
OVERLAP_LIMIT = 4
GPU: Options = PIPELINED | {
  "xla_gpu_enable_latency_hiding_scheduler": True,  # the default for H100 and later, but not for A100
  "xla_gpu_experimental_parallel_collective_overlap_limit": OVERLAP_LIMIT,
}
# Removes more copies. Without it, jax 0.10 copied gathered weights in each round: FSDP of 8 billion parameters on 8
# H100 took 6% longer, and `two_d` of 70 billion had a fifth more memory. With it, kernels wait for a block's gradients.
# Over several hosts that takes longer than the copies: FSDP of 7 billion parameters on 256 H100 exposed 33 ms with it,
# and 3 ms without. On jax 0.12 it saved no memory, and FSDP on 1,024 GPUs hid less.
FEWER_COPIES: Options = {} if _RENAMED else {"xla_gpu_copy_insertion_use_region_analysis": True}
# Products of float8 numbers become calls of cuBLAS. Triton's kernels would widen the numbers first.
FLOAT8: Options = {"xla_gpu_enable_triton_gemm": False}
HOST = 8  # GPUs that a host usually has

# Starts gathers ahead, and scatters sums as they are.
TPU: Options = {
  "xla_enable_async_all_gather": True,
  "xla_tpu_prefer_async_allgather_to_allreduce": True,
  "xla_tpu_assign_all_reduce_scatter_layout": True,
  "xla_tpu_relayout_group_size_threshold_for_reduce_scatter": 1,
  "xla_tpu_use_minor_sharding_for_major_trivial_input": True,
  # Scatters a sum by one message. Otherwise libtpu cuts the sum's product into smaller ones and sends the sum round a
  # ring beside them ("collective matmul"): (n+1)/n of it instead of (n−1)/n, read and written in every round.
  "xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000,
}
_OFFLOAD = "xla_tpu_enable_sparse_core_collective_offload"
SPARSE_CORES: Options = {
  **{f"{_OFFLOAD}_{kind}": True for kind in (*_KINDS, "nd_reduce_scatter")},
  "xla_tpu_enable_async_collective_fusion_fuse_all_gather": False,
  "xla_tpu_use_tc_device_shape_on_sc": True,
  "xla_sc_disable_megacore_partitioning": True,
}
_TORUS_2D: Options = {f"{_OFFLOAD}_2d_all_gather": True}
_TORUS_3D: Options = {f"{_OFFLOAD}_3d_all_gather": True}

# For layouts that share experts: rows travel beside kernels. In `long_context`, gathers waited longer than this saved.
EXPERTS: Options = {"xla_tpu_enable_async_all_to_all": True}

# A layout has options for TPUs if devices share one of these.
DIMS = ("state", "heads", "mlp", "experts", "positions")

# By the beginning of `jax.Device.device_kind`; the longest match counts.
TPUS: dict[str, Options] = {
  "TPU v5": TPU | SPARSE_CORES | _TORUS_3D,
  "TPU v5 lite": TPU,
  "TPU v6": TPU | SPARSE_CORES | _TORUS_2D,
  "TPU7x": TPU | SPARSE_CORES | _TORUS_2D | _TORUS_3D,
}


def options(choice: str, device: jax.Device, layout: Layout, products: str = "dtype") -> Options:
  """The options of one of CHOICES for a device, a resolved layout and `model.products`.

  TPUs have some for layouts that split the optimizer's state (as all do that split weights over the batch's axes),
  products, experts or the positions of a text. With others, such as data_parallel and pipeline, nothing was gained.
  """
  if choice == "recommended" and device.platform == "gpu":
    is_fsdp = layout.axes("embed") and layout.axes("embed") == layout.axes("batch") and not layout.axes("layers")
    sends_far = layout.device_count > HOST and layout.shards("heads") == 1
    found = GPU | FEWER_COPIES if is_fsdp and not sends_far else GPU
    return found | FLOAT8 if products == "float8" else found
  if choice != "recommended" or all(layout.shards(dim) == 1 for dim in DIMS):
    return {}
  kind = max((kind for kind in TPUS if device.device_kind.startswith(kind)), key=len, default="")
  return TPUS[kind] | (EXPERTS if layout.shards("experts") > 1 else {}) if kind else {}


def scatters(device: jax.Device | None, layout: Layout, model: Traits) -> bool:
  """Whether gradients that the layout scatters are left to the compiler. If not, the program scatters (by_hand.py).

  - libtpu all-reduces those whose pieces do not fill tiles, at twice the bytes: with 7 billion parameters on more than
    256 devices. The program scatters them in another shape.
  - If other devices hold the same pieces (hsdp), the pieces are all-reduced too. libtpu for TPU7x merges both sums into
    an all-reduce. XLA's GPU compiler lets kernels wait for the scatter, because the all-reduce in the same block needs
    it. That takes long if the pieces are on several hosts. The program all-reduces once, after all blocks.
  """
  pieces = layout.shards("state")
  if device is None or device.platform == "cpu" or pieces == 1 or not model.width:
    return True
  if model.width % pieces:  # compilers all-reduce the gradients of pieces that are not equal, and slice
    return False
  if device.platform == "gpu":
    return not reduces_late(layout)
  merges = has_copies(layout) and device.device_kind.startswith("TPU7x")
  return not merges and fills_tiles(model.width // pieces, model.dtype)


def reduces_late(layout: Layout) -> bool:
  """Whether on GPUs the program all-reduces pieces of gradients by hand, once: if they are on several hosts."""
  return has_copies(layout) and layout.shards("state") > HOST


def has_copies(layout: Layout) -> bool:
  """Whether several devices hold the same pieces of the optimizer's state."""
  return any(layout.mesh[axis] > 1 for axis in layout.axes("batch") if axis not in layout.axes("state"))
