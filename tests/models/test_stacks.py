"""Models whose blocks are of several kinds run them in order, and save no weights to do so."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_trees_close, in_full, model_sizes, params_of

from models import parameters
from models.dimensions import UNSHARDED
from models.ops.routing import Counted
from models.side_inputs import SideInputs
from models.sizes import ModelSizes
from models.stacks import Kind, Loop, kinds_of, loops

D, M, L = Kind("dense_blocks", "global"), Kind("blocks", "global"), Kind("blocks", "local")


@pytest.mark.parametrize(
  "kinds, expected",
  [
    ([M] * 4, [Loop((M,), 4)]),
    ([D, D, M, M, M], [Loop((D,), 2), Loop((M,), 3)]),  # the first blocks of a mixture
    ([D, M, M, M], [Loop((D,), 1), Loop((M,), 3)]),
    ([D, M] * 3, [Loop((D, M), 3)]),  # every second block
    ([L, L, M] * 4 + [L, L], [Loop((L, L, M), 4), Loop((L,), 2)]),  # ends within a period
    ([M] * 5 + [L] * 3, [Loop((M,), 5), Loop((L,), 3)]),
    ([D, D, D, M, D, M, D], [Loop((D,), 3), Loop((M, D), 2)]),
    ([L, M], [Loop((L,), 1), Loop((M,), 1)]),
  ],
)
def test_what_repeats_is_a_loop(kinds: list[Kind], expected: list[Loop]):
  found = loops(tuple(kinds))
  assert list(found) == expected
  assert list(kinds_of(found)) == kinds


SMALL = {"width": 32, "heads": 4, "kv_heads": 2, "mlp_width": 32, "seq_len": 24}


# Kinds of both sorts at once, in two periods and a part of one; and dense blocks before a period.
BOTH_SORTS = {"experts_every": 2, "window": 4, "layers_pattern": "local:1,global:3", "depth": 9}, "dbdbdbdbd"
DENSE_FIRST = {"experts_every": 2, "dense_layers": 3, "depth": 7}, "dddbdbd"


@pytest.mark.parametrize("fields, order", in_full([BOTH_SORTS, DENSE_FIRST], DENSE_FIRST))
def test_a_model_is_its_blocks_one_after_another(fields: dict, order: str):
  """The stream, every gradient, and the loads of experts, against a model that runs without a loop."""
  sizes = model_sizes(**SMALL, experts=4, expert_width=16, **fields)
  random = np.random.default_rng(0)
  x = random.normal(size=(2, 24, 32)).astype(np.float32)
  counted = Counted(np.ones((2, 24), bool), np.full(2, 24))
  names = {"d": "dense_blocks", "b": "blocks"}
  assert [kind.stack for kind in sizes.kinds] == [names[letter] for letter in order]

  def in_loops(params: Any) -> tuple[jax.Array, jax.Array]:
    model = parameters.bind(sizes, params)
    out, routed = model.run_blocks(x, SideInputs.of(model.sizes, 24, counted=counted))
    return jnp.sum(jnp.sin(out)) + routed["balance"], routed["load"]

  def one_by_one(params: Any) -> tuple[jax.Array, jax.Array]:
    model, out, balance, loads = parameters.bind(sizes, params), x, 0.0, []
    numbers = {"d": iter(range(10)), "b": iter(range(10))}
    for layer, letter in enumerate(order):
      weights, block_of = model.scanned(names[letter], UNSHARDED)
      number = next(numbers[letter])
      own = block_of(jax.tree.map(lambda w, number=number: w[number], weights))
      local = bool(sizes.window) and layer % 4 == 0
      side = SideInputs.of(model.sizes, 24, counted=counted)._replace(window=4 if local else 0)
      out, _, routed = own(out, side, UNSHARDED)
      if letter == "b":
        balance += routed["balance"]
        loads.append(routed["load"])
    return jnp.sum(jnp.sin(out)) + balance, jnp.stack(loads)

  run = lambda f: jax.jit(jax.value_and_grad(f, has_aux=True))(params_of(sizes))
  assert_trees_close(run(in_loops), run(one_by_one), 1e-5)


def gradient_memory(sizes: ModelSizes) -> tuple[int, int]:
  """Bytes that the gradient of the blocks needs beside its arguments and results, and those of the blocks."""
  params = jax.eval_shape(lambda key: parameters.init_params(sizes, key), jax.random.key(0))
  x = jax.ShapeDtypeStruct((1, sizes.seq_len, sizes.width), "float32")

  def loss(blocks: Any, params: Any, x: jax.Array) -> jax.Array:
    model = parameters.bind(sizes, params | {"blocks": blocks})
    return jnp.sum(model.run_blocks(x, SideInputs.of(model.sizes, sizes.seq_len))[0])

  step = jax.jit(jax.grad(loss)).lower(params["blocks"], params, x).compile()
  blocks = sum(w.size * w.dtype.itemsize for w in jax.tree.leaves(params["blocks"]))
  return step.memory_analysis().temp_size_in_bytes, blocks


def test_blocks_of_several_kinds_save_no_weights_for_the_backward_pass():
  """What a block cuts out of the weights of its period, it cuts out again. Saved, it would be all weights once more."""
  wide = SMALL | {"width": 256, "mlp_width": 512, "remat": "full"}
  needed, blocks = gradient_memory(model_sizes(**wide, window=8, layers_pattern="local:1,global:1", depth=8))
  assert needed < 0.6 * blocks
