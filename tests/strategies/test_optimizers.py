"""Every optimizer under every strategy: from given gradients, weights and state become those of a single device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PARITY, assert_trees_close, in_full, initial_state, laid_out, program, strategy

import strategies
from strategies import Strategy, layout_of
from strategies.execution.constraints import Constraints
from training.optimizers import OPTIMIZERS
from training.program import Params, Program, TrainState

STEPS = 3
# Weights are square, so sizes do not tell their dimensions apart.
SIZES = {"width": 32, "heads": 8, "kv_heads": 8, "head_dim": 4, "mlp_width": 32, "seq_len": 16, "vocab_size": 64}
SIZES |= {"qkv_bias": True, "qk_norm": True}  # weights that are no matrices
VARIANTS = {name: {"optimizer__name": name, "optimizer__clip_norm": 0.5} for name in OPTIMIZERS}
# Without clipping, because a sum whose last bit differs would round some numbers of bfloat16 to others.
VARIANTS["moments in bfloat16"] = {"optimizer__moments": "bfloat16", "optimizer__clip_norm": 0.0}
VARIANTS["weights in bfloat16"] = {"model__param_dtype": "bfloat16", "optimizer__clip_norm": 0.0}
# Joined with expert parallelism. Each expert has matrices of its own, whole or in pieces, as has its state.
EXPERT = layout_of("expert")
MIXTURES = {
  "mixture, zero1": (layout_of("zero1") | EXPERT).on(data=4, expert=2),
  "mixture, zero2": (layout_of("zero2") | EXPERT).on(data=2, expert=4),
  "mixture, expert_fsdp": layout_of("expert_fsdp").on(data=4, expert=2),
  "mixture, two_d": (layout_of("tensor_parallel") | layout_of("expert_fsdp")).on(data=2, expert=2, model=2),
}
EXPERTS = {"experts": 4, "expert_width": 32, "shared_experts": 1, "router": "sigmoid_bias"}


@functools.cache
def trained(variant: str, depth: int, mixture: bool) -> Program:
  sizes = SIZES | {"depth": depth} | (EXPERTS if mixture else {})
  return program(optimizer__warmup=0, **{f"model__{name}": size for name, size in sizes.items()}, **VARIANTS[variant])


def runner_of(name: str, variant: str, depth: int) -> Strategy:
  """Under a strategy of the registry or a layout of `MIXTURES`; "mixture" is one on a single device."""
  made = trained(variant, depth, name.startswith("mixture"))
  if name in MIXTURES:
    return laid_out(MIXTURES[name], made)
  return strategy("single" if name == "mixture" else name, made)


def depth_of(name: str) -> int:
  """Where devices hold the same weights, eight layers, which they divide. Elsewhere six, which they do not."""
  layout = strategies.layout_of(name).stored_as("state")
  return 6 if {axis for dim in ("layers", "embed", "heads") for axis in layout.axes(dim)} == set(layout.mesh) else 8


def random_gradients(params: Params) -> Params:
  """Sums of gradients for each step [STEPS, ...], small ones and large ones."""
  random = np.random.default_rng(0)
  draw = lambda w: (random.normal(size=(STEPS, *w.shape)) * random.lognormal(size=w.shape)).astype(np.float32)
  return jax.tree.map(draw, params)


def after_steps(runner: Strategy, state: TrainState, gradients: Params) -> TrainState:
  sums = runner.program.no_sums(0)
  sums |= {name: jnp.ones_like(sums[name]) for name in ("loss", "correct", "count")}
  update = functools.partial(runner.program.apply_gradients, sharding=Constraints(runner.layout))
  return jax.lax.scan(lambda state, now: (update(state, sums, now)[0], None), state, gradients)[0]


@functools.cache
def updated(name: str, depth: int, variants: tuple[str, ...]) -> dict[str, TrainState]:
  """The state after some steps, for each optimizer. A single program computes them all."""
  runners = {variant: runner_of(name, variant, depth) for variant in variants}
  states = {variant: initial_state(one) for variant, one in runners.items()}
  first = runners["adamw"]
  pieces = first.state_sharding.opt_state[0].mu  # where gradients of a batch in one part are
  stacked = jax.tree.map(lambda s: jax.NamedSharding(s.mesh, jax.P(None, *s.spec)), pieces)
  gradients = jax.device_put(random_gradients(states["adamw"].params), stacked)
  run = lambda states, gradients: {v: after_steps(one, states[v], gradients) for v, one in runners.items()}
  shardings = {variant: one.state_sharding for variant, one in runners.items()}
  with jax.set_mesh(first.mesh):
    return jax.device_get(jax.jit(run, out_shardings=shardings)(states, gradients))


OTHERS = [name for name in strategies.names() if name != "single"]
# Adafactor and Muon compute with rows, columns or whole matrices. Weights in bfloat16 are rounded by their place.
OF_MATRICES = ("adamw", "adafactor", "muon", "weights in bfloat16")
ELEMENTWISE = ("adamw", *(variant for variant in VARIANTS if variant not in OF_MATRICES))


# An elementwise update depends on the layout only through the pieces of its arrays. In zero1 the state has pieces of
# its own, in three_d weights are split over three axes, and pmap is another program.
CASES = [*((name, OF_MATRICES) for name in OTHERS), *((name, ELEMENTWISE) for name in ("zero1", "three_d", "pmap_ddp"))]


@pytest.mark.parametrize("name, variants", in_full(CASES, ("hsdp", OF_MATRICES)))
def test_updates_and_state_equal_those_of_a_single_device(name: str, variants: tuple[str, ...]):
  expected = updated("single", depth_of(name), variants)
  for variant, ours in updated(name, depth_of(name), variants).items():
    assert_trees_close(ours, expected[variant], PARITY)


@pytest.mark.full
@pytest.mark.parametrize("name", MIXTURES)
def test_updates_of_experts_equal_those_of_a_single_device(name: str):
  """Six layers, which the devices that share an expert's matrix do not divide."""
  expected = updated("mixture", 6, OF_MATRICES)
  for variant, ours in updated(name, 6, OF_MATRICES).items():
    assert_trees_close(ours, expected[variant], PARITY)
