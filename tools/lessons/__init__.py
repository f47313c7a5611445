"""The lessons of the tour, in order; `python -m tools.tour` runs them.

A lesson is a module: the first line of its docstring is its title and its subject, `STEPS` are its functions. A step
takes nothing, prints what it shows, and returns what it has found, which the tests look at. Its docstring is a title
and the text before the code; the body is the code on the page, so it is written to be read. Whatever else of the module
a step uses is shown with it, once. To add a step: write it, put it into `STEPS`, and a test of what it teaches into
tests/tools/test_tour.py.
"""

from tools.lessons import devices_and_meshes, four_ways, memory, placing, train_step

LESSONS = (devices_and_meshes, placing, four_ways, train_step, memory)
