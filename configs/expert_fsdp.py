"""A mixture of experts: batch, weights and experts are sharded (strategies/expert_fsdp.py)."""

from configs.base import config_of

get_config = config_of("expert_fsdp")
