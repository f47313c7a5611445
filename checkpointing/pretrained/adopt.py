"""Takes the model's shape and its tokenizer from a model folder into the config of a run."""

from ml_collections import ConfigDict
from tokenizers import Tokenizer

from checkpointing.pretrained.folder import Folder, is_folder
from errors import ConfigError, first_line
from models.sizes import replaced

TOKENIZER = "tokenizer.json"
OTHERS = (  # files of tokenizers that are not read
  "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "merges.txt", "vocab.txt", "tekken.json",
  "tokenizer_config.json", "tiktoken.model", "qwen.tiktoken",
)  # fmt: skip


def adopt(config: ConfigDict) -> ConfigDict:
  """The config of a run that starts from a model folder: with the folder's sizes, and its tokenizer.

  Other configs stay as they are. A tokenizer.json that the config names stays, too.
  """
  if not is_folder(config.init_from):
    return config
  folder = Folder(config.init_from)
  config = replaced(config, "model", folder.fields)
  if config.data.name == "text" and config.data.tokenizer in ("bytes", "bpe"):
    if (folder.path / TOKENIZER).exists():
      _check_tokenizer(folder)
      config = replaced(config, "data", {"tokenizer": str(folder.path)})
    elif others := sorted(name for name in OTHERS if (folder.path / name).exists()):
      raise ConfigError(
        f"{folder.where} has no {TOKENIZER}, only {', '.join(others)}; write one with the library transformers: "
        f"AutoTokenizer.from_pretrained({config.init_from!r}).save_pretrained({config.init_from!r}), or name one in "
        "data.tokenizer"
      )
  return config


def _check_tokenizer(folder: Folder) -> None:
  """Raises ConfigError unless the model knows the tokenizer's ids, but for tokens that were added, such as [PAD]."""
  try:
    tokenizer = Tokenizer.from_file(str(folder.path / TOKENIZER))
    ids = set(tokenizer.get_vocab(with_added_tokens=False).values()) - tokenizer.get_added_tokens_decoder().keys()
  except Exception as error:  # the library raises nothing more specific
    raise ConfigError(f"{folder.where} has a damaged {TOKENIZER} ({first_line(error)}); copy it again") from error
  size = folder.shape.fields["vocab_size"]
  if max(ids, default=0) >= size:
    raise ConfigError(
      f"{folder.where} has a {TOKENIZER} with {max(ids) + 1} ids, but its model knows {size}; copy both from the same "
      "model"
    )
