"""The files of a tokenizer in the form of Hugging Face, which its users can load without this program."""

import json
from pathlib import Path
from typing import Any

TOKENIZER = "tokenizer.json"
CONFIGS = ("generation_config.json", "config.json")  # either may say which token ends a text
BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")  # kept as they are
CLASS = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
# The characters that stand for bytes in byte-level tokenizers (GPT-2's): printable ones for themselves.
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]


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
  found = {name: path.read_text() for name in BESIDE if (path := file.with_name(name)).exists()}
  if "tokenizer_config.json" not in found:
    found["tokenizer_config.json"] = json.dumps(CLASS | ({"eos_token": end_name} if end_name else {}))
  given = _json(file.with_name(CONFIGS[0])) if file.with_name(CONFIGS[0]).exists() else {}
  return {TOKENIZER: file.read_text(), **found, **_generation(given.get("eos_token_id", end), given)}


def ends_of(file: Path) -> list[int]:
  """The ids that end a text, by the files beside a tokenizer.json; the first also ends a document. [] if none says."""
  for name in CONFIGS:
    given = _json(file.with_name(name)).get("eos_token_id")
    if ids := [found for found in (given if isinstance(given, list) else [given]) if isinstance(found, int)]:
      return ids
  return []


def _generation(end: Any, given: dict[str, Any] | None = None) -> dict[str, str]:
  return {CONFIGS[0]: json.dumps((given or {}) | {"eos_token_id": end}, indent=2) + "\n"}


def _json(file: Path) -> dict[str, Any]:
  try:
    found = json.loads(file.read_text())
  except (OSError, ValueError):
    return {}
  return found if isinstance(found, dict) else {}
