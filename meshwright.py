"""What `pip install .` of this repository installs, so that `import meshwright` says what to do."""

raise ImportError(
  "Meshwright is a template of programs, not a library: run `python train.py` in a clone of it, or make a package of "
  "your own there with `python -m tools.fork FOLDER/NAME --package`, and install that"
)
