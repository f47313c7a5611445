"""Data parallelism: every device holds all weights and a slice of the batch.

    weights      [ W ] [ W ] [ W ] [ W ]     a copy on each device
    batch        [ 0 ] [ 1 ] [ 2 ] [ 3 ]     split over `data`

Communication: one all-reduce of the gradients a step, 2·P·(n−1)/n numbers sent by each device (P parameters, n
devices), plus a few scalars; as often as `accumulation` says, since each part's gradient is summed as it is made.
Nothing in the forward pass.

Use it when parameters, gradients and both Adam moments fit on one device (16 bytes a parameter in float32): of the
strategies that split batch and weights alone it sends the least. Not when they don't: fsdp keeps the same arithmetic at
1/n of that memory.

Source: Goyal et al. 2017, arXiv:1706.02677; PyTorch's DistributedDataParallel. `jax.jit` needs no wrapper around the
gradient: the loss is a sum over a batch that is split, so its gradient is too.
"""

from strategies.layout import Layout

LAYOUT = Layout(mesh={"data": -1}, batch="data")
