"""2D: FSDP and tensor parallelism (strategies/two_d.py)."""

from configs.base import config_of

get_config = config_of("two_d")
