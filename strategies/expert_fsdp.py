"""Mixtures in pieces: fully sharded data parallelism, joined with expert parallelism.

    expert 0                      expert 1
    [ W₀ E₀ E₁ (first half) ]     [ W₁ E₂ E₃ (first half) ]      data 0
    [ W₂ E₀ E₁ (second half) ]    [ W₃ E₂ E₃ (second half) ]     data 1

The batch is split over `data` and `expert`. Experts are split over `expert`, and each expert over `data`. All other
weights are split over both: for these, a device with other experts is one more device of the batch.

Communication: fsdp's, for experts over `data` and for other weights over all devices; and expert's over `expert`.

Use it for large mixtures: no weight is whole anywhere. Don't use it for dense models, where it is fsdp. Put `expert`
along fast links, and make it large enough that the experts of one block fit on a device.

Sources: those of fsdp.py and expert.py.
"""

from strategies.expert import LAYOUT as EXPERT
from strategies.fsdp import LAYOUT as FSDP

LAYOUT = (FSDP | EXPERT).on(expert=2).place(embed=("data", "expert"))
