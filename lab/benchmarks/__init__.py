"""Measurements: scripts, their raw records (JSON, in results/), and the tables and plots made from the records."""
