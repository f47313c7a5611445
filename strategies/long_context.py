"""Long texts: fully sharded data parallelism joined with context parallelism."""

from strategies.context import LAYOUT as CONTEXT
from strategies.fsdp import LAYOUT as FSDP

LAYOUT = (FSDP | CONTEXT).on(context=2).place(embed=("data", "context"))
