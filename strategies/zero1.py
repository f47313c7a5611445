"""ZeRO stage 1: data parallelism, with the optimizer's state split over the same devices.

    weights      [ W  ] [ W  ] [ W  ] [ W  ]     a copy on each device
    batch        [ 0  ] [ 1  ] [ 2  ] [ 3  ]     split over `data`
    moments      [ m₀ ] [ m₁ ] [ m₂ ] [ m₃ ]     1/n each: split along `embed`
    in a step:   reduce-scatter the gradients → update piece i → all-gather the new weights

Data parallelism makes the same update n times. Here each device makes 1/n of it. A layout can place the optimizer's
state apart from the weights: `state` says where `embed` is split in Adam's moments.

Communication: gradients are reduce-scattered in the compute dtype, and new weights all-gathered in their own. In
float32 this is 2·P·(n−1)/n numbers, as many as data_parallel's all-reduce. With bfloat16 it is 1.5 times as many bytes,
because the new weights travel in float32. With `accumulation` each device adds up whole gradients, and they are
scattered once a step. Exception: CPUs all-reduce the gradients and slice, if there is no `accumulation`.

Use it when weights and gradients fit on one device, but Adam's moments, half of the state, do not. Don't use it when
the gather at the end of a step takes longer than the update that it saves: nothing hides it. If the weights do not fit
either, use fsdp.

Source: Rajbhandari et al. 2020 (ZeRO stage 1), arXiv:1910.02054; Xu et al. 2020 (weight-update sharding),
arXiv:2004.13336.
"""

from strategies.data_parallel import LAYOUT as DATA_PARALLEL

LAYOUT = DATA_PARALLEL.place(state="data")
