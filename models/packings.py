"""How texts become examples: read by the code in data/ and by the model. Needs no JAX, whose import is slow."""

from ml_collections import ConfigDict

PACKINGS = ("windows", "documents")


def counts_parts(config: ConfigDict) -> bool:
  """Whether only parts of a text count: completions, or the assistant's turns."""
  return bool(config.data.prompt_field or config.data.messages_field)
