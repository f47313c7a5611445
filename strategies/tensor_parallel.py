"""Tensor parallelism: every matrix is split, and each device computes a part of every layer.

    attention    heads     [0 1] [2 3] [4 5] [6 7]     query, key, value by column; output by row
    mlp          hidden    [0  ] [1  ] [2  ] [3  ]     gate and up by column; down by row
    vocabulary             [0  ] [1  ] [2  ] [3  ]     embedding, head, logits and cross-entropy
    residual stream        [0  ] [1  ] [2  ] [3  ]     positions: norms, residual sums and dropout
    batch: replicated

A product split by column, followed by one split by row, needs a single sum at the end: hidden units stay on their
device. Between products a device keeps its own positions of the residual stream (sequence parallelism). So the sum is a
reduce-scatter, an all-gather precedes attention and the MLP, and a device keeps 1/n of the stream for the backward
pass. Logits stay split over the vocabulary: the cross-entropy exchanges only their maximum, their log-sum-exp and the
target's logit, each one number a token.

Communication: of activations [B, T, D] a device sends (n−1)/n·B·T·D numbers in each reduce-scatter and each all-gather.
Every block has two of both in the forward pass and two of both in the backward pass, which also gathers the inputs of
attention and MLP again. Embedding and head have one of both each. The arithmetic waits for all of them. Remat "full"
repeats attention's sum. (XLA's CPU backend all-reduces where others reduce and scatter.)

If the devices do not divide the positions, or with `sequence_parallel=False`, the stream stays whole: all-reduces of
2·(n−1)/n·B·T·D numbers, four a block, and every device repeats norms and residual sums.

Use it within a host, for layers too large for one device or a batch too small to split. Don't use it across hosts, or
over more devices than the model has key-value heads. Joined with fsdp it is two_d.

Sources: Shoeybi et al. 2019 (Megatron-LM), arXiv:1909.08053; Korthikanti et al. 2022 (sequence parallelism),
arXiv:2205.05198.
"""

from strategies.layout import Layout

LAYOUT = Layout(mesh={"model": -1}, sequence="model", heads="model", mlp="model", vocab="model")
