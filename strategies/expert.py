"""Expert parallelism: devices share the experts of a mixture, and each has tokens of its own.

    expert 0          expert 1
    [ W E₀ E₁ ]       [ W E₂ E₃ ]       a copy of all other weights, and some of the experts
    tokens a          tokens b          tokens go to their experts, and results come back

Sources: Lepikhin et al. 2020 (GShard), arXiv:2006.16668; Gale et al. 2022 (no token is dropped), arXiv:2211.15841.
"""

from strategies.layout import Layout

LAYOUT = Layout(mesh={"expert": -1}, batch="expert", experts="expert")
