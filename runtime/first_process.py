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
from typing import NoReturn

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def leave_to_a_child() -> None:
  """As PID 1, returns in a child only. Its end ends this process, with its status; 128 + N if signal N ended it."""
  if os.getpid() != 1:
    return
  taken = {number for number in FORWARDED if signal.getsignal(number) != signal.SIG_IGN} | {signal.SIGCHLD}
  signal.pthread_sigmask(signal.SIG_BLOCK, taken)  # they wait for `sigwait`, which misses none
  child = os.fork()
  if child:
    _forward(child, taken)
  os.setpgid(0, 0)  # a terminal's SIGINT then comes once, from the first process
  signal.pthread_sigmask(signal.SIG_UNBLOCK, taken)


def _forward(child: int, taken: set[signal.Signals]) -> NoReturn:
  while True:
    number = signal.sigwait(taken)
    if number != signal.SIGCHLD:
      os.kill(child, number)
      continue
    ended = 1
    while ended:  # others, too, whose parents have ended
      ended, status = os.waitpid(-1, os.WNOHANG)
      if ended == child:
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
  leave_to_a_child()
  os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
