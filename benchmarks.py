"""`python -m benchmarks.NAME` was the command of a measurement. This says what the command is now."""

import sys

name = sys.orig_argv[sys.orig_argv.index("-m") + 1].partition(".")[2] if "-m" in sys.orig_argv else ""
print(f"error: benchmarks is lab/benchmarks now; run {f'python -m tools.benchmark {name}'.strip()}", file=sys.stderr)
sys.exit(2)
