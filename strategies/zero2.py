"""ZeRO stage 2: zero1, with the sums of gradients split as well.

    weights      [ W  ] [ W  ] [ W  ] [ W  ]     a copy on each device
    batch        [ 0  ] [ 1  ] [ 2  ] [ 3  ]     split over `data`
    gradients    [ g₀ ] [ g₁ ] [ g₂ ] [ g₃ ]     1/n each, as are Adam's moments
    in block i:  compute its gradient → reduce-scatter it → free it

A gradient is scattered in the backward pass, as soon as its block has been computed. So no device ever holds the whole
gradient of all blocks.

Communication: as zero1. With `accumulation` every part scatters its gradients, and only pieces are added up. Zero1
scatters once and adds up whole gradients. `gather=step` makes zero2 do the same as zero1. With a single part both do
the same in any case: there is nothing to add up, so zero1's gradients are scattered at once too.

Use it with `accumulation`, when whole gradients beside the weights do not fit. Don't use it over slow links: zero1
sends less then. If the weights do not fit, use fsdp.

Source: Rajbhandari et al. 2020 (ZeRO stage 2), arXiv:1910.02054.
"""

from strategies.zero1 import LAYOUT as ZERO1

LAYOUT = ZERO1.place(gradients="data")
