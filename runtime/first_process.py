"""The first process of a container, PID 1, which the kernel spares: signals that it does not handle do nothing to it.

A run handles signals only in its loop, and even there lets the second SIGINT do what it does by default. So as PID 1
the program goes on in a child, and the first process forwards what it is sent. Starting the container with `--init`
makes this unnecessary.
"""

import os
import signal

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def leave_to_a_child() -> None:
  """As PID 1, returns in a child only. Its end ends this process, with its status; 128 + N if signal N ended it."""
  if os.getpid() == 1 and (code := go_on_in_a_child()) is not None:
    os._exit(code if code >= 0 else 128 - code)


def go_on_in_a_child() -> int | None:
  """Forks. Returns None in the child; here when it has ended: its status, or -N if signal N ended it.

  Until then this process forwards the signals that it is sent.
  """
  taken = {number for number in FORWARDED if signal.getsignal(number) != signal.SIG_IGN} | {signal.SIGCHLD}
  signal.pthread_sigmask(signal.SIG_BLOCK, taken)  # they wait for `sigwait`, which misses none
  child = os.fork()
  code = _forward(child, taken) if child else None
  if not child:
    os.setpgid(0, 0)  # a terminal's SIGINT then comes once, from the first process
  signal.pthread_sigmask(signal.SIG_UNBLOCK, taken)
  return code


def _forward(child: int, taken: set[signal.Signals]) -> int:
  while True:
    number = signal.sigwait(taken)
    if number != signal.SIGCHLD:
      os.kill(child, number)
      continue
    ended = 1
    while ended:  # others, too, whose parents have ended
      ended, status = os.waitpid(-1, os.WNOHANG)
      if ended == child:
        return os.waitstatus_to_exitcode(status)
