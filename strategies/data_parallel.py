"""Data parallelism: every device holds all weights and a slice of the batch.

    weights      [ W ] [ W ] [ W ] [ W ]     a copy on each device
    batch        [ 0 ] [ 1 ] [ 2 ] [ 3 ]     split over `data`

Communication: one all-reduce of the gradients a step. Each device sends 2·P·(n−1)/n numbers (P parameters, n devices)
and a few scalars. With `accumulation` there is still one: each device adds up the gradients of its parts first
(by_hand.py). The forward pass sends nothing. The compiler adds the all-reduce: the loss is a sum over a sharded batch,
and so is its gradient.

Use it when the state fits on one device, with 16 bytes a parameter in float32. Don't use it when it does not: fsdp does
the same arithmetic in 1/n of that memory. Of the strategies that split only batch and weights, this one sends the
least.

Source: Goyal et al. 2017, arXiv:1706.02677; PyTorch's DistributedDataParallel.
"""

from strategies.layout import Layout

LAYOUT = Layout(mesh={"data": -1}, batch="data")
