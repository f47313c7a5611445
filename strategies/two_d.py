"""2D: FSDP over `data`, tensor parallelism over `model`.

                     model 0        model 1
    data 0        [ W₀₀, batch 0 ] [ W₀₁, batch 0 ]
    data 1        [ W₁₀, batch 1 ] [ W₁₁, batch 1 ]

The union of the two layouts, without code of its own. A weight is split twice: by width over `data`, and by heads,
hidden units or vocabulary over `model`. The batch is split over `data` only, and the positions of the residual stream
over `model`.

Communication: FSDP's gathers and reduce-scatters, of weights 1/m as large (m = size of `model`), and tensor
parallelism's, of activations 1/d as large (d = size of `data`).

Use it with more devices than examples in a batch, or when the arithmetic no longer hides FSDP's gathers. Don't use it
for models that train well with fsdp, which is simpler. Keep `model` within a host.

Source: Xu et al. 2021 (GSPMD), arXiv:2105.04663.
"""

from strategies.fsdp import LAYOUT as FSDP
from strategies.tensor_parallel import LAYOUT as TENSOR_PARALLEL

LAYOUT = (FSDP | TENSOR_PARALLEL).on(data=-1, model=2)
