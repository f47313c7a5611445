"""3D: pipeline parallelism over `stage`, FSDP over `data`, tensor parallelism over `model`.

    stage 0        [ blocks 0 1, each cut as in two_d over data × model ]
    stage 1        [ blocks 2 3, ...                                    ]

Literally the union of the two layouts, run by the pipeline's schedules: no code of its own. A weight is cut three ways,
by layer, by width, and by heads, hidden units or vocabulary.

Communication: the pipeline's, of activations 1/d as large (they are whole along `model`), and two_d's within each
stage. FSDP's gathers come again for each microbatch, forward and backward, since a stage forgets gathered weights
between them; only XLA's CPU backend takes them out of the units, where these are of one block or two.

Use it when a model needs more devices than two_d can use well, with `stage` across the slowest links and `model` within
a host. Where weights are large and microbatches small, the repeated gathers cost more than they save: keep `data` for
the batch alone then (pipeline.py) and let `stage` and `model` split the weights.

Source: Narayanan et al. 2021, arXiv:2104.04473, for pipeline, tensor and data parallelism together.
"""

from strategies.pipeline import LAYOUT as PIPELINE
from strategies.pipeline import STRATEGY as STRATEGY
from strategies.two_d import LAYOUT as TWO_D

LAYOUT = (PIPELINE | TWO_D).on(stage=2, data=-1, model=2)
