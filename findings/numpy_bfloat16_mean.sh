#!/usr/bin/env bash
# The mean of a thousand ones in bfloat16 is 0.256 in NumPy, and that of random numbers from 0 to 1 is 0.06.
#
# Expected: NumPy adds bfloat16 as it adds float16: in pairs, and a mean in float32. Then errors are small.
# Happens: ml_dtypes adds one number after another in bfloat16. From 256 on, adding 1 changes nothing. var is as wrong;
# a dot product is right. With dtype=np.float32 sum and mean are right, too.
# Lost: statistics of weights and activations that were copied from JAX, where the same sum is right.
# Versions: numpy 2.4.6, ml_dtypes 0.6.0, Python 3.11; 2026-11-27. Output:
#   bfloat16: sum of 1,000 ones 256, mean 0.2559, dot product 1000; mean of 4,096 random numbers 0.0625
#   float16: sum of 1,000 ones 1000, mean 1.0000, dot product 1000; mean of 4,096 random numbers 0.4963

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.11}" -m venv "$folder/venv"
cd "$folder"
venv/bin/pip install --quiet --no-compile --disable-pip-version-check numpy==2.4.6 ml_dtypes==0.6.0
venv/bin/python - <<'END'
import ml_dtypes
import numpy as np

random = np.random.default_rng(0).random(4096)

def statistics(dtype):
  ones, numbers = np.ones(1000, dtype), random.astype(dtype)
  assert ones.sum(dtype=np.float32) == 1000
  found = float(ones.sum()), float(ones.mean()), float(ones @ ones), float(numbers.mean())
  print("{}: sum of 1,000 ones {:.0f}, mean {:.4f}, dot product {:.0f}; mean of 4,096 random numbers {:.4f}".format(
    np.dtype(dtype), *found))
  return found

total, mean, product, middle = statistics(ml_dtypes.bfloat16)
assert (total, product) == (256, 1000) and mean < 0.26 and middle < 0.1
total, mean, product, middle = statistics(np.float16)
assert (total, mean, product) == (1000, 1, 1000) and abs(middle - random.mean()) < 1e-3
END
