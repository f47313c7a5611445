"""Context parallelism: devices share the positions of each text (strategies/context.py)."""

from configs.base import config_of

get_config = config_of("context")
