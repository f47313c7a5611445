"""Fully sharded data parallelism: batch, weights and optimizer are sharded (strategies/fsdp.py)."""

from configs.base import config_of

get_config = config_of("fsdp")
