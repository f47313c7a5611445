"""python train.py --config=configs/data_parallel.py"""

from configs import base


def get_config(preset: str = "lm"):
  return base.get_config(preset, strategy="data_parallel")
