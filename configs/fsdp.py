"""Fully sharded data parallelism: batch, weights and optimizer are split. See strategies/fsdp.py.

    python train.py --config=configs/fsdp.py

300 steps on 8 devices simulated from a CPU came to a validation loss of 1.6527 (2.384 bits/byte), 27.3% below a
byte bigram model (Python 3.11, jax 0.10.2). How fast it is: benchmarks/README.md.

    python train.py --config=configs/fsdp.py:cifar10

2,800 steps, 15 minutes on 2 cores, came to 63.2% of CIFAR-10's test images. The preset cifar10_gpu is
sized for 93% and more on one GPU, and not yet measured.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(preset: str = "lm") -> ConfigDict:
  return base.get_config(preset, strategy="fsdp")
