"""Jinja's sandbox with limits: a stranger's chat template neither runs for ever nor fills the memory.

The sandbox itself only says what a template may touch. Here a template takes a step for each turn of a loop, each call
and each filter, and more for long texts. After so many steps, or seconds, it is refused. No value grows beyond LONGEST:
what could make one, such as `+`, `~`, `replace` or `center`, is asked before. templates.py uses it.
"""

import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from types import BuiltinFunctionType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

LONGEST = 1 << 24  # characters of a text
NODES = 1 << 20  # values in lists and objects
STEPS = 1 << 23  # about ten seconds
DIGITS = 1 << 10  # bits of a power
SECONDS = 10.0
SUMMANDS = 64  # in one expression
OFTEN = 64  # steps between two looks at the clock
SOURCE = 1 << 18  # characters of a template; the longest known have 20,000
EACH = 1 << 10  # characters that are as much work as a step
# Filters that do not make one text of what they get.
OF_VALUES = frozenset((
  "length", "count", "first", "last", "list", "map", "select", "reject", "selectattr", "rejectattr", "sort", "unique",
  "groupby", "dictsort", "items", "reverse", "default", "d", "attr", "min", "max", "random", "abs", "int", "float",
  "round",
))  # fmt: skip
# Filters and methods that make a text longer than what they get.
MAY_GROW = frozenset((
  "center", "expandtabs", "format", "format_map", "indent", "join", "ljust", "replace", "rjust", "tojson", "translate",
  "zfill", "urlencode", "e", "escape", "forceescape", "to_bytes",
))  # fmt: skip
# Methods of texts that may be called at once: the sandbox has nothing against them, and they make nothing longer.
HARMLESS = frozenset((
  "strip", "lstrip", "rstrip", "startswith", "endswith", "split", "rsplit", "splitlines", "upper", "lower", "title",
  "capitalize", "find", "index", "count", "partition", "rpartition", "removeprefix", "removesuffix", "isdigit",
))  # fmt: skip
OF_JINJA = ("_loop_vars", "_block_vars")  # what compiled templates add to a call
REFUSED = frozenset(("sum", "lipsum", "xmlattr", "urlize", "batch", "slice", "wordwrap", "pprint"))
WIDE = re.compile(r"\d{5,}|\*|\{[^{}]*\{")  # in a format: a width that may be large


class TooMuch(Exception):
  """The template takes too many steps, or makes a value that is too large."""


class Meter:
  """Counts the steps of one run of a template."""

  def __init__(self) -> None:
    self.start()

  def start(self) -> None:
    self._left, self._look_at = STEPS, STEPS - OFTEN
    self._end = time.monotonic() + SECONDS

  def step(self, size: int = 0) -> None:
    """Counts a step, with a text of this size."""
    if size > LONGEST:
      raise TooMuch(f"it makes a text of more than {LONGEST:,} characters")
    self._left -= 1 + size // EACH
    if self._left < self._look_at:
      self._look_at = self._left - OFTEN
      if self._left < 0 or time.monotonic() > self._end:
        raise TooMuch("it takes too many steps")

  def turns(self, values: Iterable[Any]) -> Iterable[Any]:
    """The values of a loop, with a step for each."""
    return _Counted(values, self) if isinstance(values, Sized) else self.each(values)

  def each(self, values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
      self._left -= 1  # as `step`, which would take longer
      if self._left < self._look_at:
        self.step()
      yield value

  def text(self, *values: Any) -> None:
    """Counts the text that is made of values. Raises TooMuch if lists or objects have too many values for that."""
    size, waiting, count = 0, list(values), 0
    while waiting:
      value = waiting.pop()
      if isinstance(value, str | bytes):
        size += len(value)
      elif isinstance(value, dict):
        waiting += [*value, *value.values()]
      elif isinstance(value, list | tuple):
        waiting += value
      count += 1
      if count > NODES:
        raise TooMuch(f"it makes a text of more than {NODES:,} values")
    self.step(size + 8 * count)


class _Counted:
  """A list, or what else has a length, whose values take a step each."""

  def __init__(self, values: Any, meter: Meter):
    self._values, self._meter = values, meter

  def __len__(self) -> int:
    return len(self._values)

  def __iter__(self) -> Iterator[Any]:
    return self._meter.each(self._values)


class Environment(ImmutableSandboxedEnvironment):
  """A sandbox whose templates take steps of a meter."""

  intercepted_binops = frozenset(("*", "**", "%"))

  def __init__(self, meter: Meter, **options: Any):
    super().__init__(**options)
    self.meter = meter
    self.concat: Any = self._concat  # type: ignore[method-assign]  # of blocks whose text is kept
    del self.globals["lipsum"]
    self.filters = {name: self._counted(name, own) for name, own in self.filters.items() if name not in REFUSED}

  def add_filter(self, name: str, own: Callable[..., Any]) -> None:
    self.filters[name] = self._counted(name, own)

  def _counted(self, name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that takes a step, and whose result is not too large."""
    makes_text, may_grow, step = name not in OF_VALUES, name in MAY_GROW, self.meter.step

    @functools.wraps(own)
    def counted(*given: Any, **options: Any) -> Any:
      if may_grow or (makes_text and type(given[0]) is not str):
        self._check(name, (*given, *options.values()))
      elif not makes_text or len(given[0]) > EACH:
        step()
      return own(*given, **options)

    return counted

  def _check(self, name: str, given: tuple[Any, ...]) -> None:
    """Raises TooMuch if what has this name would make a text of these that is too large."""
    values = [value for value in given if isinstance(value, str | bytes | int | dict | list | tuple)]
    self.meter.text(*values)
    if any(isinstance(value, int) and abs(value) > LONGEST for value in values):
      raise TooMuch(f"{name} gets too large a number")
    texts = [str(value) for value in values if isinstance(value, str | bytes)]
    if name == "replace" and len(texts) > 2:
      self.meter.step((texts[0].count(texts[1]) if texts[1] else len(texts[0]) + 1) * len(texts[2]))
    elif name in ("indent", "expandtabs") and texts:
      width = max([8, *(len(text) for text in texts[1:]), *(value for value in values if isinstance(value, int))])
      self.meter.step((texts[0].count("\n") + texts[0].count("\t") + 1) * width)
    elif name == "join" and texts:
      self.meter.step(sum(map(len, texts)) * max((len(v) for v in values if isinstance(v, list | tuple)), default=1))
    elif name in ("format", "format_map", "translate") and texts:
      if WIDE.search(texts[0]):
        raise TooMuch(f"{name} may make a text that is too large")
      marks = texts[0].count("{") + texts[0].count("%") if name != "translate" else len(texts[0])
      self.meter.step(marks * sum(len(str(value)) for value in values[1:]))

  def call(__self, __context: Any, __obj: Any, *given: Any, **options: Any) -> Any:
    if type(__obj) is BuiltinFunctionType and type(__obj.__self__) is str and __obj.__name__ in HARMLESS:
      if len(__obj.__self__) > EACH:
        __self.meter.step(len(__obj.__self__))
      return __obj(*given, **{name: value for name, value in options.items() if name not in OF_JINJA})
    __self.meter.step()
    own_options = [value for name, value in options.items() if name not in OF_JINJA]
    if __obj is dict or __obj is Namespace:
      __self.meter.text(*given, *own_options)
    elif type(__obj) is BuiltinFunctionType:
      __self._check(__obj.__name__, (__obj.__self__, *given, *own_options))
    elif type(own := getattr(__obj, "__wrapped__", None)) is BuiltinFunctionType:  # str.format, as the sandbox has it
      __self._check(own.__name__, (own.__self__, *given, *own_options))
    return super().call(__context, __obj, *given, **options)

  def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
    if operator == "%" and isinstance(left, str):
      self._check("format", (left, *(right if isinstance(right, tuple) else (right,))))
    elif operator != "%":
      sizes = [len(x) if isinstance(x, str | list | tuple) else abs(x) for x in (left, right)]
      bits = [x.bit_length() if isinstance(x, int) else 64 for x in sizes]
      numbers = all(isinstance(x, int | float) for x in (left, right))
      size = sizes[0] * sizes[1] if not numbers else bits[0] * sizes[1] if operator == "**" else sum(bits) ** 2
      if size > (LONGEST if not numbers or operator == "*" else DIGITS):
        raise OverflowError("its product is too large")
    return super().call_binop(context, operator, left, right)

  def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
    """Lets the turns of loops take steps, and counts the values in lists and objects that a template writes itself."""
    if len(source) > SOURCE:
      raise jinja2.TemplateSyntaxError(f"it has {len(source):,} characters, more than the limit of {SOURCE:,}", 1)
    tree = super()._parse(source, name, filename)
    for loop in tree.find_all(nodes.For):
      loop.iter = _filtered("_turns", loop.iter)
    for joined in tree.find_all(nodes.Concat):
      if len(joined.nodes) > SUMMANDS:
        raise jinja2.TemplateSyntaxError(f"it joins more than {SUMMANDS} values", joined.lineno)
    for own in tree.find_all(nodes.Name):
      if own.name in ("varargs", "kwargs"):
        raise jinja2.TemplateSyntaxError(f"it uses {own.name}, which no chat template needs", own.lineno)
    _limit(tree)
    return tree

  def limited(self, source: str) -> jinja2.Template:
    """The template with this source."""
    self.filters |= {"_turns": self.meter.turns, "_literal": self._literal, "_sum": self._sum}
    found = self.from_string(source)
    found.root_render_func.__globals__["str_join"] = self._joined  # what `~` is compiled to
    return found

  def _joined(self, values: tuple[Any, ...]) -> str:
    for value in values:
      if type(value) is not str or len(value) > EACH:
        self.meter.text(*values)
        break
    return "".join(map(str, values))

  def _sum(self, *values: Any) -> Any:
    """What `+` makes of values, one after another."""
    try:
      text = "".join(values)  # as most
    except TypeError:
      found = values[0]
      for value in values[1:]:
        if isinstance(found, list | tuple) and isinstance(value, list | tuple):
          self.meter.step((len(found) + len(value)) << 3)
        found = found + value
        if isinstance(found, str | bytes):
          self.meter.step(len(found))
      return found
    if len(text) > EACH:
      self.meter.step(len(text))
    return text

  def _concat(self, pieces: Iterable[str]) -> str:
    given = [*pieces]
    self.meter.step(sum(map(len, given)))
    return "".join(given)

  def _literal(self, value: Any) -> Any:
    self.meter.text(value)
    return value


def _filtered(name: str, node: Any, *others: nodes.Expr) -> nodes.Filter:
  return nodes.Filter(node, name, [*others], [], None, None, lineno=node.lineno)


def _limit(node: nodes.Node) -> None:
  """Puts functions that look at sizes where a template adds values, or writes a list or an object of its own.

  Each list may hold the one before it twice, so few of them have more values than there are atoms.
  """
  for field, value in node.iter_fields():
    for at, own in enumerate(value if isinstance(value, list) else [value]):
      if not isinstance(own, nodes.Node):
        continue
      new = own
      if isinstance(own, nodes.Add):
        new = _filtered("_sum", *_summands(own))
      elif isinstance(own, nodes.List | nodes.Dict | nodes.Tuple) and getattr(own, "ctx", "load") == "load":
        new = _filtered("_literal", own) if (own.find(nodes.Name) or own.find(nodes.NSRef)) else own
      _limit(new if isinstance(own, nodes.Add) else own)
      if isinstance(value, list):
        value[at] = new
      elif new is not own:
        setattr(node, field, new)


def _summands(node: Any) -> list[nodes.Expr]:
  """The values that a chain of `+` adds."""
  found = []
  while isinstance(node, nodes.Add):
    found.append(node.right)
    node = node.left
  if len(found) >= SUMMANDS:
    raise jinja2.TemplateSyntaxError(f"it adds more than {SUMMANDS} values", node.lineno)
  return [node, *reversed(found)]
