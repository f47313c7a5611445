"""The first process of a container, PID 1, which the kernel spares: signals that it does not handle do nothing to it.

A run handles signals only in its loop, and even there lets the second SIGINT do what it does by default. So as PID 1
the program goes on in a child, and the first process forwards what it is sent. Starting the container with `--init`
makes this unnecessary.

    python -m runtime.first_process train.py --config=...

does so before the program imports anything, which takes seconds. Until then a signal to train.py as PID 1 is lost.
"""

import os
import signal
import sys
from pathlib import Path

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def unforwarded(status: Path = Path("/proc/1/status")) -> str:
  """Why a scheduler's SIGTERM would not reach this process, as a sentence: it goes to PID 1; "" if it would.

  PID 1 of a container may be a shell that waits for this program, and handles no signal. One with a trap does.
  """
  if os.getpid() == 1:
    return ""
  try:
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
    handled = int(lines["SigCgt"], 16) >> (signal.SIGTERM - 1) & 1
  except (OSError, KeyError, ValueError):  # no Linux, or hidden
    return ""
  if handled:
    return ""
  return (
    f"the first process of this container, {lines['Name'].strip()}, forwards no SIGTERM, so a scheduler cannot stop a "
    "run here; begin the container's command with `exec`, or use docker run --init"
  )


def leave_to_a_child() -> None:
  """As PID 1, returns in a child only. Its end ends this process, with its status; 128 + N if signal N ended it."""
  if os.getpid() == 1:
    if (code := go_on_in_a_child()) is not None:
      os._exit(code if code >= 0 else 128 - code)
  elif os.getppid() == 1 and (why := unforwarded()):
    print(f"note: {why}", file=sys.stderr, flush=True)


def go_on_in_a_child() -> int | None:
  """Forks. Returns None in the child; here when it has ended: its status, or -N if signal N ended it.

  Until then this process forwards the signals that it is sent. Libraries may have threads, and the kernel may give any
  of them a signal that the main thread blocks. So all have handlers, which leave the signal's number in a pipe.
  """
  taken = {number for number in FORWARDED if signal.getsignal(number) != signal.SIG_IGN} | {signal.SIGCHLD}
  sent, noted = os.pipe()
  os.set_blocking(noted, False)
  before = {number: signal.signal(number, lambda *_: None) for number in taken}
  signal.set_wakeup_fd(noted, warn_on_full_buffer=False)
  signal.pthread_sigmask(signal.SIG_BLOCK, taken)  # in the child until its handlers are its own
  child = os.fork()
  if not child:
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
      signal.signal(number, handler or signal.SIG_DFL)  # None: of a library
    os.setpgid(0, 0)  # a terminal's SIGINT then comes once, from the first process
  signal.pthread_sigmask(signal.SIG_UNBLOCK, taken)
  return _forward(child, sent) if child else None


def _forward(child: int, sent: int) -> int:
  while True:
    for number in os.read(sent, 512):
      if number != signal.SIGCHLD:
        os.kill(child, number)
      while number == signal.SIGCHLD and (ended := os.waitpid(-1, os.WNOHANG))[0]:
        if ended[0] == child:  # others are those whose parents have ended
          return os.waitstatus_to_exitcode(ended[1])


if __name__ == "__main__":
  leave_to_a_child()
  os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
