"""Updates the weights part by part, so that only a part of the optimizer's state is on the device at a time.

Between two updates the state is in the host's memory. A part is one layer of the blocks, or a weight outside them. Its
state comes to the device, is updated and goes back. If the whole state came at once, the update would need as much
memory as a state that is always on the device, or more: the TPU compiler keeps both what comes and what goes.
"""

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax

State = Any  # the optimizer's state. All dicts in it hold an array for each weight, like the parameters
Parts = dict[str, Any]  # entries of the parameters or of their gradients, such as {"blocks": ...}
Update = Callable[..., tuple[Parts, State]]  # parameters, state, gradients and more → new parameters and state


def streamed(
  update: Update, stacks: Mapping[str, int], params: Parts, state: State, *given: Parts
) -> tuple[Parts, State]:
  """Calls `update` for each part, with the parameters, the state, the gradients and the rest of this part alone.

  Args:
    stacks: the entries of the parameters that are stacked by layer, each with the number of pieces into which devices
      split its layers. A part has one layer of each.
    state: its arrays for weights are in the host's memory.
    given: the gradients, and other trees with an array for each weight, stacked by layer as the weights are.
  """
  new, states = dict[str, Any](), []
  for name in sorted(params, key=lambda name: name not in stacks):
    entry = lambda x, name=name: {name: x[name]}
    part = entry(params), _of_weights(entry, state), *map(entry, given)
    part, new = jax.lax.optimization_barrier((part, new))  # waits until the part before is updated
    run = functools.partial(_by_layer, pieces=stacks[name]) if name in stacks else _on_device
    weights, after = run(update, *part)
    new |= weights
    states.append(after)
  return new, _of_weights(lambda *parts: functools.reduce(operator.or_, parts), *states)


def _on_device(update: Update, params: Parts, state: State, *given: Parts) -> tuple[Parts, State]:
  """The update of a part whose state is in the host's memory."""
  to = lambda space: lambda arrays: jax.device_put(arrays, space)
  new, state = update(params, _of_weights(to(jax.memory.Space.Device), state), *given)
  return new, _of_weights(to(jax.memory.Space.Host), state)


def _by_layer(update: Update, params: Parts, state: State, *given: Parts, pieces: int) -> tuple[Parts, State]:
  """The update of the blocks. A loop changes the stacked arrays in place; a scan would make new ones beside them."""
  each = lambda f: lambda *trees: jax.tree.map(f, *trees)
  grouped, flat = each(lambda x: x.reshape(pieces, -1, *x.shape[1:])), each(lambda x: x.reshape(-1, *x.shape[2:]))
  given = grouped(given)

  def body(i: jax.Array, carry: tuple[Parts, State]) -> tuple[Parts, State]:
    layer = each(lambda x: jax.lax.dynamic_index_in_dim(x, i, axis=1, keepdims=False))
    put = each(lambda x, new: jax.lax.dynamic_update_index_in_dim(x, new, i, axis=1))
    params, now = carry
    before = _of_weights(lambda x, _: layer(x), now, state)  # every layer starts from the old count of steps
    new, after = _on_device(update, layer(params), before, *layer(given))
    return put(params, new), _of_weights(put, now, after)

  layers = jax.tree.leaves(given)[0].shape[1]
  params, state = jax.lax.fori_loop(0, layers, body, (grouped(params), _of_weights(grouped, state)))
  return flat(params), _of_weights(flat, state)


def _of_weights(f: Callable[..., Any], *states: State) -> State:
  """Applies f to the states' dicts, which are for weights. Everything else, such as a count, is the last state's."""
  is_dict = lambda x: isinstance(x, dict)
  return jax.tree.map(lambda *x: f(*x) if is_dict(x[0]) else x[-1], *states, is_leaf=is_dict)
