"""Long texts: fully sharded data parallelism, joined with context parallelism.

    context 0                    context 1
    [ W₀, text 0 early + late ]  [ W₁, text 0 middle ]     data 0
    [ W₂, text 1 early + late ]  [ W₃, text 1 middle ]     data 1

Examples are split over `data`, and the positions of each over `context`. Weights, gradients and the optimizer's state
are split over both: for a weight, a device that has other positions is one more device of the batch. With
`mesh.replica` above 1, each group of devices holds all weights, as in hsdp.

Communication: fsdp's over all devices, and context's over `context` (context.py).

Use it for texts of 32 thousand to a million tokens, or with more devices than sequences in a batch. Don't use it when
each device has a whole sequence and memory for it: fsdp sends less. Put `context` along fast links, and use `replica`
on more than 1,024 TPUs (docs/thousand-chips.md).

Sources: those of fsdp.py and context.py.
"""

from strategies.context import LAYOUT as CONTEXT
from strategies.hsdp import LAYOUT as HSDP

LAYOUT = (HSDP | CONTEXT).on(replica=1, context=2).place(embed=("data", "context"))
