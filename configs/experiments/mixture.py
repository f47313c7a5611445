"""moe: a mixture of experts, beside a dense model with equally many weights at work on a token.

    python train.py --config=configs/expert_fsdp.py:moe
    python train.py --config=configs/fsdp.py:lm

300 steps on 8 devices simulated from 2 CPU cores take 1.5 to 2 minutes. Validation losses of the seeds 0, 1 and 2 (Python
3.11, jax 0.10.2): 1.6097, 1.6592 and 1.6104. The dense model has 1.6244 and 1.6405 for the seeds 0 and 1: in so few steps
the mixture is not always better.

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
