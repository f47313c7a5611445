"""What happens to the files at a path: a table for `tools.prepare --check`, and a note for the line on the data."""

import collections
from collections.abc import Iterable, Sequence

from data.recognition.kinds import KINDS
from data.recognition.verdicts import Verdict, megabytes
from errors import visible

SHOWN = 3  # kinds, reasons or files that a note names, at most
ROWS = 40  # of a table
USES = {"train": "to train on", "validation": "to validate on", None: "to train on, a part held out"}


def note(verdicts: Sequence[Verdict]) -> str:
  """For the line on the data: "; 2 × Parquet to train on, 1 to validate on; skipped 1: README.md (plain text, ...)"."""
  read, skipped = ([one for one in verdicts if bool(one.why) == skip] for skip in (False, True))
  if not read:
    return ""
  uses = collections.Counter((KINDS[one.file.kind].words, one.split) for one in read)
  parts = [f"{count} × {words} {USES[split]}" for (words, split), count in uses.items()]
  line = f"; {_some(parts)}" if any(one.split for one in read) or len({words for words, _ in uses}) > 1 else ""
  if skipped:
    line += f"; skipped {len(skipped)}: {_some([f'{visible(one.file.relative)} ({one.why})' for one in skipped])}"
  return line


def _some(parts: list[str]) -> str:
  return ", ".join(parts[:SHOWN]) + (f" and {len(parts) - SHOWN:,} more" if len(parts) > SHOWN else "")


def table(verdicts: Sequence[Verdict], hidden: int = 0) -> str:
  """The verdicts: what is read, in which split, and what is skipped, and why. Many equal ones become one line."""
  groups: dict[tuple[str, str, str, str], list[Verdict]] = {}
  for one in verdicts:
    key = ("skip" if one.why else "read", one.file.kind, one.file.compression, one.why or USES[one.split])
    groups.setdefault(key, []).append(one)
  rows = [("", "kind", "files", "size", "why", "such as")]
  for (verdict, kind, compression, why), some in sorted(groups.items(), key=lambda item: (item[0][0], -_size(item[1]))):
    words = f"{KINDS[kind].words}, {compression}" if compression else KINDS[kind].words
    rows.append((verdict, words, f"{len(some):,}", megabytes(_size(some)), why, visible(some[0].file.relative)))
  left = len(rows) - ROWS
  lines = _aligned(rows[:ROWS]) + ([f"{left} more lines"] if left > 0 else [])
  return "\n".join([*lines, *([f"{hidden} hidden files or folders were not looked at"] if hidden else [])])


def _size(verdicts: Iterable[Verdict]) -> int:
  return sum(one.file.size for one in verdicts)


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
