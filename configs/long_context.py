"""Long texts: batch, weights and positions are sharded (strategies/long_context.py)."""

from configs.base import config_of

get_config = config_of("long_context")
