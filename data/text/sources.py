"""The sources of `data.path`: which files each has, as text or as token ids, and what is left out of them."""

import dataclasses

from ml_collections import ConfigDict

from data import tfds
from data.dataset import sources_of
from data.recognition import AUTO, TOKENS, Verdict, Verdicts, recognise, settled
from data.recognition.table import note
from data.remote import brought
from data.text import foreign, token_rows
from data.text.files import Files, files_of, library
from data.text.rows import Fields
from data.text.scan import TokenFiles
from data.text.token_rows import TokenRows
from errors import ConfigError


@dataclasses.dataclass(frozen=True)
class TextSource:
  """A source.

  Attributes:
    files: its files, of text or of token ids, in files or in rows.
    verdicts: what happens to each file at its path; () for the standard library, or files of tokens that are named.
  """

  files: Files | TokenFiles | TokenRows
  verdicts: tuple[Verdict, ...] = ()

  @property
  def note(self) -> str:
    """The kinds and splits of the files, and those that are skipped, for the line on the data."""
    return note(self.verdicts)


Sources = dict[str, TextSource]  # by the path that the user gave


def find_sources(config: ConfigDict) -> Sources:
  """The files of each source of `config.data.path`. Raises ConfigError for one that does not exist or holds no text."""
  path, validation_path, cache = config.data.path, config.data.validation_path, config.data.cache_dir
  if validation_path and isinstance(path, dict):
    raise ConfigError(
      f"data.validation_path={validation_path!r} needs a single source, but data.path is a mixture; leave it empty to "
      "hold out a part of each source"
    )
  held_out = here(validation_path, "data.validation_path", config)
  sources: Sources = {}
  for name, _ in sources_of(path):
    source = find_source(here(name, "data.path", config), held_out, cache, config.data.form)
    if isinstance(source.files, tuple) and (ids := token_rows.find(source.files, fields_of(config, False), cache)):
      source = dataclasses.replace(source, files=ids)
    sources[name] = source
  whose: dict[str, str] = {}
  for name, source in sources.items():
    rows = source.files.files if isinstance(source.files, TokenRows) else source.files
    for file in () if isinstance(rows, TokenFiles) else rows:
      if whose.setdefault(file.path, name) != name:
        raise ConfigError(
          f"data.path has {file.path!r} in two sources, {whose[file.path]!r} and {name!r}, so one could train on what "
          "the other holds out; take it out of one"
        )
  return sources


def here(path: str, field: str, config: ConfigDict) -> str:
  """Where a path is on this machine."""
  if path.startswith(tfds.PREFIX):
    return str(tfds.find(path, config.data, f"{field}={path!r}"))
  return brought(path, field, config.data.cache_dir)


def fields_of(config: ConfigDict, labels: bool) -> Fields:
  """The fields of a row that a text is read from."""
  given, with_prompts = config.data, bool(config.data.prompt_field)
  return Fields(
    text=given.completion_field if with_prompts else given.text_field,
    label=given.label_field if labels else None,
    prompt=given.prompt_field if with_prompts else None,
    messages=given.messages_field or None,
    limit=given.limit_mb << 20,
    skip=given.on_bad_row == "skip",
  )


def find_source(path: str, validation_path: str = "", cache_dir: str = "", form: str = AUTO) -> TextSource:
  """The source at a path of this machine; "" is the standard library.

  Raises ConfigError if it does not exist, holds nothing to train on, or if the files to validate on have another form.
  """
  if not path.strip():
    other = recognise(validation_path, "data.validation_path", cache_dir, form) if validation_path else None
    _same_form(path, False, validation_path, other is not None and other.form == TOKENS)
    return TextSource(library(other))
  tokens, verdicts = _look(path, "data.path", cache_dir, form)
  other_tokens, other = None, None
  if validation_path:
    other_tokens, other = _look(validation_path, "data.validation_path", cache_dir, form)
    _same_form(path, _holds_tokens(tokens, verdicts), validation_path, _holds_tokens(other_tokens, other))
  said = f"data.path={path!r}"
  final = tuple(settled(verdicts.all, said)) if verdicts else ()
  if _holds_tokens(tokens, verdicts):
    held_out = other_tokens or (foreign.to_validate_on(other, validation_path) if other else None)
    return TextSource(foreign.token_files(path, tokens, final, held_out), final)
  assert verdicts
  return TextSource(files_of(final, verdicts.form, other), final)


def find_text(path: str, cache_dir: str = "", form: str = AUTO) -> Files:
  """The files of the text at a path, whatever their splits are for. Raises ConfigError if there is none, or tokens."""
  files = find_source(path, "", cache_dir, form).files
  if not isinstance(files, tuple):
    raise ConfigError(f"data.path={path!r} holds token ids, but text is needed; use the text that they were made of")
  return files


def _look(path: str, field: str, cache_dir: str, form: str) -> tuple[TokenFiles | None, Verdicts | None]:
  """Token files that are named with their index, or the verdicts on what is at a path."""
  tokens = foreign.named(path)
  return (tokens, None) if tokens else (None, recognise(path, field, cache_dir, form))


def _holds_tokens(tokens: TokenFiles | None, verdicts: Verdicts | None) -> bool:
  return tokens is not None or (verdicts is not None and verdicts.form == TOKENS)


def _same_form(path: str, tokens: bool, validation_path: str, other: bool) -> None:
  if tokens != other and validation_path:
    holds = {True: "tokens", False: "text"}
    raise ConfigError(
      f"data.validation_path={validation_path!r} holds {holds[other]}, but data.path={path!r} holds {holds[tokens]}; "
      "use the same for both"
    )
