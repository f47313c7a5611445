"""A single device: the reference (strategies/single.py)."""

from configs.base import config_of

get_config = config_of("single")
