"""Data parallelism by the legacy jax.pmap (strategies/pmap_ddp.py)."""

from configs.base import config_of

get_config = config_of("pmap_ddp")
