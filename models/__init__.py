"""The one Transformer. It names the dimensions of its arrays (dimensions.py) and does not know about strategies.

Read transformer.py first, then block.py, whose halves are in mixers.py and mlps.py. ops/ says how products, attention
and the loss are computed. inputs.py and objectives.py hold the two choices that make a model: what goes in (tokens,
images, features) and what is predicted (the next token, a class, numbers). sizes.py holds the checked sizes, and
expert_sizes.py those of a mixture; flops.py counts what training takes. generate.py writes text, and lora.py holds
adapters, which are trained in place of weights.
"""
