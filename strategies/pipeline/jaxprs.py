"""Reads and runs the equations of a jaxpr. split.py builds on it."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxprs_in_params

PRODUCTS = {"dot_general", "conv_general_dilated"}
CALLS = {"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call"}


def flatten(closed: ClosedJaxpr) -> ClosedJaxpr:
  """The same without calls inside, also in the bodies of scans."""

  def evaluate(jaxpr: Jaxpr, consts: Iterable[Any], args: Iterable[Any]) -> list[Any]:
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    value = lambda v: v.val if isinstance(v, Literal) else env[v]
    for equation in jaxpr.eqns:
      values = [value(v) for v in equation.invars]
      if equation.primitive.name in CALLS:
        (inner,) = [equation.params[name] for name in ("jaxpr", "call_jaxpr") if name in equation.params]
        found = evaluate(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), values)
      elif equation.primitive.name == "scan":
        found = bind(equation, values, jaxpr=flatten(equation.params["jaxpr"]))
      else:
        found = bind(equation, values)
      env |= zip(equation.outvars, found, strict=True)
    return [value(v) for v in jaxpr.outvars]

  return jax.make_jaxpr(lambda *args: evaluate(closed.jaxpr, closed.consts, args))(*closed.in_avals)


def bind(equation: JaxprEqn, values: list[Any], **changed: Any) -> list[Any]:
  """Runs one equation, in the scope of its origin."""
  params = equation.primitive.get_bind_params(equation.params | changed)
  with jax.named_scope(str(equation.source_info.name_stack)), equation.ctx.manager:
    found = equation.primitive.bind(*values, **params)
  return found if equation.primitive.multiple_results else [found]


def scan_as(equation: JaxprEqn, step: Callable, carry: Any, xs: Any) -> Any:
  """A scan of `step` that is as long as this one, in the same direction."""
  names = ("length", "reverse", "unroll")
  return jax.lax.scan(step, carry, xs, **{name: equation.params[name] for name in names})


def scan_operands(equation: JaxprEqn, of: list[Any], outputs: bool = False) -> tuple[list[Any], list[Any], list[Any]]:
  """The inputs of a scan: constants, carry, and what it slices. Or its outputs: nothing, carry, and what it stacks."""
  if "ft_in" in equation.params:  # jax 0.12
    consts, carry, _ = (len(list(part)) for part in equation.params["ft_in"].unpack())
  else:
    consts, carry = equation.params["num_consts"], equation.params["num_carry"]
  start = 0 if outputs else consts
  return of[:start], of[start : start + carry], of[start + carry :]


def has_product(equation: JaxprEqn) -> bool:
  """Whether it is a matrix product or contains one."""
  inside = (inner for jaxpr in jaxprs_in_params(equation.params) for inner in jaxpr.eqns)
  return equation.primitive.name in PRODUCTS or any(map(has_product, inside))


def variables(of: Iterable[Any]) -> list[Var]:
  """These operands without literals."""
  return [v for v in of if isinstance(v, Var)]
