"""Takes the model's shape and its tokenizer from a model folder into the config of a run."""

from ml_collections import ConfigDict
from tokenizers import Tokenizer

from errors import ConfigError, first_line
from models.sizes import replaced
from pretrained.folder import Folder, is_folder

TOKENIZER = "tokenizer.json"


def adopt(config: ConfigDict) -> ConfigDict:
  """The config of a run that starts from a model folder: with the folder's sizes, and its tokenizer.

  Other configs stay as they are. A tokenizer.json that the config names stays, too.
  """
  if not is_folder(config.init_from):
    return config
  folder = Folder(config.init_from)
  window, length = folder.shape.window, config.model.seq_len
  if window and length > window:
    raise ConfigError(
      f"model.seq_len={length} is longer than the window of {window} positions of {folder.where}; use at most {window}"
    )
  config = replaced(config, "model", folder.shape.fields)
  if config.data.name == "text" and config.data.tokenizer in ("bytes", "bpe") and (folder.path / TOKENIZER).exists():
    _check_tokenizer(folder)
    config = replaced(config, "data", {"tokenizer": str(folder.path)})
  return config


def _check_tokenizer(folder: Folder) -> None:
  try:
    ids = Tokenizer.from_file(str(folder.path / TOKENIZER)).get_vocab().values()
  except Exception as error:  # the library raises nothing more specific
    raise ConfigError(f"{folder.where} has a damaged {TOKENIZER} ({first_line(error)}); copy it again") from error
  size = folder.shape.fields["vocab_size"]
  if max(ids, default=0) >= size:
    raise ConfigError(
      f"{folder.where} has a {TOKENIZER} with {max(ids) + 1} ids, but its model knows {size}; copy both from the same "
      "model"
    )
