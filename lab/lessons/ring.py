"""A ring in a few lines: attention over a text that is too long for one device.

The fifth lesson of the tour. Next: experts.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from lab.lessons.sent import print_sent


def attention(q, k, v):
  """Causal attention on one device, with one head: q, k and v are [T, 16]. The ring must equal it."""
  scores = jnp.where(jnp.tri(len(q), dtype=bool), q @ k.T / 4, -jnp.inf)
  return jax.nn.softmax(scores) @ v


def on_the_ring(q, k, v):
  """What one device does with its own positions of q, k and v, [t, 16]."""
  count, mine = jax.lax.axis_size("context"), jax.lax.axis_index("context")
  neighbours = [(device, (device + 1) % count) for device in range(count)]
  within = jnp.arange(len(q))
  kv, read, logsumexp = jnp.stack([k, v]), jnp.zeros_like(q), jnp.full(len(q), -jnp.inf)
  for step in range(count):
    owner = (mine - step) % count  # of the keys that are here now
    sees = (mine * len(q) + within)[:, None] >= owner * len(q) + within
    scores = jnp.where(sees, q @ kv[0].T / 4, -jnp.inf)
    total = jnp.logaddexp(logsumexp, jax.nn.logsumexp(scores, axis=1))
    read = read * jnp.exp(logsumexp - total)[:, None] + jnp.exp(scores - total[:, None]) @ kv[1]
    logsumexp = total
    if step < count - 1:
      kv = jax.lax.ppermute(kv, "context", neighbours)
  return read


def local_attention(q, k, v, window=17):
  """The same where each query sees the last 17 positions, its own among them. The halo must equal it."""
  distance = jnp.arange(len(q))[:, None] - jnp.arange(len(q))
  scores = jnp.where((distance >= 0) & (distance < window), q @ k.T / 4, -jnp.inf)
  return jax.nn.softmax(scores) @ v


def with_a_halo(q, k, v, window=17):
  """What one device does with its own positions: it is sent the keys and values of the 16 before them."""
  count, mine = jax.lax.axis_size("context"), jax.lax.axis_index("context")
  kv, before = jnp.stack([k, v]), window - 1
  halo = jax.lax.ppermute(kv[:, -before:], "context", [(device, device + 1) for device in range(count - 1)])
  keys, values = jnp.concatenate([halo, kv], axis=1)
  at = jnp.arange(len(keys))
  distance = jnp.arange(len(q))[:, None] + before - at
  sees = (distance >= 0) & (distance < window) & ((at >= before) | (mine > 0))  # nothing is before the first device
  return jax.nn.softmax(jnp.where(sees, q @ keys.T / 4, -jnp.inf)) @ values


def keys_go_round():
  """1. Keys go round

  A text may be too long for one device. Then devices share its positions, along an axis that we call `context`. Most of
  a Transformer treats each position alone and needs nothing from other devices. Attention is different: a query reads
  the keys and values of all earlier positions, and most of these are elsewhere.

  In a ring, each device keeps its queries. Keys and values move on by one device at each step, so after n - 1 steps
  every query has met every key. No device ever holds all of them.

  A softmax divides by a sum over *all* keys, but a device sees a piece of them at a time. So it keeps two things for
  each query: what it has read so far, and the log-sum-exp of the scores so far. When new scores arrive, the new
  log-sum-exp says by how much to shrink what was read before. At the end the result is exact, not an approximation.
  """
  mesh = jax.make_mesh((4,), ("context",), devices=jax.devices()[:4])
  q, k, v = jax.random.normal(jax.random.key(0), (3, 256, 16))
  placed = [jax.device_put(x, NamedSharding(mesh, P("context"))) for x in (q, k, v)]
  layer = jax.shard_map(on_the_ring, mesh=mesh, in_specs=P("context"), out_specs=P("context"))
  program = jax.jit(layer).lower(*placed).compile()
  y, expected = program(*placed), attention(q, k, v)
  print(f"largest difference from one device: {np.abs(y - expected).max():.5f}")
  sent = print_sent(program, mesh)
  print(f"each device sends {sum(one.sent_in_step for one in sent):,.0f} bytes")
  return {"y": y, "expected": expected, "sent": sent}


def balanced():
  """2. Equal work for all

  A gather of all keys and values would send as many bytes as the ring. But a ring needs memory for two pieces only: the
  one in use and the one that arrives. And its messages can travel while scores are computed. The scores of a piece grow
  with the square of its length, its bytes only with the length. So with long pieces the messages need cost no time.

  One thing is wrong with the ring above. The first device has the first quarter of the text, and its queries see few
  keys. The last device's queries see nearly all. A good program skips the scores that the mask hides, but then all
  devices wait for the last one. The remedy is to cut the text into eight chunks, and to give each device one from the
  front and the matching one from the back.

  This repository does so (`models/ops/positions.py`). Its ring, with a backward pass, is in `models/ops/context.py`,
  beside two other ways to send keys. The strategies `context` and `long_context` use them.
  """
  devices, positions = 4, 256
  keys = np.arange(1, positions + 1)  # that the query at each position sees
  chunks = keys.reshape(2 * devices, -1).sum(axis=1)
  in_order, early_and_late = chunks[::2] + chunks[1::2], (chunks + chunks[::-1])[:devices]
  print("scores that each device needs, in order:", *in_order)
  print("with an early and a late chunk each:    ", *early_and_late)
  return {"in_order": in_order, "early_and_late": early_and_late}


def halo():
  """3. A window needs a halo

  Many models let most of their layers see a window only, such as the last 1,024 positions (sliding-window attention).
  With such a local layer, a query needs no key of a distant device. It needs those of its own device, and for the first
  queries the few before them, from the neighbour: a halo.

  So one message from each device is enough, and its size depends on the window, not on the text. Below, a text four
  times as long sends as many bytes.

  Here `models/ops/halo.py` does so for an early and a late chunk each. In a model with local and global layers, only
  the global ones use a ring, or gather.
  """
  mesh = jax.make_mesh((4,), ("context",), devices=jax.devices()[:4])
  layer = jax.shard_map(with_a_halo, mesh=mesh, in_specs=P("context"), out_specs=P("context"))
  bytes_sent = []
  for positions in (256, 1024):
    q, k, v = jax.random.normal(jax.random.key(0), (3, positions, 16))
    placed = [jax.device_put(x, NamedSharding(mesh, P("context"))) for x in (q, k, v)]
    program = jax.jit(layer).lower(*placed).compile()
    y, expected = program(*placed), local_attention(q, k, v)
    bytes_sent.append(sum(one.sent_in_step for one in print_sent(program, mesh)))
    print(f"{positions} positions: largest difference from one device {np.abs(y - expected).max():.5f}")
  return {"y": y, "expected": expected, "bytes": bytes_sent}


STEPS = (keys_go_round, balanced, halo)
