"""Tensor parallelism: every matrix is split inside, so that each device computes a part of every layer.

    attention    heads     [0 1] [2 3] [4 5] [6 7]     query, key, value by column; output by row
    mlp          hidden    [0  ] [1  ] [2  ] [3  ]     gate and up by column; down by row
    vocabulary             [0  ] [1  ] [2  ] [3  ]     embedding, head, logits and cross-entropy
    batch, residual stream: whole on every device

A column-split product followed by a row-split one needs a single sum at its end: the hidden part never leaves its
device. The logits never do either: the cross-entropy needs their maximum, their log-sum-exp and the target's logit,
each a number a token.

Communication: two all-reduces of the activations [B, T, D] a block in the forward pass and two in the backward pass,
one for the embedding and one for the head: 2·(n−1)/n·B·T·D numbers each, every step, in the way of the arithmetic.
Remat "full" repeats attention's. (XLA's CPU backend sums the cotangents of query, key and value apart, and those of
gate and up: five in the backward pass.)

Use it inside a host, where links are fast, for layers too large for one device or batches too small to split. Not
across hosts, and not beyond the number of key-value heads. Alone it repeats the norms and the residual stream on
every device; with fsdp it makes two_d.

Source: Shoeybi et al. 2019 (Megatron-LM), arXiv:1909.08053.
"""

from strategies.layout import Layout

LAYOUT = Layout(mesh={"model": -1}, heads="model", mlp="model", vocab="model")
