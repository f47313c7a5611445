"""Pipeline parallelism: each stage runs a few of the blocks, and microbatches move from stage to stage.

    stage 0   [blocks 0 1]    0    1    2    3    4    5    6(0) 7(1)  (2) ...   time →
    stage 1   [blocks 2 3]    ·    0    1    2    3    4(0) 5(1) 6(2) 7(3) ...   3: microbatch 3 forward, (3): backward
    stage 2   [blocks 4 5]    ·    ·    0    1    2(0) 3(1) 4(2) 5(3) 6(4) ...   · : the bubble, an idle stage
    stage 3   [blocks 6 7]    ·    ·    ·    0(0) 1(1) 2(2) 3(3) 4(4) 5(5) ...

One jitted program runs all stages. A `shard_map` over `stage` and `data` (execution/stages/) splits the stacked
`layers` dimension and the batch. Each stage scans over the ticks of a schedule. In a tick it runs at most one forward
unit, then at most one backward unit; `zero_bubble` adds weight units. Neighbours exchange activations and cotangents by
ppermute: a cotangent travels while the next forward unit runs, an activation while the backward unit does. The blocks
are the model's own. The compiler handles the other mesh axes as everywhere, so other layouts join by `|` (three_d.py).
The embedding runs on the first stage only, as do the dense blocks of a mixture that has some; the final norm, the head
and the loss on the last.

Communication: at each tick a stage sends one activation [b, T, D] to the next stage, from the first forward unit to the
last, and one cotangent to the previous one, from the first backward unit to the last: 2 · (M + S − 1) · b·T·D numbers a
step for M microbatches and S stages; 2 · (S − 1) · b·T·D of them in the bubble. At the end of the step, the gradients
of embedding, final norm and head are all-reduced over `stage` and `data`, and those of the blocks over `data`: once,
however many microbatches there are. `interleaved` also moves weights to the stages that use them and gradients back,
once a step, so that the state keeps the layers in order.

Use it for deep models over slow links: no other strategy sends so little between devices. Don't use it with few
microbatches: stages idle for (S − 1) / (M + S − 1) of the time.

The schedules: gpipe and 1f1b idle equally long, and 1f1b holds the
activations of at most 2·S − 1 microbatches. `interleaved` idles less and sends more. With enough microbatches
`zero_bubble` idles a third as long as 1f1b, or half as long with remat "full"; it needs more memory (docs/pipeline.md).

Measured at 4 stages × 2 data, 16 microbatches, 8 simulated devices on 2 cores, against a single device at the same
global batch: gpipe 1.00 of its throughput, 1f1b 1.04, interleaved 1.07, zero_bubble 1.02 (docs/pipeline.md).

Sources: Huang et al. 2018 (GPipe), arXiv:1811.06965; Narayanan et al. 2021 (1F1B, interleaved), arXiv:2104.04473; Qi
et al. 2024 (zero bubble), arXiv:2401.10241.
"""

from strategies.data_parallel import LAYOUT as DATA_PARALLEL
from strategies.layout import Layout

LAYOUT = (Layout(mesh={"stage": 4}, layers="stage") | DATA_PARALLEL).on(data=-1)
