"""Hybrid sharding: FSDP within groups of devices, data parallelism across them (strategies/hsdp.py)."""

from configs.base import config_of

get_config = config_of("hsdp")
