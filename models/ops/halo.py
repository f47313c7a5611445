"""A local layer over a text whose positions several devices share: it needs the end of what comes before, not the text.

A device has an early and a late chunk (positions.py). The queries of a chunk see its own keys, and those of the
`window` - 1 positions before it, the *halo*. The halo of device i's early chunk is the end of device i - 1's early
chunk. That of its late chunk is the end of device i + 1's late chunk; on the last device, of its own early chunk:

    device    0 | 1 | 2 | 3 | 3 | 2 | 1 | 0     positions →
               →   →   →   ·   ←   ←   ←        halos: one permute up, one down

So what is sent grows neither with the text nor with the devices. A halo that is longer than a chunk has parts of
several chunks, each from a device further away.

Query r of a chunk sees halo key j if j ≥ r. In reverse order that is a causal mask. So a kernel reads the halo as it
reads a text, and `pieces.merge` adds that to what queries read of their own chunk, which need not wait for the halo.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from models.dimensions import Sharding
from models.ops.context import PositionPeers
from models.ops.gradients import with_gradient
from models.ops.pieces import HIDDEN, PADDING, Kernel, Read, Segments, merge, of_sinks, with_sinks
from models.ops.positions import halves, join, of_device
from models.remat import KERNEL


def attend(
  kernel: Kernel,
  q: jax.Array,  # [B, t, N, H], a device's own positions
  k: jax.Array,  # [B, t, K, H]
  v: jax.Array,
  segments: jax.Array | None,  # [B, T], of all positions
  sinks: jax.Array | None,  # [N]
  sharding: Sharding,
  window: int,
  permutes: bool,
) -> jax.Array:
  """What each head of a local layer reads [B, t, N, H], with a causal mask.

  Args:
    window: how many positions a query sees, itself included.
    permutes: whether devices can send to each other at any time. If not, all devices gather the ends of all chunks.
  """
  halo = Halo(PositionPeers(sharding), window, q.shape[1] // 2, permutes)

  def forward(*given: Any) -> tuple[jax.Array, Any]:
    q, k, v, segments, sinks = given
    near = halo.receive(jnp.stack([k, v]))  # sent as one array, before the kernel that does not need it
    own, of_halo = halo.segments(segments, len(q))
    read = kernel.forward(*map(chunks, (q, k, v)), own, True, window=halo.of_chunk)
    read = Read(read.out.astype(jnp.float32), read.logsumexp)
    found = kernel.forward(halo.queries(chunks(q)), *map(backwards, near), of_halo, True)
    read = with_sinks(halo.added(read, found), sinks)
    read = Read(*(checkpoint_name(whole(x), KERNEL) for x in (read.out.astype(q.dtype), read.logsumexp)))
    return read.out, (q, k, v, segments, sinks, near, read)

  def backward(given: Any, of_out: jax.Array) -> tuple[jax.Array | None, ...]:
    q, k, v, segments, sinks, near, read = given
    own, of_halo = halo.segments(segments, len(q))
    of_own_sinks = of_sinks(sinks, read, of_out)
    read, of_out = Read(*map(chunks, read)), chunks(of_out)
    seen = Read(halo.queries(read.out), halo.queries(halo.hidden(read.logsumexp, -HIDDEN)))
    keys = map(backwards, near)
    of_q, *of_near = kernel.backward(halo.queries(chunks(q)), *keys, of_halo, True, seen, halo.queries(of_out))
    back = halo.give_back(jnp.stack([backwards(x.astype(k.dtype)) for x in of_near]))
    mine = kernel.backward(*map(chunks, (q, k, v)), own, True, read, of_out, window=halo.of_chunk)
    total = lambda x, more: whole(x).astype(jnp.float32) + more.astype(jnp.float32)
    of_q = total(mine[0], whole(halo.to_chunk(of_q)))
    of_k, of_v = (total(x, more) for x, more in zip(mine[1:], back, strict=True))
    return *(g.astype(q.dtype) for g in (of_q, of_k, of_v)), None, of_own_sinks

  return with_gradient(forward, backward, q, k, v, segments, sinks)


def chunks(x: jax.Array) -> jax.Array:
  """A device's own positions [B, t, ...] → its two chunks as examples [2·B, t/2, ...]."""
  return jnp.concatenate(halves(x))


def whole(x: jax.Array) -> jax.Array:
  """The way back from `chunks`."""
  return join(*jnp.split(x, 2))


def backwards(x: jax.Array) -> jax.Array:
  """[B, T, ...] in reverse order of positions."""
  return jnp.flip(x, axis=1)


class Halo(NamedTuple):
  """The halo of a device's two chunks.

  Attributes:
    chunk: positions of a chunk.
    window, permutes: see `attend`.
  """

  peers: PositionPeers
  window: int
  chunk: int
  permutes: bool

  @property
  def size(self) -> int:
    """Positions of a chunk's halo."""
    return self.window - 1

  @property
  def of_chunk(self) -> int:
    """The window within a chunk; 0: it hides nothing there."""
    return self.window if self.window < self.chunk else 0

  def receive(self, x: jax.Array) -> jax.Array:
    """Keys and values of own positions [2, B, t, K, H] → those of both halos [2, 2·B, window - 1, K, H].

    Zeros stand for what is before the text.
    """
    found: list[tuple[jax.Array, jax.Array]] = []
    for distance, size in self._parts():
      early, late = self._ends(x, size)
      found.insert(0, self._from_before(early, late, distance))
    return jnp.concatenate([jnp.concatenate(part, axis=2) for part in zip(*found, strict=True)], axis=1)

  def give_back(self, of: jax.Array) -> jax.Array:
    """The transpose of `receive`: the gradient of what it returns → that of own keys and values, in the same dtype."""
    (early, late), end = jnp.split(of, 2, axis=1), self.size
    total = jnp.zeros((*early.shape[:2], 2 * self.chunk, *early.shape[3:]), of.dtype)
    for distance, size in self._parts():
      part = slice(end - size, end)
      of_early, of_late = self._to_before(early[:, :, part], late[:, :, part], distance)
      ends = slice(self.chunk - size, self.chunk), slice(2 * self.chunk - size, 2 * self.chunk)
      total = total.at[:, :, ends[0]].add(of_early).at[:, :, ends[1]].add(of_late)
      end -= size
    return total

  def _parts(self) -> list[tuple[int, int]]:
    """From how many chunks before, and how many positions: (1, a chunk's), (2, a chunk's), ..., (n, the rest)."""
    full, rest = divmod(self.size, self.chunk)
    return [(i + 1, self.chunk) for i in range(full)] + ([(full + 1, rest)] if rest else [])

  def _ends(self, x: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """The last positions of the early and of the late chunk of x [2, B, t, ...]."""
    return x[:, :, self.chunk - size : self.chunk], x[:, :, 2 * self.chunk - size :]

  def _from_before(self, early: jax.Array, late: jax.Array, distance: int) -> tuple[jax.Array, jax.Array]:
    """The ends of all devices' chunks → those of the chunks so far before this device's; zeros before the text."""
    n, i = self.peers.count, self.peers.index
    if self.permutes:
      above = self._shift(late, -distance)
      return self._shift(early, distance), jnp.where(i + distance < n, above, self._mirror(early, distance))
    everyone = self.peers.all_gather(jnp.stack([early, late]))  # [n, 2, ...]

    end_of = lambda number: jnp.where(number >= 0, everyone[self._holder(number)], 0)
    return end_of(i - distance), end_of(2 * n - 1 - i - distance)

  def _to_before(self, early: jax.Array, late: jax.Array, distance: int) -> tuple[jax.Array, jax.Array]:
    """The transpose of `_from_before`."""
    n, i = self.peers.count, self.peers.index
    if self.permutes:
      down, mirrored = (jnp.where(is_there, late, 0) for is_there in (i + distance < n, i + distance >= n))
      return self._shift(early, -distance) + self._mirror(mirrored, distance), self._shift(down, distance)
    total = jnp.zeros((n, 2, *early.shape), early.dtype)
    for number, of in ((i - distance, early), (2 * n - 1 - i - distance, late)):
      total = total.at[self._holder(number)].add(jnp.where(number >= 0, of, 0))
    of_early, of_late = self.peers.reduce_scatter(total)
    return of_early, of_late

  def _holder(self, number: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The device that holds a chunk, and 0 if that is its early one, 1 if its late one. Any for a number below 0."""
    n = self.peers.count
    return jnp.maximum(jnp.where(number < n, number, 2 * n - 1 - number), 0), (number >= n).astype(jnp.int32)

  def _shift(self, x: jax.Array, by: int) -> jax.Array:
    """What the device `by` before this one has; zeros if there is none."""
    n = self.peers.count
    return self.peers.permute(x, [(i, i + by) for i in range(n) if 0 <= i + by < n])

  def _mirror(self, x: jax.Array, distance: int) -> jax.Array:
    """The early end that a late chunk reads across the middle of the text. Its own transpose."""
    n = self.peers.count
    pairs = [(i, 2 * n - 1 - distance - i) for i in range(n) if 0 <= 2 * n - 1 - distance - i < n]
    return x if pairs == [(n - 1, n - 1)] else self.peers.permute(x, pairs)

  def segments(self, x: jax.Array | None, batch: int) -> tuple[Segments, Segments]:
    """The segments of all positions [B, T] → those of chunks, twice; and of the queries and keys of halos, reversed.

    If a halo is longer than a chunk, some of it may be before the text. Segments hide that, even of a text without any.
    """
    if x is None and self.size <= self.chunk:
      return None, None
    n, i = self.peers.count, self.peers.index
    mine = None if x is None else chunks(of_device(x, i, n))
    given = jnp.ones((batch, 2 * n * self.chunk), jnp.int32) if x is None else x
    padded = jnp.pad(given, ((0, 0), (self.size, 0)), constant_values=PADDING)
    before = lambda chunk: jax.lax.dynamic_slice_in_dim(padded, chunk * self.chunk, self.size, axis=1)
    near = backwards(jnp.concatenate([before(i), before(2 * n - 1 - i)]))
    return None if mine is None else (mine, mine), (self.queries(chunks(of_device(given, i, n))), near)

  def queries(self, x: jax.Array) -> jax.Array:
    """Values of the positions of chunks [2·B, C, ...] → those that see the halo, in reverse [2·B, window - 1, ...].

    The first of a chunk. Before a chunk that is shorter than the halo there is padding.
    """
    shown = backwards(x[:, : self.size])
    return jnp.pad(shown, ((0, 0), (self.size - shown.shape[1], 0), *((0, 0),) * (x.ndim - 2)))

  def to_chunk(self, x: jax.Array) -> jax.Array:
    """The way back from `queries`; zeros for positions that do not see the halo."""
    seen = backwards(x)[:, : self.chunk]
    return jnp.pad(seen, ((0, 0), (0, self.chunk - seen.shape[1]), *((0, 0),) * (x.ndim - 2)))

  def hidden(self, logsumexp: jax.Array, value: float) -> jax.Array:
    """The log-sum-exp of chunks [2·B, ...], and `value` for a chunk with which the text begins."""
    is_first = (jnp.arange(2) == 0) & (self.peers.index == 0)
    rows = jnp.repeat(is_first, len(logsumexp) // 2)
    return jnp.where(rows[:, None, None], value, logsumexp)

  def added(self, read: Read, found: Read) -> Read:
    """What queries of chunks read of their own, and of the halo: `found`, as the kernel returns it."""
    size = min(self.size, self.chunk)
    near = Read(*(backwards(x)[:, :size] for x in found))
    near = Read(near.out.astype(jnp.float32), self.hidden(near.logsumexp, HIDDEN))
    both = merge(Read(*(x[:, :size] for x in read)), near)
    return Read(*(jnp.concatenate([new, old[:, size:]], axis=1) for new, old in zip(both, read, strict=True)))
