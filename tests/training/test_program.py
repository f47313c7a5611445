"""The training step: sums, the optimizer compared with optax's, non-finite updates, and random numbers."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import IMAGES, assert_trees_close, equations, in_full, one_sentence, program, random_batch

from models.ops import loss as losses
from models.stacks import STACKS
from training.optimizer import is_decayed
from training.program import Program, TrainState
from training.schedules import SCHEDULES
from training.streaming import streamed

# Whether weight decay applies to the weights of a name: to matrices, but neither to the scales of norms nor to biases.
DECAYED = dict.fromkeys(
  ("embedding", "head", "query", "key", "value", "out", "gate", "up", "down", "router", "a", "b"), True
)
NOT_DECAYED = ("scale", "sinks", "bias", "query_bias", "key_bias", "value_bias", "out_bias", "decay_bias")
DECAYED |= dict.fromkeys((*NOT_DECAYED, "router_bias", "gate_bias", "up_bias", "down_bias"), False)


@functools.cache
def begin(p: Program) -> TrainState:
  return jax.jit(p.init)(jax.random.key(0))


def step(p: Program, state: TrainState, batch) -> tuple[TrainState, dict]:
  return jax.jit(functools.partial(train_step, p))(state, batch)


def train_step(p: Program, state: TrainState, batch) -> tuple[TrainState, dict]:
  return p.apply_gradients(state, *p.gradient_sums(state.params, batch, state.step))


def gradients(p: Program, state: TrainState, batch) -> dict:
  return p.mean(*p.gradient_sums(state.params, batch, state.step))[1]


def eval_sums(p: Program, params: dict, batch) -> dict:
  return p.loss_sums(params, batch, None)[1]


@pytest.mark.full
def test_updates_equal_optax_adamw():
  """Three steps of ours, compared with optax.adamw at the same learning rate and mask on separately computed gradients.

  With the default eps, Adam would turn rounding errors in vanishing gradients into full updates.
  """
  ours = program(
    steps=10, optimizer__warmup=2, optimizer__weight_decay=0.3, optimizer__clip_norm=0.5, optimizer__eps=1e-3
  )
  o = ours.optimizer
  reference = optax.chain(
    optax.clip_by_global_norm(o.clip_norm),
    optax.adamw(o.learning_rate_at, o.b1, o.b2, o.eps, weight_decay=o.weight_decay, mask=decayed),
  )
  state, update, gradients_of = begin(ours), jax.jit(reference.update), jax.jit(functools.partial(gradients, ours))
  params, opt_state = state.params, jax.jit(reference.init)(state.params)
  for i in range(3):
    batch = random_batch(ours, 4, seed=i)
    gradient = gradients_of(state, batch)
    updates, opt_state = update(gradient, opt_state, params)
    params = jax.jit(optax.apply_updates)(params, updates)
    state, metrics = step(ours, state, batch)
    assert float(metrics["grad_norm"]) == pytest.approx(float(optax.tree.norm(gradient)), rel=1e-5)
    assert_trees_close(state.params, params, 1e-5)


def decayed(params: dict) -> dict:
  """Whether a weight is decayed, for each of the weights that have this name, whatever the model."""
  return jax.tree.map_with_path(lambda path, _: DECAYED[path[-1].key], params)


def test_weight_decay_spares_norms_and_biases():
  """In models that have every kind of weight. A weight with a new name belongs into the list above."""
  for fields in (
    {"model__qkv_bias": True, "model__qk_norm": True, "model__experts": 4, "model__router": "sigmoid_bias"},
    {"model__out_bias": True, "model__mlp_bias": True, "model__experts": 4, "model__attention_sinks": True},
    {"model__mixer": "recurrence", "model__lora_rank": 2, "init_from": "a model"},
    IMAGES,
  ):
    params = jax.eval_shape(program(**fields).init, jax.random.key(0)).params
    assert is_decayed(params) == decayed(params)


def test_learning_rate_warms_up_and_decays_to_its_fraction():
  """From an eleventh of the peak in a line, then half a cosine over the 90 steps after the warm-up."""
  optimizer = program(
    steps=100, optimizer__learning_rate=1.0, optimizer__warmup=10, optimizer__final_fraction=0.1
  ).optimizer
  rates = jax.jit(jax.vmap(optimizer.learning_rate_at))(np.arange(131)).tolist()
  rising = [(t + 1) / 11 for t in range(10)]
  falling = [0.1 + 0.9 * (1 + math.cos(math.pi * t / 90)) / 2 for t in range(91)]
  assert rates == pytest.approx([*rising, *falling, *[0.1] * 30], rel=1e-5)


def test_the_learning_rate_follows_the_schedule_that_is_named():
  """Against the formula, step by step: it rises in a line, stays, and falls in a line over the last fifth."""
  of = lambda name, **more: program(
    steps=100, optimizer__learning_rate=2.0, optimizer__warmup=9, optimizer__schedule=name,
    **{f"optimizer__{field}": x for field, x in more.items()},
  ).optimizer  # fmt: skip
  every = of("constant"), of("wsd", final_fraction=0.1, decay_fraction=0.2), of("wsd", decay_fraction=1.0)
  rates = jax.jit(lambda steps: [jax.vmap(optimizer.learning_rate_at)(steps) for optimizer in every])
  constant, falls, at_once = (np.asarray(rate).tolist() for rate in rates(np.arange(130)))
  rising = [2.0 * (1 + 9 * t / 9) / 10 for t in range(10)]
  assert constant == pytest.approx([*rising, *[2.0] * 120], rel=1e-6)
  falling = [2.0 * (1 - 0.9 * t / 20) for t in range(20)]
  assert falls == pytest.approx([*rising, *[2.0] * 70, *falling, *[0.2] * 30], rel=1e-5)
  assert min(at_once[:10]) == pytest.approx(0.2)  # the decay waits for the warm-up


@pytest.mark.parametrize("broken", in_full(["loss", "gradient"], "loss"))
def test_a_non_finite_update_is_not_applied_but_counted(broken: str):
  p = program()
  state = begin(p)
  batch = random_batch(p, 4)
  apply, (sums, grads) = jax.jit(p.apply_gradients), jax.jit(p.gradient_sums)(state.params, batch, state.step)
  _, healthy = apply(state, sums, grads)
  if broken == "loss":
    sums = sums | {"loss": jnp.full_like(sums["loss"], jnp.inf)}
  else:
    grads = grads | {"embedding": grads["embedding"].at[0, 0].set(jnp.nan)}
  after, metrics = apply(state, sums, grads)
  assert bool(metrics["skipped"])
  assert int(after.step) == int(state.step) + 1
  jax.tree.map(np.testing.assert_array_equal, (after.params, after.opt_state), (state.params, state.opt_state))
  assert not bool(healthy["skipped"])


@pytest.mark.full
def test_padding_changes_neither_loss_nor_gradient():
  """Of images; models/test_segments.py has those of text."""
  p = program(**IMAGES)
  state = begin(p)
  batch = random_batch(p, 8)
  batch["mask"][3:] = False
  short = {name: value[:3] for name, value in batch.items()}
  run = jax.jit(lambda b: p.mean(*p.gradient_sums(state.params, b, state.step)))
  (loss, grads), (short_loss, short_grads) = run(batch), run(short)
  assert_trees_close(loss, short_loss, 1e-6)
  assert_trees_close(grads, short_grads, 1e-5)


def test_masked_examples_are_not_counted_as_correct():
  p = program(**IMAGES)
  state, batch = begin(p), random_batch(p, 8)
  batch["mask"][:] = False
  sums = jax.jit(functools.partial(eval_sums, p))(state.params, batch)
  assert {name: float(value) for name, value in sums.items()} == {"loss": 0, "correct": 0, "count": 0}


of_logits = jax.jit(losses.of_logits)


def test_a_tie_is_not_counted_as_correct():
  _, sums = of_logits(np.zeros((4, 10), np.float32), losses.Targets(np.arange(4), np.ones(4, bool)))
  assert int(sums["correct"]) == 0


def test_accuracy_counts_the_largest_logit():
  logits = np.float32([[0.0, 2.0, 1.0], [3.0, 2.0, 1.0], [0.0, 0.0, 5.0]])
  loss, sums = of_logits(logits, losses.Targets(np.array([1, 2, 2]), np.ones(3, bool)))
  assert int(sums["correct"]) == 2
  expected = (np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(3), [1, 2, 2]]).sum()
  assert float(loss) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("fields", [{"model__dropout": 0.5}, {"data__augment": True, **IMAGES}])
def test_random_numbers_depend_on_step_and_example_not_on_position(fields: dict):
  p = program(**fields)
  state, batch = begin(p), random_batch(p, 8)
  moved = {name: value[::-1] for name, value in batch.items()}
  loss = jax.jit(lambda b, step: p.loss_sums(state.params, b, step)[0])
  assert float(loss(moved, 0)) == pytest.approx(float(loss(batch, 0)), rel=1e-6)
  assert float(loss(batch, 1)) != pytest.approx(float(loss(batch, 0)), rel=1e-6)
  other = batch | {"id": batch["id"] + 1}
  assert float(loss(other, 0)) != pytest.approx(float(loss(batch, 0)), rel=1e-6)
  evaluate = jax.jit(functools.partial(eval_sums, p))
  still = evaluate(state.params, batch)["loss"]
  assert float(still) == pytest.approx(float(evaluate(state.params, moved)["loss"]), rel=1e-6)


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_masters():
  p = program(model__dtype="bfloat16")
  state = jax.eval_shape(p.init, jax.random.key(0))
  forward = jax.make_jaxpr(functools.partial(eval_sums, p))(state.params, random_batch(p, 4)).jaxpr
  products = [equation for equation in equations(forward) if equation.primitive.name == "dot_general"]
  assert products
  assert all(operand.aval.dtype == jnp.bfloat16 for product in products for operand in product.invars)
  after, _ = jax.eval_shape(functools.partial(train_step, p), state, random_batch(p, 4))
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(after.params))


@pytest.mark.full
def test_the_loss_in_bfloat16_is_near_that_in_float32():
  p = program(model__dtype="bfloat16")
  state = begin(p)
  _, metrics = step(p, state, random_batch(p, 4))
  exact, sums = jax.jit(lambda batch: program().loss_sums(state.params, batch, 0))(random_batch(p, 4))
  assert float(metrics["loss"]) == pytest.approx(float(exact / sums["count"]), rel=0.02)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_warm_up_may_take_all_steps(name: str):
  """Of 9 steps of warm-up a run of 4 has 4, and no schedule is left with no step at all."""
  optimizer = program(steps=4, optimizer__warmup=9, optimizer__schedule=name).optimizer
  assert jax.eval_shape(optimizer.learning_rate_at, jax.ShapeDtypeStruct((), np.int32)).shape == ()


@pytest.mark.parametrize(
  "fields, parts",
  [
    ({"optimizer__learning_rate": 0.0}, ["optimizer.learning_rate=0.0"]),
    ({"optimizer__eps": 0.0}, ["optimizer.eps=0.0"]),
    ({"optimizer__final_fraction": 1.5}, ["optimizer.final_fraction=1.5"]),
    ({"optimizer__decay_fraction": -0.5}, ["optimizer.decay_fraction=-0.5"]),
    ({"optimizer__schedule": "linear"}, ["optimizer.schedule='linear'", "did you mean 'cosine'?"]),
    ({"model__param_dtype": "float16"}, ["model.param_dtype='float16'", "bfloat16"]),
    ({"optimizer__b2": 1.0}, ["optimizer.b2=1.0"]),
    ({"optimizer__clip_norm": -1.0}, ["optimizer.clip_norm=-1.0"]),
    ({"optimizer__warmup": -1}, ["optimizer.warmup=-1"]),
    ({"steps": 0}, ["steps=0", "at least 1"]),
    ({"accumulation": 0}, ["accumulation=0"]),
    ({"model__dtype": "flaot32"}, ["model.dtype='flaot32'", "'float32'"]),
    ({"data__packing": "document"}, ["data.packing='document'", "'documents'"]),
    ({"data__packing": "documents", **IMAGES}, ["data.packing='documents'", "model.objective='class'", "'windows'"]),
    ({"data__prompt_field": "prompt"}, ["data.prompt_field='prompt'", "data.packing='windows'", "use 'documents'"]),
    ({"data__prompt_field": "prompt", **IMAGES}, ["data.prompt_field='prompt'", "model.objective='class'", "empty"]),
  ],
)
def test_invalid_settings_are_refused(fields: dict, parts: list[str]):
  with one_sentence(*parts):
    program(**fields)


def test_a_streamed_update_sees_one_block_at_a_time():
  """Of both stacks of a mixture whose first blocks are dense, so that one block's state is on the device."""
  whole = program(model__experts=4, model__dense_layers=2, model__depth=5, optimizer__on_host=True)
  params = jax.eval_shape(lambda: whole.init(jax.random.key(0))).params
  seen = list[tuple[str, int]]()

  def update(part: dict, state: dict, gradients: dict) -> tuple[dict, dict]:
    ((name, arrays),) = part.items()
    seen.append((name, len(arrays["mlp"]["up"]) if name in STACKS else 0))
    return part, state

  on_host = lambda tree: jax.device_put(tree, jax.memory.Space.Host)
  pieces = dict.fromkeys(STACKS, 1)
  jax.eval_shape(lambda params: streamed(update, pieces, params, on_host(params), params), params)
  assert set(seen) == {("blocks", 1), ("dense_blocks", 1), ("embedding", 0), ("head", 0), ("norm", 0)}
