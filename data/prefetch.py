"""Reads ahead: makes results in threads, before they are asked for, and gives them out in order."""

import collections
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class prefetch:
  """Iterates over `make(item)` for each item. Up to `ahead` results are made in advance, by `threads` threads.

  Use it as a context manager; leaving it stops the threads. If `make` raises an exception, the consumer gets it in
  place of that result.
  """

  def __init__(self, make: Callable[[Any], Any], items: Iterable[Any], ahead: int = 2, threads: int = 1):
    self._make, self._items, self._ahead = make, iter(items), max(ahead, threads)
    self._pool = ThreadPoolExecutor(threads, thread_name_prefix="prefetch")
    self._waiting: collections.deque[Future] = collections.deque()

  def __enter__(self) -> "prefetch":
    self._fill()
    return self

  def __exit__(self, *_: Any) -> None:
    self._pool.shutdown(wait=True, cancel_futures=True)

  def __iter__(self) -> Iterator[Any]:
    return self

  def __next__(self) -> Any:
    self._fill()
    if not self._waiting:
      raise StopIteration
    return self._waiting.popleft().result()

  def _fill(self) -> None:
    while len(self._waiting) <= self._ahead:
      try:
        item = next(self._items)
      except StopIteration:
        return
      self._waiting.append(self._pool.submit(self._make, item))
