"""Checkpoints: save.py writes them, restore.py reads them, record.py says what a checkpoint holds and who may use it.

This package stands above `strategies`: it takes a typed `Strategy` and saves or restores that strategy's state.
"""
