"""Tones by their spectra: data, an objective and a strategy of your own. What the tone is, or its pitch and loudness.

    python -m projects.sounds.make tones.npz
    python train.py --config=projects/sounds/config.py --config.data.path=tones.npz
    python train.py --config=projects/sounds/config.py:pitch --config.strategy=projects.sounds.pairs

make.py makes the data and data.py reads them, objective.py counts one more measure, pairs.py is a strategy, config.py
chooses. The model is the Transformer.
"""

import data
from models.objectives import OBJECTIVES
from projects.sounds.objective import LikelyClass
from reporting.metrics import FORMATS

OWN = {
  "examples": 4000,  # to make, if data.path names no file
  "validate": 10,  # every so many-th example is to validate on
}
data.DATASETS["sounds"] = data.Loader("projects.sounds.data", inputs="features", objectives=("likely", "regression"))
OBJECTIVES["likely"] = LikelyClass
FORMATS["top_2"] = "top 2 {:.2%}"  # how a line of metrics shows it
