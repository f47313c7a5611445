"""Expert parallelism: devices share the experts of a mixture, and each has tokens of its own.

    weights      [ W E₀ E₁ ] [ W E₂ E₃ ] [ W E₄ E₅ ] [ W E₆ E₇ ]     a copy of all others; some of the experts
    batch        [    0    ] [    1    ] [    2    ] [    3    ]     split over `expert`

In each block, tokens go to the devices of their experts, and results come back. There are three ways
(`model.expert_transport`, models/ops/experts.py), all without dropping a token:

    gather      all-gather of tokens; each device adds up what its experts make of them; reduce-scatter of the sums
    exchange    all-to-all of a row for each token and each of its experts, in rounds of equal size, and back
    ragged      the same with a ragged all-to-all, for TPUs and GPUs: only rows that there are

Communication: for a block, a token of D numbers and k experts, and n devices with N tokens each, a device sends
    gather      5·(n−1)·N·D numbers
    exchange    5·1.25·(n−1)/n·k·N·D, in one round; with unequal loads in more, as the fullest pair of devices needs
    ragged      5·(n−1)/n·k·N·D, if loads are equal
and the arithmetic waits for them. Gradients of experts are not sent; all others are all-reduced once a step, as in data
parallelism. "auto" takes what sends less of the first two.

Use it for mixtures whose experts do not fit on one device. Don't use it for dense models: it is data parallelism there.
Weights outside the experts are whole on each device: expert_fsdp.py splits them, too. It joins any strategy by `|`.

Sources: Lepikhin et al. 2020 (GShard), arXiv:2006.16668; Gale et al. 2022 (no token is dropped), arXiv:2211.15841.
"""

from strategies.layout import Layout

LAYOUT = Layout(mesh={"expert": -1}, batch="expert", experts="expert")
