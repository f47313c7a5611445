"""Data parallelism: every device holds all weights (strategies/data_parallel.py)."""

from configs.base import config_of

get_config = config_of("data_parallel")
