"""Fully sharded data parallelism: data parallelism, with every weight split over the same devices.

    weights      [W₀ ] [W₁ ] [W₂ ] [W₃ ]     1/n each, and so gradients and Adam's moments
    batch        [ 0 ] [ 1 ] [ 2 ] [ 3 ]     split over `data`
    in block i:  all-gather Wᵢ → compute → forget it

One word more than data_parallel: `embed`, the model width, which every matrix has, lies on `data` too. It names
weights only, so no activation is split by it; the scan over blocks gathers one block at a time (models/transformer.py).

Communication: each weight is all-gathered in the forward pass and again in the backward pass, and its gradient is
reduce-scattered: about 3·P·(n−1)/n numbers sent by each device, half as much again as data parallelism, in exchange
for 1/n of the memory. Remat adds nothing to it: the backward pass gathers in any case. Embedding and head are gathered
once, the scales of the norms (under 1% of the bytes) stay replicated, and the embedding's gradient is summed whole.
XLA's CPU backend has no reduce-scatter here: it sums every gradient whole, at twice the bytes, and slices.

Use it when the state does not fit on one device and the batch is at least as large as the number of devices. Not when
the slices get so thin that gathers take longer than the arithmetic they wait for: then add tensor parallelism (two_d).

Source: Rajbhandari et al. 2020 (ZeRO stage 3), arXiv:1910.02054; PyTorch's FSDP2.
"""

from strategies.data_parallel import LAYOUT as DATA_PARALLEL

LAYOUT = DATA_PARALLEL.place(embed="data")
