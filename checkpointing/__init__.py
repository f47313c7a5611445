"""Checkpoints: save.py writes them, reading.py reads them, and record.py describes and checks the run that wrote one.

restore.py begins a run, from its newest checkpoint or with the parameters that initial.py finds for it.
interval.py says how often to save.

This package is above `strategies`: it saves and restores the state of any `Strategy`.
"""
