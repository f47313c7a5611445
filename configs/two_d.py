"""python train.py --config=configs/two_d.py"""

from configs import base


def get_config(preset: str = "lm"):
  return base.get_config(preset, strategy="two_d")
