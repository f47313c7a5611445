"""The configs: `wave`, which of three waves a tone has; `pitch`, its pitch and loudness as numbers."""

from ml_collections import ConfigDict

from configs import base, project
from errors import one_of
from projects.sounds import make

OBJECTIVES = {"wave": "likely", "pitch": "regression"}


def get_config(preset: str = "wave") -> ConfigDict:
  config = base.get_config("tiny", "fsdp")
  project.use(config, "sounds")
  config.data.name = "sounds"
  config.model.update(
    inputs="features", objective=OBJECTIVES[one_of("preset", preset, OBJECTIVES)], seq_len=make.FRAMES, vocab_size=0
  )
  config.update(steps=300, batch_size=64, log_every=100, eval_every=0, eval_batch_size=64, eval_examples=0)
  return config
