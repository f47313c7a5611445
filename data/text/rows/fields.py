"""Which fields of a row are read, and what a reader of rows yields."""

import dataclasses
import difflib
import functools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import limits
from errors import ConfigError, visible

TOOLS = "tools"  # the field of those that the assistant may call, if a dialogue has any
SHOWN = 20  # fields that an error names


@dataclasses.dataclass(frozen=True)
class Fields:
  """The columns, or fields of JSON, that hold the text, its class and the prompt before it; or the messages.

  `label` is None without classes, `prompt` without prompts, and `messages` without dialogues. With prompts, the text is
  the completion. With prompts and dialogues, a row may be either.

  `limit` is how many bytes a row may have (limits.py). With `skip`, a bad row is left out.
  """

  text: str = "text"
  label: str | None = None
  prompt: str | None = None
  messages: str | None = dataclasses.field(default=None, repr=False)  # plain text stays prepared under its key
  limit: int = dataclasses.field(default=limits.ROW, repr=False)
  skip: bool = dataclasses.field(default=False, repr=False)

  def __post_init__(self) -> None:
    if self.in_spans and len(set(self.names)) < len(self.names):
      given = " and ".join(f"{option}={name!r}" for option, name in self.options.items())
      raise ConfigError(f"{given} are the same field; name {'two' if len(self.names) == 2 else 'others'}")

  @property
  def key(self) -> tuple[Any, ...]:
    """What determines the rows, for the cache."""
    return (self, "skip") if self.skip else (self,)

  def bad(self, wrong: ConfigError) -> ConfigError:
    """What a reader yields for a bad row: what is wrong with it. Raises that, unless such rows are skipped."""
    if not self.skip:
      raise wrong
    return wrong

  @property
  def in_spans(self) -> bool:
    """Whether only parts of a document count (spans.py)."""
    return self.prompt is not None or self.messages is not None

  def among(self, names: Collection[str]) -> "Fields":
    """The fields of a row, or table, that has these: its messages if it has them or no prompt."""
    if self.messages is None or self.prompt is None:
      return self
    if self.messages in names or self.prompt not in names:
      return dataclasses.replace(self, prompt=None)
    return dataclasses.replace(self, messages=None)

  @functools.cached_property
  def options(self) -> dict[str, str]:
    """The names, by the field of the config that gives each."""
    text = "data.text_field" if self.prompt is None else "data.completion_field"
    own = None if self.prompt is None and self.messages is not None else self.text
    names = {
      "data.messages_field": self.messages, "data.prompt_field": self.prompt, text: own,
      "data.label_field": self.label,
    }  # fmt: skip
    return {option: name for option, name in names.items() if name is not None}

  @functools.cached_property
  def names(self) -> list[str]:
    return list(self.options.values())


Values = dict[str, Any]  # of the fields, by the option that names each, and TOOLS
Read = Iterator[tuple[Values | ConfigError | None, int, int]]  # values, or what is wrong; `offset`, `done` as in Row


def columns_of(fields: Fields, names: Sequence[str], where: str) -> dict[str, str]:
  """The columns to read of a row, or table, with these names, as in Values. Raises ConfigError if it lacks one."""
  own = fields.among(names)
  check_names(own, names, where)
  return own.options | ({TOOLS: TOOLS} if own.in_spans and TOOLS in names else {})


def check_names(fields: Fields, names: Sequence[str], where: str) -> None:
  """Raises ConfigError if a row with the fields `names` lacks one. `where` says where the row is."""
  for option, name in fields.options.items():
    if name not in names:
      nearest = difflib.get_close_matches(name, names, n=1)
      hint = f"did you mean {nearest[0]!r}?" if nearest else "use one of them" if names else "use another file"
      has = visible(", ".join(names[:SHOWN])) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
      raise ConfigError(f"{option}={name!r} is not in {where}, which has {has or 'no fields'}; {hint}")
