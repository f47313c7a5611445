"""One short file a strategy, on top of base.py, which holds every field with its default and meaning."""
