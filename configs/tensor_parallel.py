"""python train.py --config=configs/tensor_parallel.py"""

from configs import base


def get_config(preset: str = "lm"):
  return base.get_config(preset, strategy="tensor_parallel")
