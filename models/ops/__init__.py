"""How the model computes what takes most of its time: products, attention, the loss, and compiler workarounds."""
