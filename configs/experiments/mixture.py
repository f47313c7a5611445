"""moe: a mixture of experts, beside a dense model with equally many weights at work on a token.

    python train.py --config=configs/expert_fsdp.py:moe
    python train.py --config=configs/fsdp.py:lm

moe_tiny: the same for tests and for trying things out, in seconds.

    python train.py --config=configs/expert_fsdp.py:moe_tiny
"""

from ml_collections import ConfigDict

from configs.experiments.language_model import lm
from configs.experiments.tiny import tiny


def moe(config: ConfigDict) -> None:
  lm(config)
  config.model.update(experts=8, experts_per_token=2, expert_width=192)


def moe_tiny(config: ConfigDict) -> None:
  tiny(config)
  config.model.update(experts=8, experts_per_token=2, expert_width=64)
