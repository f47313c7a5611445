#!/usr/bin/env bash
# Orbax writes two arrays to one place if their paths are equal once their keys are joined by dots.
#
# Expected: what was saved is restored; or saving refuses keys with dots, or two equal names.
# Happens: block -> "1.scale" and "block.1" -> scale are both the array "block.1.scale" of the checkpoint. Saving and
# restoring succeed, and both then have the values of
# the same one; which one, differs from run to run.
# Lost: weights of a tree that has names of PyTorch, such as "layers.0", beside nested ones.
# Versions: orbax-checkpoint 0.12.8, tensorstore 0.1.86, Python 3.11; 2026-11-27. Output:
#   saved: {'block': {'1.scale': array([1.])}, 'block.1': {'scale': array([2.])}}
#   restored: {'block': {'1.scale': array([1.])}, 'block.1': {'scale': array([1.])}}

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.11}" -m venv "$folder/venv"
cd "$folder"
venv/bin/pip install --quiet --no-compile --disable-pip-version-check orbax-checkpoint==0.12.8 jax==0.10.2 numpy==2.4.6
venv/bin/python - <<'END'
import os

os.environ["JAX_PLATFORMS"] = "cpu"
import numpy as np
import orbax.checkpoint as ocp

saved = {"block": {"1.scale": np.array([1.0])}, "block.1": {"scale": np.array([2.0])}}
with ocp.StandardCheckpointer() as checkpointer:
  checkpointer.save(os.path.abspath("checkpoint"), saved)
  checkpointer.wait_until_finished()
  restored = checkpointer.restore(os.path.abspath("checkpoint"), saved)
print(f"saved: {saved}\nrestored: {restored}")
assert restored["block"]["1.scale"] == restored["block.1"]["scale"]
END
