"""ZeRO stage 1: data parallelism with the optimizer's state sharded (strategies/zero1.py)."""

from configs.base import config_of

get_config = config_of("zero1")
