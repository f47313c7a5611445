"""Attention over a text whose positions several devices share: how queries read the keys of other devices.

positions.py says which positions a device has. There are three ways, and a fourth for local layers (halo.py):

    gather      keys and values are all-gathered, and their gradients reduce-scattered
    exchange    an all-to-all turns a device's positions of all heads into all positions of its heads. Another one turns
                the results back (arXiv:2309.14509)
    ring        keys and values go round; each device scores them while it passes them on, and merges what it reads
                (arXiv:2310.01889). Their gradients go round with them in the backward pass

`gather` and `ring` compute the same pieces in the same order. `gather` needs memory for all keys of the text.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from errors import ConfigError
from models.dimensions import Sharding
from models.ops.gradients import with_gradient
from models.ops.peers import Peers
from models.ops.pieces import HIDDEN, Kernel, Read, Segments, merge, of_sinks, with_sinks
from models.ops.positions import halves, join, of_device
from models.ops.workarounds import in_order
from models.remat import KERNEL

WAYS = ("auto", "gather", "exchange", "ring")
# `auto` takes the ring if t·N/K, a device's positions times the query heads of a key head, is this or more. With a
# causal mask, a step of the ring does 2·N·H·t² operations in the forward pass, and sends 4·t·K·H bytes (16 bits a
# number). So there are t·N/(2·K) operations for each byte, 4,096 at this size. By their peaks (runtime/hardware.py), a
# TPU v5p does 4,600 while one link sends a byte, and an H100 2,200 while NVLink does.
RING = 8192


class Choice(NamedTuple):
  """One of several ways to compute the same result, and why it was chosen ("" if that needs no reason)."""

  name: str
  why: str = ""


def choose(way: str, devices: int, positions: int, heads: int, kv_heads: int, permutes: bool = True) -> Choice:
  """The way for so many devices that share the positions of a text. Each device has these heads.

  Args:
    permutes: whether devices can send to a neighbour at any time, as a ring needs.

  Raises ConfigError if the named way does not fit.
  """
  groups, splits = heads // kv_heads, _splits(devices, heads, kv_heads)
  if way == "exchange" and not splits:
    raise ConfigError(
      f"model.attention_context='exchange' gives each of mesh.context={devices} devices whole heads, but a device has "
      f"{heads} query heads and {kv_heads} key heads; use 'gather' or 'ring'"
    )
  if way != "auto":
    return Choice(way)
  own = positions // devices
  if permutes and own * groups >= RING:
    return Choice("ring", f"scores of {own} positions take longer than their keys need to arrive")
  sent = (groups + max(1, devices / kv_heads)) / devices  # what exchange sends, relative to gather
  if splits and sent <= 1:
    return Choice("exchange", f"it sends {sent:.2g} times what 'gather' sends")
  why = f"'exchange' would send {sent:.2g} times as much" if splits else "the heads do not split over these devices"
  return Choice("gather", why)


def of_local(way: str, devices: int, heads: int, kv_heads: int, *, causal: bool, permutes: bool) -> str:
  """How local layers read, if `model.attention_context` is `way`; the other arguments are those of `choose`.

  "halo": as halo.py says; "ends": devices gather the ends of all chunks, because they cannot send to one another at any
  time; "exchange": if that is asked for, or each position sees later ones, too.

  Raises ConfigError if none fits.
  """
  if causal and way != "exchange":
    return "halo" if permutes else "ends"
  if not _splits(devices, heads, kv_heads) and way != "exchange":
    raise ConfigError(
      f"model.window needs a causal objective, or heads that mesh.context={devices} devices share, but a device has "
      f"{heads} query heads and {kv_heads} key heads; use other sizes, or model.window=0"
    )
  return "exchange"


def _splits(devices: int, heads: int, kv_heads: int) -> bool:
  """Whether `exchange` can give each device whole heads."""
  return heads % devices == 0 and (kv_heads % devices == 0 or devices % kv_heads == 0)


def attend(
  way: str,
  core: Callable[..., jax.Array],
  kernel: Kernel,
  q: jax.Array,  # [B, t, N, H], a device's own positions
  k: jax.Array,  # [B, t, K, H]
  v: jax.Array,
  segments: jax.Array | None,  # [B, T], of all positions
  sinks: jax.Array | None,  # [N]
  sharding: Sharding,
  causal: bool,
) -> jax.Array:
  """What each head reads [B, t, N, H]; called on a device's own heads.

  Args:
    core: (q, k, v, segments, sinks), all of whole texts → what each head reads.
    kernel: does the same for pieces of texts.
  """
  peers = PositionPeers(sharding)
  if way == "exchange":
    return _exchange(peers, core, q, k, v, segments, sinks)
  forward = functools.partial(_forward, way, peers, kernel, causal)
  return with_gradient(forward, functools.partial(_backward, way, peers, kernel, causal), q, k, v, segments, sinks)


class PositionPeers(Peers):
  """The devices that share the positions of a text."""

  DIM = "positions"

  def owner(self, i: jax.Array | int) -> jax.Array:
    """The device whose keys this one reads in step i of a ring; in step 0 they are its own."""
    return (self.index - i) % self.count

  def pass_on(self, x: jax.Array) -> jax.Array:
    """Sends x to the next device of the ring. Returns what the device before it has sent, in the same shape."""
    return self.permute(x, [(i, (i + 1) % self.count) for i in range(self.count)])

  def permute(self, x: jax.Array, pairs: list[tuple[int, int]]) -> jax.Array:
    """Sends x along pairs of (from, to). Returns what this device is sent, or zeros."""
    return self._send(lambda x, axes: jax.lax.ppermute(x, axes, pairs), x)

  def all_gather(self, x: jax.Array) -> jax.Array:
    """[...] → [devices, ...]."""
    return self._send(jax.lax.all_gather, x)

  def reduce_scatter(self, x: jax.Array) -> jax.Array:
    """[devices, ..., K, H], what each device has for every other → [..., K, H], the sum of what all have for this one.

    The array is sent as a matrix, which the TPU compiler scatters.
    """
    return self._scatter_rows(x.reshape(-1, x.shape[-2] * x.shape[-1])).reshape(x.shape[1:])

  def to_heads(self, x: jax.Array) -> jax.Array:
    """A device's positions of all heads [B, t, devices, M, H] → all positions, in order, of its heads [B, T, M, H]."""
    move = functools.partial(jax.lax.all_to_all, split_axis=2, concat_axis=1, tiled=True)
    x = self._send(move, x)[:, :, 0]
    chunks = x.reshape(len(x), self.count, 2, -1, *x.shape[2:])
    return join(chunks[:, :, 0], chunks[:, ::-1, 1]).reshape(x.shape)

  def to_positions(self, x: jax.Array) -> jax.Array:
    """The way back from `to_heads`: [B, T, M, H] → [B, t, devices · M, H]."""
    early, late = halves(x.reshape(len(x), 2 * self.count, -1, *x.shape[2:]))
    chunks = jnp.stack([early, late[:, ::-1]], axis=2).reshape(x.shape)
    return self._send(functools.partial(jax.lax.all_to_all, split_axis=1, concat_axis=2, tiled=True), chunks)


def _exchange(
  peers: PositionPeers,
  core: Callable[..., jax.Array],
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  segments: jax.Array | None,
  sinks: jax.Array | None,
) -> jax.Array:
  """`attend` by `exchange`: `core` reads all positions of some heads [B, T, ...]."""
  n = peers.count
  repeat = max(1, n // k.shape[2])  # devices that share a key head have a copy of it each
  by_device = lambda x: x.reshape(*x.shape[:2], n, -1, x.shape[-1])
  parts = [by_device(x) for x in (q, jnp.repeat(k, repeat, axis=2), jnp.repeat(v, repeat, axis=2))]
  queries, keys = parts[0].shape[3], parts[1].shape[3]
  moved = peers.to_heads(jnp.concatenate(parts, axis=3))  # sent as one array
  q, k, v = jnp.split(moved, (queries, queries + keys), axis=2)
  of_own_heads = None if sinks is None else sinks.reshape(n, -1)[peers.index]
  return peers.to_positions(core(q, k, v, segments, of_own_heads))


def _forward(
  way: str,
  peers: PositionPeers,
  kernel: Kernel,
  causal: bool,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  segments: jax.Array | None,
  sinks: jax.Array | None,
) -> tuple[jax.Array, Any]:
  """`attend` by `gather` or `ring`. Returns what a device's queries read [B, t, N, H], and what `_backward` gets."""

  def step(i: jax.Array | int, read: Read, kv: jax.Array) -> Read:
    pairs = Pairs(causal, peers.owner(i) < peers.index)
    found = kernel.forward(pairs.queries(q), *map(pairs.keys, kv), pairs.segments(segments, peers, i), False)
    return functools.reduce(merge, pairs.spread(found), read)

  kv = jnp.stack([k, v])  # sent as one array
  others = _start_sending(way, peers, kv)
  own = _segments_of_two_devices(segments, peers.index, peers.index, peers.count)
  out, logsumexp = kernel.forward(q, k, v, own, causal)
  read = with_sinks(others(step, Read(out.astype(jnp.float32), logsumexp)), sinks)
  read = Read(*(checkpoint_name(x, KERNEL) for x in (read.out.astype(q.dtype), read.logsumexp)))
  return read.out, (q, k, v, segments, sinks, read)


def _backward(
  way: str, peers: PositionPeers, kernel: Kernel, causal: bool, given: Any, of_out: jax.Array
) -> tuple[jax.Array | None, ...]:
  """The gradients of q, k and v, in their shapes and dtypes, None for the segments, and the gradient of the sinks.

  Args:
    given: the second result of `_forward`.
    of_out: [B, t, N, H], the gradient of the loss with respect to the first result.
  """
  q, k, v, segments, sinks, read = given

  def step(i: jax.Array | int, gradients: tuple[jax.Array, jax.Array], kv: jax.Array) -> tuple[jax.Array, jax.Array]:
    of_q, of_kv = gradients
    pairs = Pairs(causal, peers.owner(i) < peers.index)
    own = pairs.queries(q), *map(pairs.keys, kv), pairs.segments(segments, peers, i), False
    new_q, *new_kv = kernel.backward(*own, Read(*map(pairs.queries, read)), pairs.queries(of_out))
    return of_q + pairs.to_queries(new_q), collect(i, of_kv, jnp.stack([pairs.to_keys(x) for x in new_kv]))

  def collect(i: jax.Array | int, total: jax.Array, new: jax.Array) -> jax.Array:
    if way == "ring":
      return peers.pass_on(total) + new
    return jax.lax.dynamic_update_index_in_dim(total, new.astype(total.dtype), peers.owner(i), axis=0)

  kv = jnp.stack([k, v])
  others = _start_sending(way, peers, kv)
  own = _segments_of_two_devices(segments, peers.index, peers.index, peers.count)
  of_q, *new = kernel.backward(q, k, v, own, causal, read, of_out)
  of_kv = jnp.stack(new).astype(jnp.float32)
  if way == "gather":
    of_kv = collect(0, jnp.zeros((peers.count, *kv.shape), kv.dtype), of_kv)
  of_q, of_kv = others(step, (of_q.astype(jnp.float32), of_kv))
  of_kv = of_kv.astype(kv.dtype)  # the sum is complete, so it goes home in fewer bytes
  of_k, of_v = peers.pass_on(of_kv) if way == "ring" else peers.reduce_scatter(of_kv)
  return *(g.astype(q.dtype) for g in (of_q, of_k, of_v)), None, of_sinks(sinks, read, of_out)


def _start_sending(way: str, peers: PositionPeers, kv: jax.Array) -> Callable[[Callable, Any], Any]:
  """Starts sending keys and values [2, B, t, K, H]. Returns a function (step, carry) → carry.

  The function runs a step for each other device. A step gets its number, the carry, and the keys and values of the
  device `owner(number)`.
  """
  if way == "gather":
    everyone = peers.all_gather(kv)

    def gathered(step: Callable, carry: Any) -> Any:
      one = lambda carry, i: (step(i, carry, everyone[peers.owner(i)]), None)
      return jax.lax.scan(one, carry, jnp.arange(1, peers.count))[0]

    return gathered
  first = peers.pass_on(kv)

  def passed_on(step: Callable, carry: Any) -> Any:
    def one(state: Any, i: jax.Array) -> tuple[Any, None]:
      carry, kv = jax.lax.optimization_barrier(state)  # so that the next keys travel during a step, not before it
      following = peers.pass_on(kv)
      carry = in_order(following, carry)  # a step may send, too
      return (step(i, carry, kv), following), None

    state, _ = jax.lax.scan(one, (carry, first), jnp.arange(1, peers.count - 1))
    return step(peers.count - 1, *jax.lax.optimization_barrier(state))

  return passed_on


class Pairs(NamedTuple):
  """Which own queries and keys of another device see each other: without a causal mask all, else two pairs of chunks.

  Late queries see early keys. In addition, early queries see early keys if the other device comes before this one;
  otherwise late queries see late keys. The two pairs are stacked as examples, because all four chunks are equally long.
  """

  causal: bool
  before: jax.Array  # whether the other device comes before this one

  def queries(self, x: jax.Array) -> jax.Array:
    """Values of a device's own positions [B, t, ...] → those of the queries in the pairs [2·B, t/2, ...]."""
    early, late = halves(x)
    return jnp.concatenate([late, jnp.where(self.before, early, late)]) if self.causal else x

  def keys(self, x: jax.Array) -> jax.Array:
    """Keys or values of the other device's positions [B, t, ...] → those in the pairs [2·B, t/2, ...]."""
    early, late = halves(x)
    return jnp.concatenate([early, jnp.where(self.before, early, late)]) if self.causal else x

  def segments(self, x: jax.Array | None, peers: PositionPeers, i: jax.Array | int) -> Segments:
    """The segments of all positions [B, T] → those of the queries and of the keys in step i."""
    found = _segments_of_two_devices(x, peers.index, peers.owner(i), peers.count)
    return found and (self.queries(found[0]), self.keys(found[1]))

  def spread(self, found: Read) -> list[Read]:
    """What the queries read [2·B, t/2, ...] → two results for the device's own positions, to merge."""
    if not self.causal:
      return [found]
    (out, out_2), (logsumexp, logsumexp_2) = (jnp.split(x, 2) for x in found)
    hide = lambda hidden: jnp.where(hidden, HIDDEN, logsumexp_2)
    return [
      Read(join(out, out), join(jnp.full_like(logsumexp, HIDDEN), logsumexp)),
      Read(join(out_2, out_2), join(hide(~self.before), hide(self.before))),
    ]

  def to_queries(self, x: jax.Array) -> jax.Array:
    """Adds up gradients of the queries [2·B, t/2, ...] → gradients of own positions [B, t, ...], in float32."""
    if not self.causal:
      return x.astype(jnp.float32)
    late, other = jnp.split(x.astype(jnp.float32), 2)
    return join(jnp.where(self.before, other, 0), late + jnp.where(self.before, 0, other))

  def to_keys(self, x: jax.Array) -> jax.Array:
    """Adds up gradients of the keys → gradients of the other device's positions, in the same shapes and dtype."""
    if not self.causal:
      return x.astype(jnp.float32)
    early, other = jnp.split(x.astype(jnp.float32), 2)
    return join(early + jnp.where(self.before, other, 0), jnp.where(self.before, 0, other))


def _segments_of_two_devices(x: jax.Array | None, mine: jax.Array, other: jax.Array, count: int) -> Segments:
  """The segments of all positions [B, T] → those of two devices' own positions, each [B, t]."""
  return None if x is None else (of_device(x, mine, count), of_device(x, other, count))
