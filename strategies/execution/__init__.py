"""How a layout runs: what moves, who runs a step, and the programs that are compiled.

Read the files in this order: transfers.py (what a layout makes move), constraints.py (where the model's arrays are),
runner.py (what a runner does) and automatic.py (the first runner), strategy.py (the interface that everything else
uses) and choice.py (which runner a config gets). Then by_hand.py with collectives.py, the package stages/ with the
schedules of a pipeline, and pmapped.py. mesh.py, padding.py, options.py and writing.py are what these use.
"""
