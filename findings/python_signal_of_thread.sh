#!/usr/bin/env bash
# Python 3.11 does not call a signal's handler while the main thread computes, if the kernel gives the signal to a thread
# that a native library has started.
#
# Expected: the main thread calls the handler between two instructions, whichever thread the kernel has chosen.
# Happens: it calls it when it next waits for the interpreter's lock (sleeps, reads, dispatches to a device). In a loop of
# Python alone that is never. The C handler runs in the native thread, which cannot run Python, so it asks for nothing.
# Python 3.13 calls it at once.
# Lost: SIGTERM before a job's time limit, while the host builds a large table or plans; or a test that waits in a loop.
# Any thread of jaxlib or a BLAS may be given the signal of `kill PID`, since none of them blocks it.
# Versions: jax 0.10.2, Python 3.11.7, Linux 6.18; 2026-11-29. Output:
#   3.11: in 2 s of computing: 0 calls; after a sleep: 1

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.11}" -m venv "$folder/venv"
cd "$folder"
venv/bin/pip install --quiet --no-compile --disable-pip-version-check jax==0.10.2 numpy==2.4.6
venv/bin/python - <<'END'
import ctypes, os, signal, sys, time

os.environ["JAX_PLATFORMS"] = "cpu"
import jax

jax.devices()  # jaxlib's threads
calls = []
signal.signal(signal.SIGTERM, lambda *_: calls.append(time.monotonic()))
process = os.getpid()
threads = [int(name) for name in os.listdir("/proc/self/task") if int(name) != process]
if os.fork() == 0:  # chooses the thread, as the kernel may for a signal to the process
  time.sleep(0.2)
  tgkill = 131 if os.uname().machine == "aarch64" else 234
  ctypes.CDLL(None).syscall(tgkill, process, threads[len(threads) // 2], signal.SIGTERM)
  os._exit(0)
end = time.monotonic() + 2
while not calls and time.monotonic() < end:
  pass
computing = len(calls)
time.sleep(0.01)
print(f"{sys.version_info[0]}.{sys.version_info[1]}: in 2 s of computing: {computing} calls; after a sleep: {len(calls)}")
sys.exit((computing, len(calls)) != (0, 1))
END
