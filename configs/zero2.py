"""ZeRO stage 2: data parallelism with the optimizer's state and gradients sharded (strategies/zero2.py)."""

from configs.base import config_of

get_config = config_of("zero2")
