"""moe: a mixture of experts, beside a dense model with equally many weights at work on a token.

    python train.py --config=configs/expert_fsdp.py:moe
    python train.py --config=configs/fsdp.py:lm

300 steps on 8 devices simulated from 2 CPU cores take about a minute. Validation loss for the seeds 0, 1 and 2,
beside the dense model (Python 3.11, jax 0.10.2):

    moe    1.6097  1.6592  1.6104    mean 1.6264
    lm     1.6244  1.6405  1.6519    mean 1.6389

So the mixture is better in the mean, but not for each seed: 300 steps are few for eight experts.

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
