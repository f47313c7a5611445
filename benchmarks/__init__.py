"""Measurements: scripts, their raw records (JSON in results/), and code that writes tables and plots from the records."""
