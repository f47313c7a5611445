"""Library calls as XLA writes them for NVIDIA GPUs: their FLOPs and traffic, and reports of unknown calls."""

import dataclasses

import pytest
from helpers import model_sizes, program, strategy

from lab.analysis import calls, explanation, hlo, predict, work
from lab.analysis.case import Case
from lab.analysis.compiled import CompiledStep
from lab.analysis.links import of_devices
from runtime.hardware import chip
from tools import explain

CONFIG = (
  'backend_config={"operation_queue_id":"0","gemm_backend_config":{"alpha_real":1,"beta":%d,"dot_dimension_numbers":'
  '{"lhs_contracting_dimensions":[%s],"rhs_contracting_dimensions":[%s],"lhs_batch_dimensions":[%s],'
  '"rhs_batch_dimensions":[%s]},"alpha_imag":0,"precision_config":{"operand_precision":["DEFAULT","DEFAULT"],'
  '"algorithm":"ALG_UNSET"},"epilogue":"DEFAULT","lhs_stride":"64","grad_x":false},"reification_cost":[]}'
)


def module(result: str, called: str, config: str, *operands: str) -> hlo.Module:
  """A program that consists of one custom call."""
  arrays = "\n".join(f"  %p{i} = {shape} parameter({i})" for i, shape in enumerate(operands))
  names = ", ".join(f"%p{i}" for i in range(len(operands)))
  call = f'{result} custom-call({names}), custom_call_target="{called}", {config}, metadata={{op_name="jit(f)/dot"}}'
  return hlo.parse(f"HloModule m\n\nENTRY %main (p: f32[]) -> f32[] {{\n{arrays}\n  ROOT %c = {call}\n}}\n")


@pytest.mark.parametrize(
  "called, result, left, right, more, dimensions, flops, moved",
  [
    # [128, 64] × [64, 256], with a workspace in bytes
    ("__cublas$gemm", "(bf16[128,256]{1,0}, s8[4194304]{0})", "bf16[128,64]{1,0}", "bf16[64,256]{1,0}", (),
     (0, '"1"', '"0"', "", ""), 2 * 128 * 64 * 256, 2 * (128 * 64 + 64 * 256 + 128 * 256)),
    # a transposed left matrix, no workspace, and a matrix that is added to the result
    ("__cublas$gemm", "f32[128,256]{1,0}", "f32[64,128]{1,0}", "f32[64,256]{1,0}", ("f32[128,256]{1,0}",),
     (1, '"0"', '"0"', "", ""), 2 * 128 * 64 * 256, 4 * (128 * 64 + 64 * 256 + 2 * 128 * 256)),
    # a batch of 4 × 8 products that contract two dimensions
    ("__cublas$lt$matmul", "(f32[4,8,16,32]{3,2,1,0}, s8[33554432]{0})", "f32[4,16,8,5,3]{4,3,2,1,0}",
     "f32[4,8,5,3,32]{4,3,2,1,0}", (), (0, '"3","4"', '"2","3"', '"0","2"', '"0","1"'),
     4 * 8 * 2 * 16 * 32 * 15, 4 * (4 * 16 * 8 * 15 + 4 * 8 * 15 * 32 + 4 * 8 * 16 * 32)),
    # 8-bit numbers with a scale for each matrix
    ("__cublas$lt$matmul$f8", "(f32[16,16]{1,0}, s8[33554432]{0})", "f8e4m3fn[16,32]{1,0}", "f8e5m2[16,32]{1,0}",
     ("f32[]", "f32[]"), (0, '"1"', '"1"', "", ""), 2 * 16 * 16 * 32, 2 * 16 * 32 + 2 * 4 + 4 * 16 * 16),
  ],
)  # fmt: skip
def test_flops_and_traffic_of_cublas_products(called, result, left, right, more, dimensions, flops, moved):
  found = module(result, called, CONFIG % dimensions, left, right, *more)
  assert work.flops(found) == flops
  assert work.traffic(found) == moved
  assert calls.unknown(found) == []


def test_a_backend_config_that_is_a_string_is_parsed():
  config = (CONFIG % (0, '"1"', '"0"', "", "")).removeprefix("backend_config=").replace('"', '\\"')
  found = module("f32[2,4]", "__cublas$gemm", f'backend_config="{config}"', "f32[2,3]", "f32[3,4]")
  assert work.flops(found) == 2 * 2 * 3 * 4


B, T, N, H = 2, 1024, 6, 64
FUSED = (
  'backend_config={"operation_queue_id":"0","cudnn_fmha_backend_config":{"algorithm":{"algo_id":"0","tuning_knobs":'
  '{"24":"0"}},"fmha_scale":1,"intermediate_tensor_shape":{"element_type":"BF16","dimensions":["%d","%d","%d","%d"],'
  '"tuple_shapes":[]},"seed":"42","mask_type":"%s","sliding_window_length":0}}'
)


def attention(mask: str, backward: bool, heads_last: bool = True) -> float:
  """FLOPs of a call of cuDNN's attention, with queries [B, T, N, H] or [B, N, T, H]."""
  array = f"bf16[{B},{T},{N},{H}]{{3,2,1,0}}" if heads_last else f"bf16[{B},{N},{T},{H}]{{3,2,1,0}}"
  maxima, config = f"f32[{B},{N},{T}]{{2,1,0}}", FUSED % (B, N, T, T, mask)
  if backward:
    result, operands = f"({array}, {array}, {array}, u8[0]{{0}})", (array, array, array, maxima, array, array)
  else:
    result, operands = f"({array}, {maxima}, u8[0]{{0}})", (array, array, array)
  return work.flops(module(result, f"__cudnn$fmhaSoftmax{'Backward' * backward}", config, *operands))


@pytest.mark.parametrize("heads_last", [True, False])
def test_flops_of_cudnn_attention(heads_last: bool):
  """Forward: scores, and scores × values. Backward: the scores again, and two products for each forward product."""
  product = 2 * B * N * T * T * H
  assert attention("NO_MASK", False, heads_last) == 2 * product
  assert attention("NO_MASK", True, heads_last) == 5 * product
  assert attention("CAUSAL", False, heads_last) == 2 * product * (T + 1) / (2 * T)
  assert attention("CAUSAL", True, heads_last) == 5 * product * (T + 1) / (2 * T)


def test_predicted_flops_with_cudnn_are_those_of_its_calls():
  model = dataclasses.replace(
    model_sizes(width=N * H, heads=N, kv_heads=N, seq_len=T, remat="minimal"), attention="plain"
  )
  layout = strategy("single", program(), devices=1).layout
  case = lambda attention: Case(layout, dataclasses.replace(model, attention=attention), B, compiler="tpu")
  plain = model.depth * 3 * 2 * (2 * B * N * T * T * H)
  called = model.depth * (attention("CAUSAL", False) + attention("CAUSAL", True))
  assert predict.flops(case("plain")) - predict.flops(case("cudnn")) == pytest.approx(plain - called)


@pytest.mark.parametrize(
  "called, config",
  [
    ("tpu_custom_call", 'backend_config={"custom_call_config":{}}'),
    ("__cublas$lt$groupedMatmul", 'backend_config={"gemm_backend_config":{}}'),
    ("__cublas$gemm", 'backend_config="nonsense"'),
    ("__cudnn$fmhaSoftmax", 'backend_config={"cudnn_fmha_backend_config":{}}'),
  ],
)
def test_an_unknown_call_is_reported(called: str, config: str):
  found = module("f32[2,4]", called, config, "f32[2,3]", "f32[3,4]")
  assert work.flops(found) == work.traffic(found) == 0
  assert calls.unknown(found) == [called]


def test_a_call_without_products_is_free():
  assert calls.unknown(module("bf16[8]", "AllocateBuffer", 'backend_config=""')) == []


def test_explain_reports_the_calls_that_its_times_leave_out():
  """And counts the calls that it knows."""
  runner = strategy("single", program(), devices=1)
  case = Case.of(runner, 16, "gpu")
  known, other = (
    module("bf16[2,4]", called, CONFIG % (0, '"1"', '"0"', "", ""), "bf16[2,3]", "bf16[3,4]").computations["main"]
    for called in ("__cublas$gemm", "another")
  )
  pages = []
  for computation in (known, known | {"other": other["c"]}):
    step = CompiledStep(hlo.Module({"main": computation}, "main"), 0, 0, 0.0, runner.layout.mesh, {})
    figures = chip("NVIDIA H200")
    timed = step.overlap(figures, of_devices(figures, runner.mesh))
    time = explanation._time(runner, case, step, figures, timed)
    assert time["flops"] == 2 * 2 * 3 * 4
    pages.append(explain._time({"time": time, "device": "NVIDIA H200"}))
  assert pages[1] == f"{pages[0]}\nThe times leave out what cannot be counted: custom call another."
