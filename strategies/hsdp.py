"""Hybrid sharded data parallelism: FSDP inside a group of devices, plain data parallelism across the groups.

                  data 0             data 1
    replica 0   [ W₀, batch 0 ]   [ W₁, batch 1 ]     fast links within a row: a host, a slice
    replica 1   [ W₀, batch 2 ]   [ W₁, batch 3 ]     slow links between rows

Weights are split over `data` only: each row holds all of them, and gathers stay within a row. The batch is split over
both axes. This is fsdp with one more mesh axis and no code of its own: a good strategy to copy for a new one.

Communication: within a row, FSDP's gathers and reduce-scatters. Across rows, one all-reduce of the gradients, which are
already scattered: each device sends 2·P/d·(r−1)/r numbers over the slow links (d and r are the sizes of `data` and
`replica`). With `accumulation`, every part gathers and scatters within its row, but the rows exchange once. The
gradients of the norms' scales are all-reduced over both axes, and without `accumulation` the embedding's too.

Use it when links between hosts or slices are slow, and the state fits into one host or slice. Don't use it when the
state does not fit into one row. Set `mesh.replica` to the number of hosts or slices.

Source: Zhao et al. 2023 (PyTorch FSDP, hybrid sharding), arXiv:2304.11277.
"""

from strategies.fsdp import LAYOUT as FSDP

LAYOUT = FSDP.on(replica=2).place(batch=("replica", "data"))
