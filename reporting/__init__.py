"""What a run shows: metrics.py writes measurements, progress.py follows the steps, summary.py is for start and end."""
