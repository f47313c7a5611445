"""The mathematics of training, without devices or files.

Read program.py first (state, loss and step), then optimizer.py and optimizers/. settings.py makes both from a config.
"""
