"""Calls of libraries in a compiled program: on NVIDIA GPUs matrix products are cuBLAS's, and attention may be cuDNN's.

A custom call says in words what it is, and its backend config, JSON in the text, which dimensions it contracts. What is
in no list here may compute anything: `unknown` names it, so that no time is given without it in silence. The names are
those of xla/service/gpu/cublas_cudnn.cc and jax/_src/cudnn; the format was read from XLA's tests, not from GPUs.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from analysis.hlo import Computation, Instruction, Module, Shape

# cuBLAS, and what is made of a product there: a sum with a bias, an activation. Numbers of 8 bits, with their scales.
_PRODUCTS = {"__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8", "__cublas$lt$matmul$mx"}
_ATTENTION = "__cudnn$fmha"

# Calls without a matrix product: places in memory, messages, notes to the compiler; sorting and random bits on GPUs.
_NONE = {
  "AllocateBuffer", "AssumeGatherIndicesInBound", "AsyncCollectiveDone", "AsyncCollectiveStart", "ConcatBitcast",
  "MoveToDevice", "MoveToHost", "PadToStatic", "PrepareAsyncCallDone", "PrepareAsyncCallStart", "Sharding",
  "SliceToDynamic", "TopK", "X64Combine", "X64SplitHigh", "X64SplitLow", "__cub$DeviceRadixSort",
  "__cub$DeviceRadixSortUnassignedScratchSize", "__gpu$TopK", "annotate_device_placement", "cu_threefry2x32_ffi",
}  # fmt: skip


def target(call: Instruction) -> str:
  """What a custom call calls."""
  return call.attribute("custom_call_target").strip('"')


def flops(call: Instruction, computation: Computation) -> float | None:
  """Floating-point operations of a call's matrix products; None where nothing says how many."""
  name = target(call)
  if name in _NONE:
    return 0.0
  config = _config(call)
  operands = [computation[operand].shapes[0] for operand in call.operands if operand in computation]
  try:
    if name in _PRODUCTS:
      return _product(call.shapes[0], operands[0], config["gemm_backend_config"]["dot_dimension_numbers"])
    if name.startswith(_ATTENTION):
      return _attention(operands, config["cudnn_fmha_backend_config"], backward="Backward" in name)
  except (KeyError, IndexError):  # a way to write it that is not known here
    pass
  return None


def _product(result: Shape, left: Shape, dimensions: dict[str, Any]) -> float:
  """Of left [batch..., m, k] and right [batch..., k, n], whatever their order: 2 · k for each number of the result."""
  return 2 * result.size * math.prod(left.dims[int(i)] for i in dimensions["lhs_contracting_dimensions"])


def _attention(operands: list[Shape], config: dict[str, Any], backward: bool) -> float:
  """Queries, keys and values come first, with the size of a head innermost; scores are [B, N, T, S].

  Forward there are the scores and what they weigh. Backward the scores once more, since they are not kept, and for each
  product two. A causal mask leaves the pairs that are not seen out of all of them.
  """
  b, n, t, s = (int(size) for size in config["intermediate_tensor_shape"]["dimensions"])
  pairs = sum(min(query + 1, s) for query in range(t)) if "CAUSAL" in config["mask_type"] else t * s
  of_scores, of_values = operands[0].dims[-1], operands[2].dims[-1]
  return 2 * b * n * pairs * (3 * of_scores + 2 * of_values if backward else of_scores + of_values)


def traffic(call: Instruction, computation: Computation) -> int:
  """Bytes of memory that a call with products reads and writes; its workspace (of bytes, the last result) aside."""
  if not flops(call, computation):
    return 0
  read = sum(shape.bytes for operand in call.operands for shape in computation[operand].shapes)
  return read + sum(shape.bytes for shape in call.shapes if shape.dtype not in ("s8", "u8"))


def unknown(module: Module, rounds: Mapping[str, int] | None = None) -> list[str]:
  """The targets of the custom calls that may compute something which is not counted, each once."""
  calls = (visit for visit in module.walk(rounds) if visit.instruction.operation == "custom-call")
  return sorted({target(visit.instruction) for visit in calls if flops(visit.instruction, visit.computation) is None})


def _config(call: Instruction) -> dict[str, Any]:
  """The backend config; {} where there is none that can be read."""
  _, found, written = call.attributes.partition("backend_config=")
  try:
    config = json.JSONDecoder().raw_decode(written)[0] if found else {}
    config = json.loads(config) if isinstance(config, str) else config  # older versions wrote the JSON as a string
  except ValueError:
    return {}
  return config if isinstance(config, dict) else {}
