"""Dialogues: rows with a list of messages, each with a role and content. A chat template writes them as one text.

Of this text the turns of the assistant count, each with its end. Where they are, the template may say by the tag
`generation`. Otherwise a turn begins where the template's generation prompt ends: there a model that answers goes on.
It ends with the token that the template puts behind each turn of the assistant.
"""

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from data.text import templates
from data.text.spans import Document, Span
from data.text.templates import Template, Templates
from errors import ConfigError

ASSISTANT = "assistant"
EXAMPLE = '[{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'
PROBE = "Zq7"  # stands for a message
THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # names of what the assistant thought; templates read two


class Dialogue(NamedTuple):
  """A dialogue, as it is in a row.

  Attributes:
    messages: each a dict with `role` and `content`.
    first: the number of the first message that may count. Those before it are the prompt.
    tools: those that the assistant may call, if any.
  """

  messages: list[dict[str, Any]]
  first: int = 0
  tools: Any = None


@dataclasses.dataclass(frozen=True)
class Marks:
  """What a template writes around an answer.

  Attributes:
    begin: the generation prompt; "" if it has none.
    behind: what it puts behind a question, with the generation prompt.
    end: the control token behind an answer; "" without one.
    reads_parts: whether it reads content that is a list of parts: in answers, and in other messages.
  """

  begin: str = ""
  behind: str = ""
  end: str = ""
  reads_parts: tuple[bool, bool] = (False, False)


@dataclasses.dataclass(frozen=True)
class Chat:
  """The chat templates of a tokenizer. `control` are the names of its special tokens."""

  templates: Templates
  control: tuple[str, ...]

  def template(self, tools: Any = None) -> Template:
    """Raises ConfigError if there is none, or if it is not valid."""
    given = self.templates
    source = given.source(with_tools=tools is not None)
    where = f"the chat template of data.tokenizer={given.where!r}"
    return templates.compiled(source, tuple(given.variables.items()), where)

  @property
  def end(self) -> str:
    """The control token that ends an answer; "" without one."""
    return marks_of(self.template(), self.control).end

  def prompt(self, messages: Sequence[dict[str, Any]], tools: Any = None) -> str:
    """A dialogue, and what begins the answer to it."""
    template = self.template(tools)
    return template.write(self._ready(messages, template), tools, prompt=True).text

  def document(self, dialogue: Dialogue, where: str) -> Document:
    """A dialogue as a document. `where` names its row in errors. Raises ConfigError if nothing of it would count."""
    template = self.template(dialogue.tools)
    marks = marks_of(template, self.control)
    messages = self._ready(dialogue.messages, template)
    turns = [i for i, message in enumerate(messages) if message["role"] == ASSISTANT]
    wanted = [i for i in turns if i >= dialogue.first]
    if not wanted:
      roles = ", ".join(dict.fromkeys(repr(message["role"]) for message in messages[dialogue.first :]))
      raise ConfigError(
        f"{where} has no turn of the role {ASSISTANT!r} that could be learned, only {roles or 'none'}; leave it out"
      )
    try:
      text, parts = template.write(messages, dialogue.tools)
      if not template.marks:
        own = _by_borders(text, messages, turns, marks)
        parts = own[-len(wanted) :] if own else _by_beginnings(text, messages, wanted, marks, template, dialogue.tools)
      elif dialogue.first:
        start = len(template.write(messages[: dialogue.first], dialogue.tools).text)
        parts = [part for part in parts if part[0] >= start]
    except ConfigError as error:
      raise ConfigError(f"{where} cannot be learned from: {error}") from error
    if not any(end > start for start, end in parts):
      raise ConfigError(f"{where} has an empty answer, so nothing can be learned from it; leave it out")
    return Document(tuple(_spans(text, parts)), rendered=True, closed=bool(marks.end) or template.marks)

  def _ready(self, messages: Sequence[dict[str, Any]], template: Template) -> list[dict[str, Any]]:
    """Messages as templates read them, and as the library transformers passes them on.

    Fields without a value are left out. What the assistant thought has the names that templates know. Parts of content
    are joined if the template reads only text.
    """
    found = []
    for message in messages:
      own = {name: value for name, value in message.items() if value is not None}
      if (thought := next((own[name] for name in THOUGHTS if name in own), None)) is not None:
        own = {"thinking": thought, **own, "reasoning_content": thought}
      place = 0 if own["role"] == ASSISTANT else 1
      if isinstance(own.get("content"), list) and not marks_of(template, self.control).reads_parts[place]:
        own["content"] = "".join(part["text"] for part in own["content"])
      found.append(own)
    return found


@functools.cache
def marks_of(template: Template, control: tuple[str, ...]) -> Marks:
  """What a template writes around answers, from a dialogue of two messages, behind one of the system if it needs it."""
  ask, answer = {"role": "user", "content": PROBE}, {"role": ASSISTANT, "content": PROBE}
  begin = end = ""
  for before in ((), ({"role": "system", "content": ""},)):
    write = functools.partial(_probed, template, before)
    try:
      alone, begun, whole = write(ask), write(ask, prompt=True), write(ask, answer)
      break
    except ConfigError:
      continue
  else:
    return Marks()  # it writes no such dialogue; rows say what is wrong
  if begun.startswith(alone):
    begin = begun[len(alone) :]
  behind = begun.rpartition(PROBE)[2]
  tail = whole.rpartition(PROBE)[2]
  if control and (found := re.search("|".join(map(re.escape, sorted(control, key=len, reverse=True))), tail)):
    end = found.group()
  parts = {"content": [{"type": "text", "text": PROBE}]}
  reads_parts = []
  for messages in ((ask, answer | parts), (ask | parts, answer)):
    try:
      reads_parts.append(write(*messages) == whole)
    except ConfigError:
      reads_parts.append(False)
  return Marks(begin, behind, end, (reads_parts[0], reads_parts[1]))


def _probed(
  template: Template, before: Sequence[dict[str, Any]], *messages: dict[str, Any], prompt: bool = False
) -> str:
  return template.write([*before, *messages], prompt=prompt).text


Parts = list[tuple[int, int]]


def _by_borders(text: str, messages: list[dict[str, Any]], turns: list[int], marks: Marks) -> Parts:
  """Where answers are: each behind a generation prompt, up to its end. [] unless both are unmistakable.

  Without generation prompts, each is behind what ends the question before it.
  """
  begin, end = marks.begin or marks.behind, marks.end
  if not begin.strip() or not end or text.count(begin) != len(turns):
    return []
  roles = [message["role"] for message in messages[-2 * len(turns) :]]
  if not marks.begin and roles != ["user", ASSISTANT] * len(turns):
    return []
  if any(begin in own or end in own for message in messages for own in templates.strings(message)):
    return []
  parts: Parts = []
  at = 0
  for _ in turns:
    start = text.index(begin, at) + len(begin)
    stop = text.find(end, start)
    following = text.find(begin, start)
    if stop < 0 or 0 <= following < stop:
      return []
    at = stop + len(end)
    parts.append((start, at))
  return parts


def _by_beginnings(
  text: str, messages: list[dict[str, Any]], wanted: list[int], marks: Marks, template: Template, tools: Any
) -> Parts:
  """Where the wanted answers are: each behind what the template writes of the dialogue before it."""
  parts: Parts = []
  for i in wanted:
    before = template.write(messages[:i], tools, prompt=True).text
    after = template.write(messages[: i + 1], tools).text
    if not text.startswith(before):
      raise ConfigError(
        f"its text up to message {i + 1} is not the beginning of its whole text, so it is not known where this answer "
        "begins; put {% generation %} and {% endgeneration %} around answers in the chat template"
      )
    start = len(before)
    if text.startswith(after):
      own = text[start : len(after)]
      size = own.rfind(marks.end) + len(marks.end) if marks.end and marks.end in own else 0
      stop = start + (size or len(own.rstrip()))
    elif (
      marks.end and marks.end in text[start:] and not any(marks.end in own for own in templates.strings(messages[i]))
    ):
      stop = text.index(marks.end, start) + len(marks.end)
    else:
      raise ConfigError(
        f"it is not known where message {i + 1} ends in its text; put {{% generation %}} and {{% endgeneration %}} "
        "around answers in the chat template"
      )
    parts.append((start, stop))
  return parts


def _spans(text: str, parts: Parts) -> list[Span]:
  found, at = [], 0
  encode = lambda start, stop: text[start:stop].encode(errors="replace")
  for start, stop in parts:
    found += [Span(encode(at, start), False), Span(encode(start, stop), True)]
    at = stop
  return [span for span in [*found, Span(encode(at, len(text)), False)] if span.text]


def read_messages(value: Any, option: str, where: str) -> list[dict[str, Any]]:
  """The messages in a row's field. Raises ConfigError for what is not a list of messages."""
  if not isinstance(value, list) or not value:
    raise ConfigError(f"{option} is {repr(value)[:50]} in {where}; use a field with messages such as {EXAMPLE}")
  for number, message in enumerate(value, 1):
    own = f"message {number} of {option} in {where}"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
      fields = f"has {', '.join(map(str, message))}" if isinstance(message, dict) else f"is {repr(message)[:50]}"
      raise ConfigError(f"{own} {fields} and no role; write messages as {EXAMPLE}")
    content, others = message.get("content"), [name for name in message if name not in ("role", "content")]
    if isinstance(content, list):
      if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
        raise ConfigError(f"{own} has content other than text, which this model does not read; leave out the row")
    elif not isinstance(content, str) and (content is not None or not any(message[name] for name in others)):
      raise ConfigError(f"{own} has content={repr(content)[:50]}; use text")
  return value


def without_gaps(value: Any) -> Any:
  """A value of a table without the fields that are None: in tables, all rows have all fields."""
  if isinstance(value, dict):
    return {name: without_gaps(own) for name, own in value.items() if own is not None}
  return [without_gaps(own) for own in value] if isinstance(value, list) else value
