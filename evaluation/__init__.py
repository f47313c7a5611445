"""Evaluation: evaluator.py measures loss and accuracy, bigram.py the baseline of a text model."""
