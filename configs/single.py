"""Everything on one device: the reference. See strategies/single.py.

    python train.py --config=configs/single.py

On one CPU device (2 cores; Python 3.11, jax 0.10.2): 75 s for 300 steps, at 11,010 tokens/s; validation
loss 1.6527 (2.384 bits/byte), 27.3% below a byte bigram model. Simulated devices show overhead, never scaling.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(preset: str = "lm") -> ConfigDict:
  return base.get_config(preset, strategy="single")
