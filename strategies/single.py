"""Single device: everything in one place. The reference that every other strategy must equal.

    device 0:  all weights, all of the batch

Communication: none. Use it to debug, to measure what one device does, and as the truth in the parity tests. Any
other strategy turns into this one when it finds a single device; pmap_ddp is then a pmap over one device, to the same
numbers.
"""

from strategies.layout import Layout

LAYOUT = Layout(mesh={"data": 1})
