"""Commands that are also importable functions: `python -m tools.NAME`."""
