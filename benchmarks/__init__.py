"""Measurements: scripts, their raw records (JSON), and the tables in docs/ that are generated from the records."""
