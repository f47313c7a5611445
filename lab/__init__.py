"""The laboratory: what reads steps, predicts, plans, measures, draws and teaches. Only tools/ imports it.

The trainer runs without this folder. Read in this order:

analysis/     figures of a step, from its compiled program and from formulas; the search of a plan; simulated failures
benchmarks/   measurements, their records, and the tables and plots made from them
views/        figures as pictures and pages
lessons/      the steps of the pages that are made by running code; steps.py runs them, notebook.py writes a notebook

failure_inputs.py and failure_policies.py are what tools.failures compares, smaller.py chooses a plan for fewer
processes, and fragile.py is the program that tools.chaos hurts.
"""
