"""Draws as plain text how an array is split over devices: which device holds which piece.

    picture(NamedSharding(mesh, P("data", "model")), (8, 16))

                   0:8                    8:16
        ┌───────────────────────┬───────────────────────┐
        │                       │                       │
    0:4 │           0           │           1           │
        │                       │                       │
        ├───────────────────────┼───────────────────────┤
        │                       │                       │
    4:8 │           2           │           3           │
        │                       │                       │
        └───────────────────────┴───────────────────────┘
    4 pieces of (4, 8), each on 1 device

Each cell is a piece of the array. The numbers in it are the devices that hold the piece, and the margins show the
indices that it covers. `jax.debug.visualize_array_sharding` draws the same in colour. The tour and explain use this.
"""

from collections.abc import Iterable, Sequence

from jax.sharding import Sharding

WIDTH = 100  # the most columns of text
_INSIDE = (7, 47)  # rows and columns of text in the frame; 1, 2 or 4 rows and 1, 2, 4 or 8 columns of cells fill them
_CELLS = 8  # the most cells in a row or column; beyond that the middle is left out

Piece = tuple[int, int]  # start and end of a piece in one dimension


def picture(sharding: Sharding, shape: Sequence[int]) -> str:
  """Draws the pieces of an array of this shape and the devices that hold each, at most 100 columns wide.

  If the array has more than two dimensions, the picture shows two of them: the first two that are split, or else the
  largest. It shows the first piece of the other dimensions and says so. The devices need not exist on this machine.

  Raises ValueError if the sharding does not divide the shape, or has no devices (as on an AbstractMesh).
  """
  shape = tuple(shape)
  held = {
    device.id: tuple((s.start or 0, size if s.stop is None else s.stop) for s, size in zip(index, shape, strict=True))
    for device, index in sharding.devices_indices_map(shape).items()
  }
  pieces = [sorted({index[d] for index in held.values()}) for d in range(len(shape))]
  drawn = _drawn(shape, pieces)
  holders: dict[tuple[Piece, ...], list[int]] = {}
  for device, index in sorted(held.items()):
    if all(index[d] == pieces[d][0] for d in range(len(shape)) if d not in drawn):
      holders.setdefault(tuple(index[d] for d in drawn), []).append(device)
  # An array of one dimension is drawn as one row, a scalar as one cell.
  rows: list[Piece | None] = list(pieces[drawn[0]]) if len(drawn) == 2 else [None]
  columns: list[Piece | None] = list(pieces[drawn[-1]]) if drawn else [None]
  cells = {
    (row, column): _numbers(holders[tuple(piece for piece in (row, column) if piece is not None)])
    for row in rows
    for column in columns
  }
  different = set(held.values())
  one = tuple(stop - start for start, stop in next(iter(held.values())))
  copies = len(held) // len(different)
  caption = f"{_count(len(different), 'piece')} of {one}, {'each ' * (len(different) > 1)}on {_count(copies, 'device')}"
  return "\n".join([*_grid(rows, columns, cells), caption, *_left_out(shape, pieces, drawn)])


def _drawn(shape: tuple[int, ...], pieces: list[list[Piece]]) -> list[int]:
  """The dimensions to draw: at most two, in order."""
  split = [d for d in range(len(shape)) if len(pieces[d]) > 1]
  others = sorted((d for d in range(len(shape)) if d not in split), key=lambda d: -shape[d])
  return sorted([*split, *others][:2])


def _left_out(shape: tuple[int, ...], pieces: list[list[Piece]], drawn: list[int]) -> list[str]:
  """Lines that say which part of an array of more than two dimensions is drawn."""
  if len(shape) <= 2:
    return []
  lines = [f"rows: dimension {drawn[0]}, columns: dimension {drawn[1]}, of {shape}"]
  for d, parts in enumerate(pieces):
    if d not in drawn and len(parts) > 1:
      lines.append(f"dimension {d} is split into {len(parts)} pieces too; this is the first, {_range(parts[0])}")
  return lines


def _grid(rows: list[Piece | None], columns: list[Piece | None], cells: dict) -> list[str]:
  """The lines of the picture. If there are too many rows or columns, the middle ones are left out."""
  shown_rows, margin = _ends(rows, _CELLS), max(len(_range(row)) for row in rows) + (rows != [None])
  for limit in range(_CELLS, 1, -1):
    shown = _ends(columns, limit)
    texts = [_range(column) for column in shown] + [cells.get((row, column), "") for row in rows for column in shown]
    wide = max(max(map(len, texts)) + 2, (_INSIDE[1] - len(shown) + 1) // len(shown))
    widths = [3 if column == "…" else wide for column in shown]
    if margin + 1 + sum(widths) + len(widths) <= WIDTH:
      break
  height = max(1, (_INSIDE[0] - len(shown_rows) + 1) // len(shown_rows)) if rows != [None] else 1

  def line(frame: str, inner: Iterable[str], label: str = "", fill: str = " ") -> str:
    left, between, right = frame
    padded = (f"{text:{fill}^{width}}" for text, width in zip(inner, widths, strict=True))
    return (f"{label:>{margin - 1}} " if margin else "") + left + between.join(padded) + right

  rule = lambda frame: line(frame, [""] * len(shown), fill="─")
  lines = [] if columns == [None] else [line("   ", map(_range, shown)).rstrip()]
  lines.append(rule("┌┬┐"))
  for i, row in enumerate(shown_rows):
    texts = ["…" if "…" in (row, column) else cells[row, column] for column in shown]
    for j in range(1 if row == "…" else height):
      middle = j == (height - 1) // 2
      lines.append(line("│││", texts if middle else [""] * len(shown), _range(row) if middle else ""))
    lines.append(rule("└┴┘" if i == len(shown_rows) - 1 else "├┼┤"))
  return lines


def _ends(pieces: list, limit: int) -> list:
  """All pieces, or the first and last few with "…" between, `limit` in total."""
  if len(pieces) <= limit:
    return pieces
  last = (limit - 1) // 2
  return [*pieces[: limit - 1 - last], "…", *pieces[len(pieces) - last :]]


def _range(piece: Piece | str | None) -> str:
  return "" if piece is None else piece if isinstance(piece, str) else f"{piece[0]}:{piece[1]}"


def _numbers(devices: list[int]) -> str:
  few = devices if len(devices) <= _CELLS else [*devices[:3], "…", devices[-1]]
  return " ".join(map(str, few))


def _count(n: int, thing: str) -> str:
  return f"{n:,} {thing}{'s' * (n != 1)}"
