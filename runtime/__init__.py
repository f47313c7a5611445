"""The machine around a run: devices, processes, signals, folders and the command line.

Read devices.py first, then processes.py and signals.py. Nothing here knows what is trained.
"""
