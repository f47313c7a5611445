"""How the model computes what takes most of its time: products, attention, the loss, and compiler workarounds.

In backward passes, `of_x` is the gradient of the loss with respect to x. `of_out`, the result's gradient, is given.
"""
