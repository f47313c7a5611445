"""Tensor parallelism: every matrix is split, and each device computes a part of every layer.

    attention    heads     [0 1] [2 3] [4 5] [6 7]     query, key, value by column; output by row
    mlp          hidden    [0  ] [1  ] [2  ] [3  ]     gate and up by column; down by row
    vocabulary             [0  ] [1  ] [2  ] [3  ]     embedding, head, logits and cross-entropy
    batch, residual stream: replicated

A product split by column, followed by one split by row, needs a single all-reduce at the end: hidden units stay on
their device. Logits stay there too: the cross-entropy exchanges only their maximum, their log-sum-exp and the target's
logit, each one number a token.

Communication: all-reduces of the activations [B, T, D], of which each device sends 2·(n−1)/n·B·T·D numbers. Every block
has two in the forward pass and two in the backward pass; the embedding and the head have one each. The arithmetic waits
for all of them. Remat "full" repeats attention's. (XLA's CPU backend reduces the cotangents of query, key and value
separately, and those of gate and up: five in the backward pass.)

Use it within a host, where links are fast, for layers too large for one device or a batch too small to split. Don't use
it across hosts, or over more devices than the model has key-value heads. Used alone, it repeats the norms and the
residual stream on every device; joined with fsdp it is two_d.

Source: Shoeybi et al. 2019 (Megatron-LM), arXiv:1909.08053.
"""

from strategies.layout import Layout

LAYOUT = Layout(mesh={"model": -1}, heads="model", mlp="model", vocab="model")
