#!/usr/bin/env bash
# python-zstandard reads the first frame of a file, and some of its functions stop there in silence.
#
# Expected: a .zst file of several frames, as `cat a.zst b.zst` or a compressor with threads makes it, is read whole,
# as the gzip and bz2 modules do; or all functions of the library agree.
# Happens: decompress, decompressobj and read_to_iter return the first frame without an error. copy_stream and the
# file of zstandard.open return both. (github.com/indygreg/python-zstandard, issue 59)
# Lost: most of a training text, with no sign of it but a small number of tokens.
# Versions: zstandard 0.25.0, Python 3.11; 2026-11-27. Output:
#   decompress: b'one'
#   decompressobj: b'one'
#   read_to_iter: b'one'
#   copy_stream: b'onetwo'
#   open: b'onetwo'

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.11}" -m venv "$folder/venv"
cd "$folder"
venv/bin/pip install --quiet --no-compile --disable-pip-version-check zstandard==0.25.0
venv/bin/python - <<'END'
import io
import zstandard

frames = zstandard.compress(b"one") + zstandard.compress(b"two")
with open("two.zst", "wb") as file:
  file.write(frames)
reader, copied = zstandard.ZstdDecompressor(), io.BytesIO()
reader.copy_stream(io.BytesIO(frames), copied)
with zstandard.open("two.zst") as file:
  opened = file.read()
seen = {
  "decompress": reader.decompress(frames),
  "decompressobj": reader.decompressobj().decompress(frames),
  "read_to_iter": b"".join(reader.read_to_iter(io.BytesIO(frames))),
  "copy_stream": copied.getvalue(),
  "open": opened,
}
for name, text in seen.items():
  print(f"{name}: {text}")
assert list(seen.values()) == [b"one"] * 3 + [b"onetwo"] * 2

END
