"""3D: pipeline, FSDP and tensor parallelism (strategies/three_d.py)."""

from configs.base import config_of

get_config = config_of("three_d")
