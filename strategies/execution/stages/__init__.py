"""A pipeline's stages: a schedule as a table, and who runs it.

Read the files in this order: schedule.py (a schedule as a table, and where values wait), orders.py (which unit runs
when), stage.py (runs a table on one stage), split.py (the backward pass in two), staged.py (the runner around it, with
its checks).
"""
