"""Counts the floating-point operations of a traced function: those of its products and convolutions."""

import math
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxprs_in_params


def flops(jaxpr: Jaxpr | ClosedJaxpr) -> float:
  """FLOPs of all products and convolutions. A scan counts as often as it runs; of branches the largest one counts.

  The compiler's own count (`jax.stages.Lowered.cost_analysis`) is there on CPUs alone.
  """
  plain = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
  return sum(map(_of_equation, plain.eqns), 0.0)


def _of_equation(equation: JaxprEqn) -> float:
  name, params = equation.primitive.name, equation.params
  if name in ("dot_general", "conv_general_dilated"):
    left, right, result = (_shape(x) for x in (*equation.invars, *equation.outvars))
    if name == "dot_general":
      summed = math.prod(left[at] for at in params["dimension_numbers"][0][0])
    else:  # for each result, the part of the kernel that makes one feature
      summed = math.prod(right) // right[params["dimension_numbers"].rhs_spec[0]]
    return 2.0 * math.prod(result) * summed
  inner = [flops(each) for each in jaxprs_in_params(params)]
  if name == "cond":
    return max(inner, default=0.0)
  return params.get("length", 1) * sum(inner) if name == "scan" else sum(inner)


def _shape(x: Any) -> tuple[int, ...]:
  return tuple(x.aval.shape)
