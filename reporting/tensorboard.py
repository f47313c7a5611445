"""Writes measurements as event files, which TensorBoard shows.

TensorBoard reads the files of a folder in the order of their names, which begin with a time, and a curve may be drawn
over times. Clocks of hosts differ, so what a later start writes gets a later name and later times, whatever its clock
says.
"""

import contextlib
import os
import re
import socket
import struct
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from reporting.appender import Appender
from training.loop import LoopState

FOLDER = "tensorboard"  # in a workdir
NAME = re.compile(r"events\.out\.tfevents\.(\d+)\..*")
HEADER, FOOTER = 12, 4  # bytes around a record's content: its length and two checksums
TAIL = 1 << 20  # bytes at the end of a file, with many events


class Board:
  """The event file of one start of a run. Raises OSError if it cannot be made.

  Args:
    start: where the run begins.
    repeated: the lines of metrics.jsonl at the start's step that stay, as pairs of their split and values.
  """

  def __init__(self, folder: Path, start: LoopState, repeated: Iterable[tuple[str, dict[str, float]]] = ()):
    from tensorboardX.proto.event_pb2 import SessionLog  # here, because it takes long and --help does not need it

    folder.mkdir(exist_ok=True)
    now, names = time.time(), filter(None, map(NAME.match, os.listdir(folder)))
    last, name = max(((int(found[1]), found[0]) for found in names), default=(0, ""))
    second = max(int(now), last + 1)
    self.behind = max(last, _last_time(folder / name) if name else 0.0) - now  # of this clock
    self.file = Appender(folder / f"events.out.tfevents.{second}.{socket.gethostname()}.{os.getpid()}")
    self._add(file_version="brain.Event:2")
    if start.step:  # makes TensorBoard drop what comes after the checkpoint, and an evaluation that is made again
      step = start.step + 1 if start.evaluated else start.step
      self._add(step=step, session_log=SessionLog(status=SessionLog.START))
      for split, values in () if start.evaluated else repeated:
        self.write(start.step, split, values)

  def write(self, step: int, split: str, values: dict[str, float]) -> None:
    from tensorboardX.proto.summary_pb2 import Summary

    scalars = [Summary.Value(tag=f"{split}/{name}", simple_value=value) for name, value in values.items()]
    self._add(step=step, summary=Summary(value=scalars))

  def close(self) -> None:
    self.file.close()

  def _add(self, **fields: Any) -> None:
    """Writes an event as a TFRecord (length, checksum, content, checksum) of a protocol buffer."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    content = Event(wall_time=time.time() + max(0.0, self.behind), **fields).SerializeToString()
    length = struct.pack("<Q", len(content))
    crcs = (struct.pack("<I", masked_crc32c(part)) for part in (length, content))
    self.file.write(length + next(crcs) + content + next(crcs))


def _last_time(file: Path) -> float:
  """The time of the last whole event of a file; 0 if there is none. Reads the end of the file."""
  from tensorboardX.record_writer import masked_crc32c

  found, records = 0.0, b""
  with contextlib.suppress(OSError), file.open("rb") as opened:
    opened.seek(max(0, os.fstat(opened.fileno()).st_size - TAIL))
    records = opened.read(TAIL)
  begins = lambda at: records[at + 8 : at + HEADER] == struct.pack("<I", masked_crc32c(records[at : at + 8]))
  lengths = (at for at in range(len(records) - HEADER) if records[at + 4 : at + 8] == bytes(4))  # an event is small
  at = next(filter(begins, lengths), len(records))
  while (end := at + HEADER + int.from_bytes(records[at : at + 8], "little") + FOOTER) <= len(records):
    time_there = records[at + HEADER : at + HEADER + 9]
    found = max(found, struct.unpack("<d", time_there[1:])[0] if time_there[:1] == b"\x09" else 0.0)  # its first field
    at = end
  return found
