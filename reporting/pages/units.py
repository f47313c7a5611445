"""Bytes, seconds, shares and plain numbers as short text."""


def duration(seconds: float) -> str:
  """Milliseconds, or microseconds if there are few."""
  return f"{seconds * 1e3:,.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:,.1f} µs"


def amount(number: float) -> str:
  """Bytes, in the largest decimal unit that leaves a number of at least one."""
  for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
    if number >= size:
      return f"{number / size:,.2f} {unit}"
  return f"{number:,.0f} B"


def mfu(needed: float, palm: float, digits: int = 1) -> str:
  """Model FLOPs utilization, with the figure that counts as PaLM does beside it."""
  return f"{needed:.{digits}%} ({palm:.{digits}%} as PaLM counts)"


def short(number: float) -> str:
  """A number of at most four digits, with k, M, G or T, as the axes of a picture need it."""
  for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
    if abs(number) >= size:
      return f"{number / size:.4g}{unit}"
  return f"{number:.4g}"
