"""Data parallelism with `jax.pmap`, the legacy API that much existing code still uses.

    state   [ W ] [ W ] [ W ] [ W ]     replicated; psum of the gradients, then every device makes the same update
    batch   [ 0 ] [ 1 ] [ 2 ] [ 3 ]     a leading dimension of devices, one slice each

Since jax 0.8, pmap is a `jit` of a fully manual `shard_map`. The state is replicated (`None` in `in_axes`) over a
process's own devices, and `train_step` makes it global. Communication: as in data_parallel, but once a step even with
`accumulation`.

Use it to understand old code, and to migrate it (docs/pmap.md). Don't use it for new code: data_parallel does the same.

Source: https://docs.jax.dev/en/latest/migrate_pmap.html; Li et al. 2020 (PyTorch DDP), arXiv:2006.15704.
"""

from strategies.data_parallel import LAYOUT as LAYOUT
from strategies.execution.pmapped import PmapDDP as STRATEGY
from strategies.execution.pmapped import Pmapped as RUNNER

__all__ = ["LAYOUT", "RUNNER", "STRATEGY"]
