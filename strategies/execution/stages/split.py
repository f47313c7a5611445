"""Splits a backward pass in two: first the cotangent of the input, later the gradients of the weights.

A backward pass is a chain of cotangents, from output to input. The products that give the gradients of weights branch
off the chain, and nothing waits for them (Qi et al. 2024, arXiv:2401.10241). `split_backward` finds them in the jaxpr
of any pullback: a product that the input's cotangent does not need is *late*, and so is all that depends on a late
value. Everything else that depends on the cotangent is early. Early values that late products read are kept.

Nothing of the chain is computed twice. What does not depend on the cotangent is computed where it is read, from the
residuals, as the remat policy has it. A scan over layers becomes two scans: one carries the cotangent and stacks what
is kept, the other has no carry. Only what the model calls `unsplit` runs in both parts.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxprs_in_params

from models.ops.gradients import UNSPLIT

PRODUCTS = {"dot_general", "conv_general_dilated"}
CALLS = {"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call"}
VIEWS = {"reshape", "transpose", "squeeze"}  # they are as large as their operands, which are kept instead

Env = dict[Var, Any]
Kept = tuple[list[jax.Array], dict[int, Any]]  # the kept values, and for each scan those that it keeps, stacked


def split_backward(
  pullback: Callable[[Any, Any], tuple[Any, Any]], fixed: Any, cotangent: Any
) -> tuple[Callable[[Any, Any], tuple[Any, Kept]], Callable[[Any, Kept], Any]]:
  """Splits `pullback(fixed, cotangent)`, which returns the gradients of weights and the cotangent of the input.

  Args:
    fixed: what the pullback reads besides the cotangent, such as residuals and weights. Only shapes and dtypes of
      `fixed` and `cotangent` matter here.

  Returns:
    `early(fixed, cotangent)`, which returns the cotangent of the input and what it keeps, and `late(fixed, kept)`,
    which returns the gradients.
  """
  closed, (gradients, inputs) = jax.make_jaxpr(pullback, return_shape=True)(fixed, cotangent)
  flat = flatten(closed)
  jaxpr, count, before = flat.jaxpr, len(jax.tree.leaves(gradients)), len(jax.tree.leaves(fixed))
  plan = _plan(flat, set(jaxpr.invars[before:]), jaxpr.outvars[count:], jaxpr.outvars[:count])
  # Gradients that depend on the cotangent, and are not late, are kept too.
  early_ones = plan.moving - plan.delayed - set(plan.kept)
  plan.kept.extend(var for var in variables(jaxpr.outvars[:count]) if var in early_ones)

  def early(fixed: Any, cotangent: Any) -> tuple[Any, Kept]:
    given = zip(jaxpr.invars, jax.tree.leaves((fixed, cotangent)), strict=True)
    values, kept = plan.early(dict(given), jaxpr.outvars[count:])
    return jax.tree.unflatten(jax.tree.structure(inputs), values), kept

  def late(fixed: Any, kept: Kept) -> Any:
    given = zip(jaxpr.invars[:before], jax.tree.leaves(fixed), strict=True)
    values = plan.late(dict(given), kept, jaxpr.outvars[:count])
    return jax.tree.unflatten(jax.tree.structure(gradients), values)

  return early, late


@dataclasses.dataclass(frozen=True)
class _Plan:
  """How a jaxpr is split.

  Attributes:
    moving: the values that depend on the cotangent.
    delayed: the moving values that are late.
    kept: the moving values that are early, and from which late values are computed.
    scans: the plans of the bodies of scans that are early and late in part, by the number of their equation.
  """

  closed: ClosedJaxpr
  moving: set[Var]
  delayed: set[Var]
  kept: list[Var]
  scans: dict[int, "_Plan"]

  def early(self, known: Env, wanted: list[Var]) -> tuple[list[jax.Array], Kept]:
    """The wanted values, which are not late, and what is kept."""
    stacks = {}

    def scan(number: int, equation: JaxprEqn, values: list[Any]) -> list[Any]:
      plan, body = self.scans[number], self.scans[number].closed.jaxpr
      consts, carry, xs = scan_operands(equation, values)
      _, ends, ys = scan_operands(equation, body.outvars, outputs=True)
      now = [y for y in ys if y not in plan.delayed]

      def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], tuple[list[Any], Kept]]:
        found, kept = plan.early(dict(zip(body.invars, [*consts, *carry, *xs], strict=True)), [*ends, *now])
        return found[: len(ends)], (found[len(ends) :], kept)

      carry, (found, stacks[number]) = scan_as(equation, step, carry, xs)
      stacked = iter(found)
      return [*carry, *(None if y in plan.delayed else next(stacked) for y in ys)]

    values = self._evaluate(known, [*wanted, *self.kept], scan, lambda equation: equation.invars)
    return values[: len(wanted)], (values[len(wanted) :], stacks)

  def late(self, known: Env, kept: Kept, wanted: list[Var]) -> list[jax.Array]:
    """The wanted values from what was kept. `known` has no value that depends on the cotangent."""

    def scan(number: int, equation: JaxprEqn, values: list[Any]) -> list[Any]:
      plan, body = self.scans[number], self.scans[number].closed.jaxpr
      consts, _, inputs = scan_operands(equation, body.invars)
      of_consts, _, xs = scan_operands(equation, values)
      _, ends, ys = scan_operands(equation, body.outvars, outputs=True)
      fixed = [(var, x) for var, x in zip(inputs, xs, strict=True) if x is not None]
      around = {var: x for var, x in zip(consts, of_consts, strict=True) if x is not None}

      def step(_: None, each: tuple[list[Any], Kept]) -> tuple[None, list[Any]]:
        now = around | dict(zip([var for var, _ in fixed], each[0], strict=True))
        return None, plan.late(now, each[1], [y for y in ys if y in plan.delayed])

      _, found = scan_as(equation, step, None, ([x for _, x in fixed], kept[1][number]))
      stacked = iter(found)
      return [*(None for _ in ends), *(next(stacked) if y in plan.delayed else None for y in ys)]

    reads = lambda equation: [v for v in equation.invars if v not in self.moving]
    return self._evaluate(known | dict(zip(self.kept, kept[0], strict=True)), wanted, scan, reads)

  def _evaluate(
    self,
    known: Env,
    wanted: list[Var],
    scan: Callable[[int, JaxprEqn, list[Any]], list[Any]],
    reads: Callable[[JaxprEqn], list[Any]],
  ) -> list[Any]:
    """Computes the wanted values, and only what they need. `scan` runs a scan that is split, which reads `reads`."""
    jaxpr = self.closed.jaxpr
    known = known | dict(zip(jaxpr.constvars, self.closed.consts, strict=True))
    needs, chosen = {v for v in variables(wanted) if v not in known}, []
    for number, equation in reversed(list(enumerate(jaxpr.eqns))):
      if needs & set(equation.outvars):
        chosen.append((number, equation))
        inputs = reads(equation) if number in self.scans else equation.invars
        needs |= {v for v in variables(inputs) if v not in known}
    env = dict(known)
    value = lambda v: v.val if isinstance(v, Literal) else env.get(v)
    for number, equation in reversed(chosen):
      values = [value(v) for v in equation.invars]
      found = scan(number, equation, values) if number in self.scans else bind(equation, values)
      env |= {var: x for var, x in zip(equation.outvars, found, strict=True) if var not in known}
    return [value(v) for v in wanted]


def _plan(closed: ClosedJaxpr, moving: set[Var], first: list[Var], second: list[Var]) -> _Plan:
  """Plans to compute the outputs `first` early, and late the products that only the outputs `second` need."""
  jaxpr = closed.jaxpr
  moving, delayed, needs = set(moving), set[Var](), set(variables(first))
  made = {var: equation for equation in jaxpr.eqns for var in equation.outvars}
  for equation in jaxpr.eqns:
    if moving & set(variables(equation.invars)):
      moving |= set(equation.outvars)
  for equation in reversed(jaxpr.eqns):
    if needs & set(equation.outvars):
      needs |= set(variables(equation.invars))
  scans = {}
  for number, equation in enumerate(jaxpr.eqns):
    if not moving & set(equation.outvars):
      continue
    if not needs & set(equation.outvars):
      if delayed & set(variables(equation.invars)) or has_product(equation):
        delayed |= set(equation.outvars)
    elif equation.primitive.name in CALLS:  # a call of `unsplit`: it runs again
      delayed |= set(equation.outvars) - needs
    elif equation.primitive.name == "scan":
      body = equation.params["jaxpr"].jaxpr
      _, carries, _ = scan_operands(equation, body.invars)
      _, ends, ys = scan_operands(equation, body.outvars, outputs=True)
      outer = equation.outvars[len(ends) :]
      inside = {var for var, of in zip(body.invars, equation.invars, strict=True) if of in moving} | set(carries)
      free = [y for y, of in zip(ys, outer, strict=True) if of not in needs]
      plan = _plan(equation.params["jaxpr"], inside, [y for y in body.outvars if y not in free], free)
      if late := {of for y, of in zip(ys, outer, strict=True) if y in plan.delayed}:
        scans[number], delayed = plan, delayed | late
  split_scans = {id(jaxpr.eqns[number]) for number in scans}
  kept: dict[Var, None] = {}
  stack = [var for var in variables(second) if var in delayed]
  while stack:
    var = stack.pop()
    equation = made.get(var)
    is_view = equation is not None and equation.primitive.name in VIEWS
    if var not in delayed and not is_view:
      kept[var] = None
    elif equation is not None and id(equation) not in split_scans:
      stack += [v for v in variables(equation.invars) if v in moving]
  return _Plan(closed, moving, delayed, list(kept), scans)


def flatten(closed: ClosedJaxpr) -> ClosedJaxpr:
  """The same jaxpr without calls inside, except those of `unsplit`; also in the bodies of scans."""

  def evaluate(jaxpr: Jaxpr, consts: Iterable[Any], args: Iterable[Any]) -> list[Any]:
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    value = lambda v: v.val if isinstance(v, Literal) else env[v]
    for equation in jaxpr.eqns:
      values = [value(v) for v in equation.invars]
      if equation.primitive.name in CALLS and equation.params.get("name") != UNSPLIT:
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
  """A scan of `step` with the length and the direction of the equation's scan."""
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
  """Whether an equation is a matrix product or contains one."""
  inside = (inner for jaxpr in jaxprs_in_params(equation.params) for inner in jaxpr.eqns)
  return equation.primitive.name in PRODUCTS or any(map(has_product, inside))


def variables(of: Iterable[Any]) -> list[Var]:
  """These operands without literals."""
  return [v for v in of if isinstance(v, Var)]
