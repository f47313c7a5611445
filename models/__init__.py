"""The one Transformer. It names the axes of its arrays (models/axes.py) and knows no strategy, mesh or device.

Read transformer.py first, then attention.py and layers.py; generate.py samples text with a key-value cache.
"""

from models.config import ModelConfig
from models.transformer import Transformer, logical_axes

__all__ = ["ModelConfig", "Transformer", "logical_axes"]
