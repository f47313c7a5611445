"""Reads compiled steps, and predicts them: what is computed, kept and sent, and how fast it can be at best.

hlo.py parses a compiled program; work.py counts its operations and communication.py what it sends. case.py, theory.py
and predict.py say the same from the layout and the model alone; roofline.py turns either into time. No device is needed
for any of it: topology.py makes TPUs that are not there, and compiled.py compiles for them.
"""
