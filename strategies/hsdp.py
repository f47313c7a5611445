"""Hybrid sharded data parallelism: FSDP inside a group of devices, plain data parallelism across the groups.

                  data 0             data 1
    replica 0   [ W₀, batch 0 ]   [ W₁, batch 1 ]     fast links within a row: a host, a slice
    replica 1   [ W₀, batch 2 ]   [ W₁, batch 3 ]     slow links between rows

Weights are split over `data` alone, so a row holds them all and its gathers never leave it; the batch is split over
both axes. It is fsdp with one more mesh axis and no code of its own: the strategy to copy when you write your own.

Communication: FSDP's gathers and scatters within a row, and across rows one all-reduce of gradients that are already
1/d as large (d = size of `data`): 2·P/d·(r−1)/r numbers sent by each device over the slow links. The gradients
of the embedding and of the norms' scales are summed whole over both axes.

Use it when FSDP over all devices would gather over slow links: several hosts without a fast network, several slices
(set `mesh.replica` to their number). Not when the state does not fit into one row: a row holds all of it.

Source: Zhao et al. 2023 (PyTorch FSDP, hybrid sharding), arXiv:2304.11277.
"""

from strategies.fsdp import LAYOUT as FSDP

LAYOUT = FSDP.on(replica=2).place(batch=("replica", "data"))
