"""Pipeline parallelism: stages of blocks, microbatches in turn (strategies/execution/stages/)."""

from configs.base import config_of

get_config = config_of("pipeline")
