"""Checkpoints in the hosts' memory: each process keeps a part of the state, and a copy of its neighbour's part.

Read `tier.py` first, which saves; then `recovery.py`, which restores. `pieces.py` says who keeps what, `store.py` is a
folder in a host's memory, and `exchange.py` sends parts from one process to another.
"""
