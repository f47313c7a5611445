"""python train.py --config=configs/fsdp.py"""

from configs import base


def get_config(preset: str = "lm"):
  return base.get_config(preset, strategy="fsdp")
