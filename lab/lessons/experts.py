"""Experts in a few lines: tokens go to other devices and come back.

The sixth lesson of the tour. Next: memory.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from lab.lessons.sent import print_sent


def route(x, router):
  """The best two experts of each token, and how much each of them counts: both [T, 2]."""
  scores, chosen = jax.lax.top_k(x @ router, 2)
  return chosen, jax.nn.softmax(scores)


def work(rows, up, down):
  """The MLPs of e experts, each for its own rows: [e, R, 16] → [e, R, 16]."""
  return jax.nn.relu(rows @ up) @ down


def mixture(x, router, up, down):
  """All experts work on all tokens, [T, 16], on one device. Only the chosen ones count. Both ways must equal it."""
  chosen, weights = route(x, router)
  counts = jnp.sum(weights[..., None] * (chosen[..., None] == jnp.arange(len(up))), axis=1)  # [T, 8]
  return jnp.einsum("etd,te->td", work(jnp.stack([x] * len(up)), up, down), counts)


def to_their_experts(x, router, up, down, room):
  """What one device does with its own tokens, [t, 16], and its own experts. `room` is for rows of each expert."""
  chosen, weights = route(x, router)
  expert, token = chosen.ravel(), jnp.arange(chosen.size) // 2  # of each row
  place = jnp.sum(jnp.tril(expert[:, None] == expert, -1), axis=1)  # of a row among those of its expert
  rows = jnp.zeros((router.shape[1], room, x.shape[1])).at[expert, place].set(x[token])
  here = jax.lax.all_to_all(rows, "expert", split_axis=0, concat_axis=1, tiled=True)  # all rows of own experts
  back = jax.lax.all_to_all(work(here, up, down), "expert", split_axis=1, concat_axis=0, tiled=True)
  return jnp.einsum("tkd,tk->td", back[chosen, place.reshape(chosen.shape)], weights)


def to_all_devices(x, router, up, down):
  """What one device does if it also sees the tokens of all others: [t, 16] → [t, 16]."""
  everyone = jax.lax.all_gather(x, "expert", tiled=True)
  chosen, weights = route(everyone, router)
  own = jax.lax.axis_index("expert") * len(up) + jnp.arange(len(up))
  counts = jnp.sum(weights[..., None] * (chosen[..., None] == own), axis=1)  # [T, e]
  parts = jnp.einsum("etd,te->td", work(jnp.stack([everyone] * len(up)), up, down), counts)
  return jax.lax.psum_scatter(parts, "expert", tiled=True)


def tokens_and_experts():
  """256 tokens, a router, and the two weights of each of eight experts."""
  keys, shapes = jax.random.split(jax.random.key(0), 4), ((256, 16), (16, 8), (8, 16, 32), (8, 32, 16))
  return [jax.random.normal(key, shape) / shape[-2] ** 0.5 for key, shape in zip(keys, shapes, strict=True)]


def on_four_devices(layer):
  """Runs a layer on four devices: a quarter of the tokens and two experts on each."""
  mesh = jax.make_mesh((4,), ("expert",), devices=jax.devices()[:4])
  specs = P("expert"), P(), P("expert"), P("expert")
  placed = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(tokens_and_experts(), specs, strict=True)]
  program = jax.jit(jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=P("expert"))).lower(*placed).compile()
  y, expected = program(*placed), mixture(*tokens_and_experts())
  print(f"largest difference from one device: {np.abs(y - expected).max():.5f}")
  sent = print_sent(program, mesh)
  print(f"each device sends {sum(one.sent_in_step for one in sent):,.0f} bytes")
  return {"y": y, "expected": expected, "sent": sent}


def a_router_chooses():
  """1. A router chooses

  A mixture of experts has many MLPs in the place of one. For each token, a router chooses the two with the best scores.
  The result is the sum of theirs, each times a weight. So a mixture has many weights, but only a few of them work on a
  token.

  Here are 256 tokens and eight experts on one device. The function `mixture` lets each expert work on all tokens, also
  on those that did not choose it. This keeps the code short. A good program computes only what counts.

  The experts get different numbers of tokens. This matters if they are on different devices.
  """
  x, router, up, down = tokens_and_experts()
  loads = np.bincount(route(x, router)[0].ravel(), minlength=8)
  print("tokens of each expert:", *loads)
  print("weights of all experts, and of those that work on a token:", up.size + down.size, (up.size + down.size) // 4)
  return {"loads": loads, "y": mixture(x, router, up, down)}


def tokens_go_to_experts():
  """2. Tokens go to their experts

  If the experts do not fit on one device, devices share them, along an axis that we call `expert`. The same axis splits
  the tokens. Most tokens then need experts of other devices.

  So each device makes a row for each choice of its tokens, and puts the rows of each expert together. An all-to-all
  brings every row to the device that has its expert. A second one brings the results back.

  One thing is awkward. How many rows an expert gets depends on the tokens, but a compiled program has fixed shapes. So
  each device keeps room for equally many rows of each expert, and fills it up with zeros. Here the room is the largest
  number that occurs. Some programs have less room, and drop the tokens for which there is none.
  """
  x, router, *_ = tokens_and_experts()
  rows = np.stack([np.bincount(of_device, minlength=8) for of_device in route(x, router)[0].reshape(4, -1)])
  for device, of_device in enumerate(rows):
    print(f"rows of each expert from device {device}:", *of_device)
  return {"rows": rows, **on_four_devices(functools.partial(to_their_experts, room=int(rows.max())))}


def tokens_go_to_all_devices():
  """3. Or all tokens go to all devices

  There is a simpler way. Each device gathers the tokens of all devices, and computes what its own experts add to each
  of them. A reduce-scatter adds up these parts, and leaves each device the sums of its own tokens. There are no rows to
  put together, and no room to fill up.

  Below, each expert works on all tokens, also on those that did not choose it. This keeps the code short. A good
  program computes only what counts.
  """
  return on_four_devices(to_all_devices)


def which_way_sends_less():
  """4. Which way sends less

  If n devices share the experts, a gather sends each token to n - 1 devices. The reduce-scatter sends as many values
  back. On the other way a token has as many rows as experts, however many devices there are, and one row in n stays
  where it is. So many devices are a reason for the all-to-alls, and many experts for each token are one for the gather.

  The table counts what a device sends for each of its tokens, there and back, in tokens. The last column adds room for
  a quarter more rows than the mean.

  This repository has both ways, and chooses the one that sends less (`models/ops/transports.py`). It drops no token: if
  the room is too small, all devices send a second round. The strategies `expert` and `expert_fsdp` use these ways.
  """
  print("devices   to all devices   to two experts   and room for a quarter more")
  result = {}
  for n in (2, 4, 8, 64):
    to_all, to_two = 2 * (n - 1), 2 * 2 * (n - 1) / n
    print(f"{n:7}{to_all:17}{to_two:17.2f}{1.25 * to_two:28.2f}")
    result[n] = to_all, to_two
  return result


STEPS = (a_router_chooses, tokens_go_to_experts, tokens_go_to_all_devices, which_way_sends_less)
