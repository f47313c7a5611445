"""2D: FSDP over `data`, tensor parallelism over `model`.

                     model 0        model 1
    data 0        [ W₀₀, batch 0 ] [ W₀₁, batch 0 ]
    data 1        [ W₁₀, batch 1 ] [ W₁₁, batch 1 ]

A weight is cut twice, by width over `data` and by heads, hidden units or vocabulary over `model`; the batch is cut
over `data` alone. It is literally the union of the two layouts, with no code of its own.

Communication: FSDP's gathers and scatters, of weights already 1/m as large (m = size of `model`), and tensor
parallelism's all-reduces, of activations already 1/d as large (d = size of `data`).

Use it when FSDP alone has more devices than the batch can feed or its gathers no longer hide behind the arithmetic.
Keep `model` within a host. Not for models that fsdp fits: it has less to go wrong.

Source: Xu et al. 2021 (GSPMD), arXiv:2105.04663.
"""

from strategies.fsdp import LAYOUT as FSDP
from strategies.tensor_parallel import LAYOUT as TENSOR_PARALLEL

LAYOUT = (FSDP | TENSOR_PARALLEL).on(data=-1, model=2)
