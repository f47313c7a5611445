"""Chat templates: Jinja programs that models bring along, and that write a dialogue as one text.

They run in a sandbox, with what the library transformers gives them: its filters, functions and variables, loop
controls and the tag `generation`. chat.py says which part of the text counts.
"""

import contextlib
import datetime
import functools
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from errors import ConfigError, first_line
from limits import content, described

FILE, CONFIG, OLD_CONFIG = "chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"
LONGEST = 1 << 24  # characters of what a template writes; a stranger's may never end
WITH_TOOLS, USUAL = "tool_use", "default"  # names of templates, where there are several
VARIABLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Written(NamedTuple):
  """What a template has written, and where the tag `generation` stood: start and end of each part."""

  text: str
  parts: list[tuple[int, int]]


class Template:
  """A compiled template. `where` names it in errors. Raises ConfigError if it is not valid.

  `marks` says whether it has the tag `generation`.
  """

  def __init__(self, source: str, variables: dict[str, str], where: str):
    import jinja2

    from data.text.sandbox import Meter

    self.where, self._variables, self._parts = where, variables, list[tuple[int, int]]()
    self._size, self._meter = 0, Meter()
    try:
      self._template = _environment(self._inside, self._meter).limited(source)
    except (jinja2.TemplateError, RecursionError, MemoryError, OverflowError) as error:
      raise ConfigError(f"{where} is not a valid chat template ({first_line(error)}); correct it") from error
    self.marks = bool(re.search(r"\{%[-+]?\s*generation\b", source))

  def _inside(self, text: str) -> str:
    """Notes where the tag `generation` stands, when its text is complete."""
    self._parts.append((self._size, self._size + len(text)))
    return text

  def write(self, messages: Sequence[dict[str, Any]], tools: Any = None, *, prompt: bool = False) -> Written:
    """Writes a dialogue; with `prompt`, also what begins the answer to it.

    Raises ConfigError if the template refuses it, takes too long, or writes more than LONGEST characters.
    """
    self._parts, self._size, pieces = [], 0, list[str]()
    self._meter.start()
    given = {**self._variables, "messages": messages, "tools": tools, "documents": None}
    try:
      for piece in self._template.generate(add_generation_prompt=prompt, **given):
        pieces.append(piece)
        self._size += len(piece)
        if self._size > LONGEST:
          break
    except Exception as error:  # a template may do anything that an expression can
      raise ConfigError(
        f"{self.where} cannot write it ({first_line(error)}); correct the row, or the template"
      ) from error
    if self._size > LONGEST:
      raise ConfigError(f"{self.where} writes more than {LONGEST:,} characters; correct it")
    return Written("".join(pieces), self._parts)


def _environment(inside: Any, meter: Any) -> Any:
  """What templates run in. `inside` is called with the text of each tag `generation`."""
  import jinja2
  from jinja2.ext import Extension

  from data.text.sandbox import Environment

  class Generation(Extension):
    """The tag `generation`."""

    tags = {"generation"}  # noqa: RUF012  (as Jinja wants it)

    def parse(self, parser: Any) -> Any:
      line = next(parser.stream).lineno
      body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
      return jinja2.nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

    def _note(self, caller: Any) -> str:
      return inside(str(caller()))

  def refuse(message: str) -> None:
    raise jinja2.TemplateError(message)

  def to_json(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
  ) -> str:
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

  extensions = [Generation, "jinja2.ext.loopcontrols"]
  environment = Environment(meter, trim_blocks=True, lstrip_blocks=True, extensions=extensions)
  environment.add_filter("tojson", to_json)
  environment.globals["raise_exception"] = refuse
  environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
  return environment


class Templates(NamedTuple):
  """The chat templates of a tokenizer, by name; and the variables that they get, such as `bos_token`."""

  sources: dict[str, str]
  variables: dict[str, str]
  where: str

  @property
  def digest(self) -> str:
    """Equal digests mean equal templates."""
    return hashlib.sha256(json.dumps([self.sources, self.variables], sort_keys=True).encode()).hexdigest()[:16]

  def source(self, with_tools: bool) -> str:
    """The template for dialogues with tools, or without. Raises ConfigError if there is none."""
    if with_tools and WITH_TOOLS in self.sources:
      return self.sources[WITH_TOOLS]
    if USUAL not in self.sources:
      named = f" named {USUAL!r}, only {', '.join(self.sources)}" if self.sources else ""
      raise ConfigError(
        f"data.tokenizer={self.where!r} has no chat template{named}; put that of its model beside it, as {FILE}"
      )
    return self.sources[USUAL]


def found_beside(file: Path) -> Templates:
  """The templates beside a tokenizer.json: in a file of their own, or else in tokenizer_config.json."""
  configs = [_fields(file.with_name(name)) for name in (CONFIG, OLD_CONFIG)]
  variables = {}
  for name in VARIABLES:
    values = [given.get("content") if isinstance(given := config.get(name), dict) else given for config in configs]
    if text := next((value for value in values if isinstance(value, str)), None):
      variables[name] = text
  given = configs[0].get("chat_template")
  if (own := file.with_name(FILE)).is_file():
    with contextlib.suppress(ValueError):
      given = content(own).decode(errors="replace")
  if isinstance(given, list):  # of {"name": ..., "template": ...}
    named = [entry for entry in given if isinstance(entry, dict)]
    sources = {str(entry.get("name")): str(entry.get("template")) for entry in named}
  else:
    sources = {USUAL: given} if isinstance(given, str) else {}
  return Templates(sources, variables, str(file))


def _fields(file: Path) -> dict[str, Any]:
  with contextlib.suppress(OSError, ValueError):
    if isinstance(found := described(file), dict):
      return found
  return {}


@functools.cache
def compiled(source: str, variables: tuple[tuple[str, str], ...], where: str) -> Template:
  return Template(source, dict(variables), where)


def strings(value: Any) -> Iterator[str]:
  """All texts within a value of JSON."""
  if isinstance(value, str):
    yield value
  elif isinstance(value, dict | list):
    for each in value.values() if isinstance(value, dict) else value:
      yield from strings(each)
