"""Context parallelism: devices share the positions of each text, also in attention.

    text         0 | 1 | 2 | 3 | 3 | 2 | 1 | 0     positions: each device has an early and a late chunk
    weights      [ W ] [ W ] [ W ] [ W ]           a copy on each device

Everything but attention works on positions one by one, so a device does it for its own. In attention, queries also read
the keys and values of other devices, in one of three ways (`model.attention_context`, models/ops/context.py):

    gather      all-gather of keys and values in the forward and in the backward pass; reduce-scatter of gradients
    exchange    all-to-all of queries, keys and values: all positions, some of the heads; another one of what was read
    ring        keys and values go round, while each device scores those that it has; so do their gradients

With a causal mask a late position reads more than an early one. The two chunks make all devices compute equally much.

Communication: for a block of N query and K key heads of size H, each of n devices sends, for B texts of T positions,
    gather      6·(n−1)/n·B·T·K·H numbers; the arithmetic waits for them
    exchange    (4·N+4·max(K, n))·(n−1)/n²·B·T·H, or half as much again unless remat is "minimal"; it waits, too
    ring        (4·n−2)/n·B·T·K·H, and 2·(n−1)/n·B·T·K·H of gradients in float32, beside the scores
A local layer with a window of W positions (models/ops/halo.py) sends 8·(W−1)·B·K·H, or half as much again if remat
repeats it, however long the text is. Gradients are all-reduced once a step, as in data parallelism. "auto" takes the
ring where scores take longer than keys need to arrive, else what sends less.

Use it for texts that do not fit on one device, or with more devices than sequences in a batch. Don't use it for short
texts: kernels want some hundred positions on a device. Weights are whole on each device: join it with fsdp
(long_context.py), or with any other strategy by `|`. In the stages of a pipeline there is no ring.

Sources: Liu et al. 2023 (ring), arXiv:2310.01889; Jacobs et al. 2023 (exchange: Ulysses), arXiv:2309.14509; Llama Team
2024 (gather; two chunks a device), arXiv:2407.21783.
"""

from strategies.layout import Layout

LAYOUT = Layout(mesh={"context": -1}, positions="context")
