"""A mixture of experts with all weights in pieces: fully sharded data parallelism, joined with expert parallelism.

    expert 0                          expert 1
    [ W₀, E₀ E₁ (0) ]   tokens a      [ W₁, E₂ E₃ (0) ]   tokens b      data 0
    [ W₂, E₀ E₁ (1) ]   tokens c      [ W₃, E₂ E₃ (1) ]   tokens d      data 1

Sources: those of fsdp.py and expert.py.
"""

from strategies.expert import LAYOUT as EXPERT
from strategies.fsdp import LAYOUT as FSDP

LAYOUT = (FSDP | EXPERT).on(expert=2).place(embed=("data", "expert"))
