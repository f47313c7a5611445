"""The files of a tokenizer in the form of Hugging Face, which its users can load without this program."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from errors import ConfigError, shown
from limits import ENTRIES, STRINGS, content, described, parsed

TOKENIZER = "tokenizer.json"
CONFIGS = ("generation_config.json", "config.json")  # either may say which token ends a text
BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")  # kept as they are
CLASS = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
# The characters that stand for bytes in byte-level tokenizers (GPT-2's): printable ones for themselves.
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]


# What may begin a name of a field that is written in another way.
PREFIX = re.compile(rb'continuing_subword_prefix"\s*:\s*"|\\u00[2-7]')


def check_tokenizer(file: Path) -> None:
  """Raises ValueError for a tokenizer.json that is too large, or that would abort the whole process.

  The library cuts the prefix of words' later parts off every merge's second token, whether or not it begins with it.
  """
  given = content(file)
  for what, count, most in (("entries", given.count(b":"), ENTRIES), ("texts", given.count(b'"') // 2, STRINGS)):
    if count > most:
      raise ValueError(f"it has about {count:,} {what}, more than the limit of {most:,}")
  if not PREFIX.search(given):
    return
  found = parsed(given)
  model = found.get("model") if isinstance(found, dict) else None
  prefix, merges = (model.get(name) for name in ("continuing_subword_prefix", "merges")) if model else (None, None)
  if isinstance(prefix, str) and prefix and isinstance(merges, list):
    for merge in merges:
      pair = merge.partition(" ")[::2] if isinstance(merge, str) else merge
      if not isinstance(pair, list | tuple) or len(pair) != 2 or not str(pair[1]).startswith(prefix):
        raise ValueError(f"it has the merge {shown(merge)}, whose second token does not begin with {shown(prefix)}")


def of_bytes(end: int) -> dict[str, str]:
  """The files of a tokenizer whose ids are bytes."""
  others = [byte for byte in range(256) if byte not in PRINTABLE]
  characters = {byte: chr(byte) for byte in PRINTABLE} | {byte: chr(256 + n) for n, byte in enumerate(others)}
  byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
  model = {"type": "BPE", "vocab": {characters[byte]: byte for byte in range(256)}, "merges": []}
  tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": byte_level, "decoder": byte_level, "model": model}
  return {TOKENIZER: json.dumps(tokenizer), "tokenizer_config.json": json.dumps(CLASS), **_generation(end)}


def of_file(file: Path, end: int, end_name: str | None) -> dict[str, str]:
  """The files of a tokenizer.json, with those that are beside it."""
  found = {name: content(path).decode() for name in BESIDE if (path := file.with_name(name)).exists()}
  if "tokenizer_config.json" not in found:
    found["tokenizer_config.json"] = json.dumps(CLASS | ({"eos_token": end_name} if end_name else {}))
  given = _json(file.with_name(CONFIGS[0])) if file.with_name(CONFIGS[0]).exists() else {}
  return {TOKENIZER: file.read_text(), **found, **_generation(given.get("eos_token_id", end), given)}


def ends_of(file: Path, id_of: Callable[[str], int | None]) -> list[int]:
  """The ids that end a text, by the files beside a tokenizer.json; the first also ends a document. [] if none says.

  The tokenizer's own files come first: it is the token that others put behind texts when they train. A model may stop
  at more tokens than that, which generation_config.json lists, or else config.json. Raises ConfigError if the
  tokenizer has no such token. `id_of` returns the id of a token.
  """
  found: list[int] = []
  for name in BESIDE[:2]:
    given = _json(file.with_name(name)).get("eos_token")
    token = given.get("content") if isinstance(given, dict) else given
    if isinstance(token, str):
      if (own := id_of(token)) is None:
        raise ConfigError(
          f"data.tokenizer={str(file)!r} has no token {token!r}, but the {name} beside it says that it ends a text; "
          "copy both from the same model"
        )
      found.append(own)
      break
  for name in CONFIGS:
    given = _json(file.with_name(name)).get("eos_token_id")
    ids = [own for own in (given if isinstance(given, list) else [given]) if isinstance(own, int)]
    if ids:
      return list(dict.fromkeys([*found, *ids]))
  return found


def with_end(files: dict[str, str], end: int) -> dict[str, str]:
  """The files of a tokenizer, with one more token that ends a text."""
  given = json.loads(files[CONFIGS[0]])
  ids = given.get("eos_token_id")
  every = list(dict.fromkeys([*(ids if isinstance(ids, list) else [ids]), end]))
  return files | _generation(every if len(every) > 1 else every[0], given)


def _generation(end: Any, given: dict[str, Any] | None = None) -> dict[str, str]:
  return {CONFIGS[0]: json.dumps((given or {}) | {"eos_token_id": end}, indent=2) + "\n"}


def _json(file: Path) -> dict[str, Any]:
  try:
    found = described(file)
  except (OSError, ValueError):
    return {}
  return found if isinstance(found, dict) else {}
