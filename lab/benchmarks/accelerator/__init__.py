"""`make accelerator`: what only a machine with GPUs or TPUs can show, in steps of under ten minutes each.

Read in this order: step.py says what a step is. parity.py, attention.py, memory.py, throughput.py, cifar10.py and
language_model.py are one step each; the last two use training.py. steps.py runs each in a process of its own. record.py
and page.py keep and show the results. command.py is the command.
"""
