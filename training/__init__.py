"""The mathematics of training, apart from devices and files: program.py first (state, loss, step), then optimizer.py.

settings.py turns a config into these checked objects.
"""
