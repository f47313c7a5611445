"""What tools/fork.py does to the files of a tree. Read tree.py first, then naming.py, packaging.py and slimming.py.

Each step takes the files as a dict, from a path to its content, and returns the files of the fork.
"""
