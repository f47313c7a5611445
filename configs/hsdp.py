"""Hybrid sharded data parallelism: FSDP within a group of devices, data parallelism across. See strategies/hsdp.py.

python train.py --config=configs/hsdp.py
"""

from ml_collections import ConfigDict

from configs import base


def get_config(preset: str = "lm") -> ConfigDict:
  return base.get_config(preset, strategy="hsdp")
