"""FLOPs and traffic of library calls: cuBLAS and cuDNN on NVIDIA GPUs, and splash attention on TPUs.

A custom call names its target. Its backend config, JSON in the program's text, gives the contracted dimensions. A call
that is not listed here may compute anything. `unknown` reports such calls, so that a reader knows what the times leave
out. The names are those of xla/service/gpu/cublas_cudnn.cc and jax/_src/cudnn. The format is that of XLA's tests; it
has not been checked on GPUs.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from lab.analysis import splash
from lab.analysis.hlo import Computation, Instruction, Module, Shape

# cuBLAS: products, also fused with a bias or an activation, or of 8-bit numbers with scales.
_PRODUCTS = {"__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8", "__cublas$lt$matmul$mx"}
_ATTENTION = "__cudnn$fmha"
_SPLASH = re.compile(r"\b(causal|full)(?:_(\d+))?/.*\bsplash_mha_(fwd|dq|dkv)")  # in the name of a TPU kernel's origin

# Calls without a matrix product: memory placement, communication, annotations; sorting and random bits on GPUs.
_NONE = {
  "AllocateBuffer", "AssumeGatherIndicesInBound", "AsyncCollectiveDone", "AsyncCollectiveStart", "ConcatBitcast",
  "MoveToDevice", "MoveToHost", "PadToStatic", "PrepareAsyncCallDone", "PrepareAsyncCallStart", "Sharding",
  "SliceToDynamic", "TopK", "X64Combine", "X64SplitHigh", "X64SplitLow", "__cub$DeviceRadixSort",
  "__cub$DeviceRadixSortUnassignedScratchSize", "__gpu$TopK", "annotate_device_placement", "cu_threefry2x32_ffi",
}  # fmt: skip


def target(call: Instruction) -> str:
  """The name of the function that a custom call calls."""
  return call.attribute("custom_call_target").strip('"')


def flops(call: Instruction, computation: Computation) -> float | None:
  """FLOPs of a call's matrix products; None if they are unknown."""
  name = target(call)
  if name in _NONE:
    return 0.0
  config = _config(call)
  operands = _operands(call, computation)
  if kernel := _splash(call, operands):
    return kernel.flops
  try:
    if name in _PRODUCTS:
      return _product(call.shapes[0], operands[0], config["gemm_backend_config"]["dot_dimension_numbers"])
    if name.startswith(_ATTENTION):
      return _attention(operands, config["cudnn_fmha_backend_config"], backward="Backward" in name)
  except (KeyError, IndexError):  # an unknown format
    pass
  return None


def _product(result: Shape, left: Shape, dimensions: dict[str, Any]) -> float:
  """FLOPs of [batch..., m, k] × [batch..., k, n], in any dimension order: 2 · k for each element of the result."""
  return 2 * result.size * math.prod(left.dims[int(i)] for i in dimensions["lhs_contracting_dimensions"])


def _attention(operands: list[Shape], config: dict[str, Any], backward: bool) -> float:
  """FLOPs of attention. The first operands are queries, keys and values, with the head size innermost.

  The forward pass has two products: queries × keys, which gives scores [B, N, T, S], and scores × values. The backward
  pass computes the scores again, because they are not saved, and has two products for each of the forward pass. A
  causal mask removes the masked pairs from all products.
  """
  b, n, t, s = (int(size) for size in config["intermediate_tensor_shape"]["dimensions"])
  window = int(config.get("sliding_window_length", 0)) or s
  pairs = sum(min(query + 1, s, window) for query in range(t)) if "CAUSAL" in config["mask_type"] else t * s
  of_scores, of_values = operands[0].dims[-1], operands[2].dims[-1]
  return 2 * b * n * pairs * (3 * of_scores + 2 * of_values if backward else of_scores + of_values)


def _splash(call: Instruction, operands: list[Shape]) -> splash.Work | None:
  """What a call does if it runs a kernel of splash attention. Its third operand has the queries, [..., T, H]."""
  found = _SPLASH.search(call.op_name)
  if not found or len(operands) < 3:
    return None
  *rows, length, head = operands[2].dims
  item = operands[2].bytes // operands[2].size
  mask, window, kernel = found.groups()
  return splash.work(kernel, math.prod(rows), length, head, item, mask == "causal", int(window or 0))


def traffic(call: Instruction, computation: Computation) -> int:
  """Bytes that a call with products reads and writes, without its workspace (the last result, of dtype s8 or u8)."""
  if not flops(call, computation):
    return 0
  if kernel := _splash(call, _operands(call, computation)):
    return int(kernel.bytes)
  read = sum(shape.bytes for operand in call.operands for shape in computation[operand].shapes)
  return read + sum(shape.bytes for shape in call.shapes if shape.dtype not in ("s8", "u8"))


def unknown(module: Module, rounds: Mapping[str, int] | None = None) -> list[str]:
  """The targets of custom calls that may compute something and are not counted, without duplicates."""
  calls = (visit for visit in module.walk(rounds) if visit.instruction.operation == "custom-call")
  return sorted({target(visit.instruction) for visit in calls if flops(visit.instruction, visit.computation) is None})


def _operands(call: Instruction, computation: Computation) -> list[Shape]:
  return [computation[operand].shapes[0] for operand in call.operands if operand in computation]


def _config(call: Instruction) -> dict[str, Any]:
  """The backend config; {} if there is none or it cannot be parsed."""
  _, found, written = call.attributes.partition("backend_config=")
  try:
    config = json.JSONDecoder().raw_decode(written)[0] if found else {}
    config = json.loads(config) if isinstance(config, str) else config  # older versions wrote the JSON as a string
  except ValueError:
    return {}
  return config if isinstance(config, dict) else {}
