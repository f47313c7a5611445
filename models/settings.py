"""Makes the checked ModelConfig from a config (configs/base.py)."""

from ml_collections import ConfigDict

from errors import ConfigError, one_of
from models.config import DTYPES, ModelConfig

PACKINGS = ("windows", "documents")


def with_sizes_made_up(config: ConfigDict) -> ConfigDict:
  """The config with sizes in the place of those that only the data can say. It serves to check all other fields."""
  made, model = config.copy_and_resolve_references(), config.model
  channels = len(model.pixel_mean or model.pixel_std) or 1
  sizes = {"image_size": model.patch_size, "channels": channels, "classes": 2, "vocab_size": 2}
  made.model.update({name: size for name, size in sizes.items() if not model[name]})
  return made


def model_config(config: ConfigDict, platform: str = "cpu") -> ModelConfig:
  """The ModelConfig of a config, but for `attention`, which is as in the config (`models.ops.attention.choose`).

  Args:
    platform: "cpu", "gpu" or "tpu", for the dtype `auto`.
  """
  model = dict(config.model)
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
  return checked
