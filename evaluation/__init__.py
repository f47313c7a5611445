"""How good a model is: evaluator.py measures loss and accuracy, bigram.py the baseline to compare a text model with."""
