"""What is trained and how, apart from where: program.py first (state, loss, step), then optimizer.py.

metrics.py writes what is measured, report.py draws it, runtime.py finds the devices, hardware.py knows their peaks.
"""
