"""Checkpoints: save.py writes them, restore.py reads them, and record.py describes and checks the run that wrote one.

This package is above `strategies`: it saves and restores the state of any `Strategy`.
"""
