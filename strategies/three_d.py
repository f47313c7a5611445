"""3D: pipeline parallelism over `stage`, FSDP over `data`, tensor parallelism over `model`.

    stage 0        [ blocks 0 1, each split as in two_d over data × model ]
    stage 1        [ blocks 2 3, ...                                      ]

The union of the two layouts, run by the pipeline's schedules, without code of its own. A weight is split three ways: by
layer, by width, and by heads, hidden units or vocabulary.

Communication: between stages the pipeline's, of activations 1/(d·m) as large (d = size of `data`, m = size of `model`,
which splits their positions). Within a stage, tensor parallelism's in each unit. FSDP's gathers and reduce-scatters
come once a step: a stage keeps its weights whole until all microbatches have passed. Only the state between steps is
split over `data`.

Use it when a model needs more devices than two_d can use well. Don't use it when a stage's weights and gradients do not
fit on a device, split over `model` alone. Put `stage` across the slowest links, and keep `model` within a host.

Source: Narayanan et al. 2021, arXiv:2104.04473, for pipeline, tensor and data parallelism together.
"""

from strategies.pipeline import LAYOUT as PIPELINE
from strategies.two_d import LAYOUT as TWO_D

LAYOUT = (PIPELINE | TWO_D).on(stage=2, data=-1, model=2)
