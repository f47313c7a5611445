"""3D: pipeline, FSDP and tensor parallelism. See strategies/three_d.py.

    python train.py --config=configs/three_d.py

300 steps on 8 devices simulated from a CPU came to a validation loss of 1.6527 (2.384 bits/byte), 27.3% below a
byte bigram model (Python 3.11, jax 0.10.2). How fast it is: benchmarks/README.md.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(preset: str = "lm") -> ConfigDict:
  return base.get_config(preset, strategy="three_d")
