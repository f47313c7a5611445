"""Expert parallelism: devices share the experts of a mixture (strategies/expert.py)."""

from configs.base import config_of

get_config = config_of("expert")
