"""Tensor parallelism: heads, MLP and vocabulary are sharded (strategies/tensor_parallel.py)."""

from configs.base import config_of

get_config = config_of("tensor_parallel")
