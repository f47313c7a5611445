"""How good a model is.

evaluator.py measures loss and accuracy, and bigram.py the baseline of a text model. documents.py makes examples of all
of a text, and choices.py answers questions with several choices.
"""
