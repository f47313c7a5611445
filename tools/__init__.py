"""Commands: `python -m tools.NAME`. Their functions can also be imported."""
