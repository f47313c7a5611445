"""The lessons of the tour, in order. `python -m tools.tour` runs them.

A lesson is a module. The first line of its docstring has its title and its subject. Its `STEPS` are functions. A step
takes no arguments, prints what it shows, and returns data for the tests. Its docstring has a title and the text before
the code. Its body is shown on the page, so write it for readers. Other definitions of the module that a step uses are
shown once, before it. To add a step, write it, add it to `STEPS`, and test what it teaches in tests/tools/test_tour.py.
"""

from tools.lessons import devices_and_meshes, four_ways, memory, placing, train_step

LESSONS = (devices_and_meshes, placing, four_ways, train_step, memory)
