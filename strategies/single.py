"""Single device: all weights and the whole batch on one device. Every other strategy must compute the same numbers.

    device 0:  all weights, all of the batch

Communication: none.

Use it to debug, and as the reference of all others. Don't use it when there are more devices: it leaves them idle.

On a single device every other strategy is the same as this one. (pmap_ddp is then a pmap over one device, with the same
numbers.)
"""

from strategies.layout import Layout

LAYOUT = Layout(mesh={"data": 1})
