"""What a run reports: metrics.py at each line, progress.py step by step, summary.py at the start and the end."""
