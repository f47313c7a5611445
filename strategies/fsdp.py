"""Fully sharded data parallelism: data parallelism, with every weight split over the same devices.

    weights      [W₀ ] [W₁ ] [W₂ ] [W₃ ]     1/n each, and so gradients and Adam's moments
    batch        [ 0 ] [ 1 ] [ 2 ] [ 3 ]     split over `data`
    in block i:  all-gather Wᵢ → compute → free it

One word more than data_parallel: `embed`, the width of the model, is sharded over `data` too. Every matrix has this
dimension, and it names weights only, so no activation is split by it. The scan over blocks gathers the weights of one
block at a time (models/transformer.py).

Communication: each weight is all-gathered in the forward pass and again in the backward pass, and its gradient is
reduce-scattered. Each device sends about 3·P·(n−1)/n numbers, 1.5 times as many as in data parallelism, and needs 1/n
of the memory. Remat sends nothing more, because the backward pass gathers in any case. Exceptions: embedding and head
are gathered once, and the scales of the norms (under 1% of the bytes) stay replicated. With `accumulation` every part
gathers and scatters again; `gather=step` does so once, and keeps whole weights and gradients until then. (XLA's CPU
backend all-reduces each gradient, at twice the bytes, and slices: it does not reduce-scatter.)

Use it when the state does not fit on one device, and each device has an example of the batch. Don't use it when the
pieces are so thin that a gather takes longer than the arithmetic that hides it: add tensor parallelism then (two_d).

Source: Rajbhandari et al. 2020 (ZeRO stage 3), arXiv:1910.02054; PyTorch's FSDP2.
"""

from strategies.data_parallel import LAYOUT as DATA_PARALLEL

LAYOUT = DATA_PARALLEL.place(embed="data")
