"""How texts become examples: for the code that prepares data, and for the model. Needs no JAX, whose import is slow."""

from ml_collections import ConfigDict

PACKINGS = ("windows", "documents")


def counts_parts(config: ConfigDict) -> bool:
  """Whether only parts of a text count: completions, or the assistant's turns."""
  return bool(config.data.prompt_field or config.data.messages_field)
