#!/usr/bin/env bash
# ml_collections: `with config.unlocked()` locks sections that were unlocked before it.
#
# Expected: after the block, each section is locked or unlocked as it was before, as the block itself does to a config
# that was unlocked as a whole.
# Happens: at its end the config is locked with all its sections, also one that its maker had left open for fields that
# only users know. Without the block, such a field can be set.
# Lost: settings. A field that could be given before is then refused, far from the line that is to blame.
# Versions: ml_collections 1.1.0, Python 3.11; 2026-11-28. Output:
#   before: open section takes a new field
#   after:  AttributeError: the open section is locked

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.11}" -m venv "$folder/venv"
cd "$folder"
venv/bin/pip install --quiet --no-compile --disable-pip-version-check ml_collections==1.1.0
venv/bin/python - <<'END'
from ml_collections import ConfigDict

config = ConfigDict({"steps": 1, "open": {}})
config.lock()
config.open.unlock()  # for fields that only the user knows
config.open.first = 1
print("before: open section takes a new field")
with config.unlocked():
  config.more = 2
try:
  config.open.second = 2
except AttributeError:
  print("after:  AttributeError: the open section is locked")
else:
  raise SystemExit("the open section is still open: this finding is history")
END
