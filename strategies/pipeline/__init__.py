"""Pipeline parallelism: a device runs a few of the blocks, and microbatches move from device to device.

    stage 0   [blocks 0 1]    0   1   2   3   ·   ·   · (0) ...    time →
    stage 1   [blocks 2 3]    ·   0   1   2   ·   · (0)   3 ...    3: microbatch 3 forward, (3): backward
    stage 2   [blocks 4 5]    ·   ·   0   1   · (0)   2 (1) ...    · : the bubble, a stage with nothing to do
    stage 3   [blocks 6 7]    ·   ·   ·   0 (0)   1 (1)   2 ...

One jitted program. A `shard_map` over `stage` splits the stacked `layers` dimension. Each stage scans over the ticks
of a schedule, and neighbours exchange activations and cotangents by ppermute. The blocks are the model's own. The
compiler handles the other mesh axes as everywhere, so other layouts join by `|` (three_d.py). Embedding, final norm,
head and loss run once, on the stage at their end of the model.

In this package: schedule.py (schedules as tables), stage.py (runs a table on one stage), program.py (the training
step around it), strategy.py (the Strategy, with its checks). Read them in this order.

Communication: at each tick one activation [b, T, D] to the next stage and one cotangent to the stage before, needed or
not: 4 · (M + S − 1) · b·T·D numbers a step for M microbatches and S stages. At the end of the step, an all-reduce over
`stage` of the gradients of embedding, final norm and head. Over `data` the gradient of each microbatch is reduced as it
is made: M times P/S numbers, where data_parallel sends P once. `interleaved` also moves each stage's weights to where
they are used and their gradients back, once a step, so that the state stays in the order of the layers.

Use it for deep models and slow links: no other strategy sends so little between devices. Don't use it with few
microbatches: the bubble is S − 1 of M + S − 1 ticks. At each tick all stages wait for the slowest, and a backward unit
takes twice as long as a forward unit. So on real devices gpipe wastes the least time and 1f1b the least memory
(docs/pipeline.md).

Measured at 4 stages × 2 data, 16 microbatches, 8 simulated devices on 2 cores, against a single device at the same
global batch: gpipe 0.90 of its throughput, 1f1b 0.90, interleaved 0.93 (docs/pipeline.md).

Sources: Huang et al. 2018 (GPipe), arXiv:1811.06965; Narayanan et al. 2021 (1F1B, interleaved), arXiv:2104.04473.
"""

from strategies.data_parallel import LAYOUT as DATA_PARALLEL
from strategies.layout import Layout
from strategies.pipeline.strategy import Pipeline as STRATEGY

__all__ = ["LAYOUT", "STRATEGY"]

LAYOUT = (Layout(mesh={"stage": 4}, layers="stage") | DATA_PARALLEL).on(data=-1)
