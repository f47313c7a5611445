"""Makes the checked ModelConfig from a config (configs/base.py)."""

import dataclasses

from ml_collections import ConfigDict

from errors import ConfigError, one_of
from models.config import DTYPES, ModelConfig
from models.cores import choose

PACKINGS = ("windows", "documents")


def model_config(config: ConfigDict, platform: str = "cpu", draft: bool = False) -> ModelConfig:
  """The ModelConfig of a config. Resolves `auto` fields for the platform: "cpu", "gpu" or "tpu".

  In a draft, the sizes that only the data can say are made up. It serves to check all other fields early.
  """
  model = dict(config.model)
  if draft:
    channels = len(model["pixel_mean"] or model["pixel_std"]) or 1
    made_up = {"image_size": model["patch_size"], "channels": channels, "classes": 2, "vocab_size": 2}
    model |= {name: size for name, size in made_up.items() if not model[name]}
  one_of("model.dtype", model["dtype"], ("auto", *DTYPES))
  if model["dtype"] == "auto":
    model["dtype"] = "float32" if platform == "cpu" else "bfloat16"
  documents = one_of("data.packing", config.data.packing, PACKINGS) == "documents"
  padded = model["inputs"] == "tokens" and model["objective"] == "class"  # texts shorter than seq_len
  prompt_field = config.data.prompt_field
  checked = ModelConfig(**model, segments=documents or padded, completions=bool(prompt_field))
  if prompt_field and model["objective"] != "next_token":
    raise ConfigError(
      f"data.prompt_field={prompt_field!r} needs model.objective='next_token', but model.objective="
      f"{checked.objective!r}; leave data.prompt_field empty"
    )
  if prompt_field and not documents:
    raise ConfigError(
      f"data.prompt_field={prompt_field!r} needs data.packing='documents', because data.packing="
      f"{config.data.packing!r} would separate completions from their prompts; use 'documents'"
    )
  if documents and model["objective"] != "next_token":
    raise ConfigError(
      "data.packing='documents' needs model.objective='next_token', but model.objective="
      f"{checked.objective!r}; use data.packing='windows'"
    )
  return dataclasses.replace(checked, attention=choose(checked, platform).name)
