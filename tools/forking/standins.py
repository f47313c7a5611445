"""Files that stand in for those of a feature that a fork leaves out, where other files still import them.

A stand-in has the names that are imported from it, with the shortest code that works while the feature is off:

- constants, exceptions and the fields of classes are as they were;
- functions that every run calls, to find that the feature is off (`Feature.used`), are as they were;
- all others raise ConfigError, which names the feature.
"""

import ast
from collections.abc import Iterable, Iterator

HEAD = '"""A stand-in: this fork leaves out {feature}. Make it again with --keep=...,{feature} to have it."""\n'
RAISE = 'raise ConfigError("this fork leaves out {feature}; make it again with --keep=...,{feature} (tools/fork.py)")'
Function = ast.FunctionDef | ast.AsyncFunctionDef


class StandIn:
  """The stand-in of one file.

  Args:
    source: the file.
    feature: the name of its feature.
    wanted: the names that others import from it; "*" for a name that may be any.
    used: functions and methods that stay, as `name` or `Class.name`.
  """

  def __init__(self, source: str, feature: str, wanted: Iterable[str], used: Iterable[str]):
    self.source, self.feature, self.used = source, feature, set(used)
    self.lines = source.splitlines(keepends=True)
    self.body = ast.parse(source).body[1:]  # without the docstring
    typing = [node for node in self.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    self.types = {self._bound(alias): each for node in typing for each in node.body for alias in each.names}  # type: ignore[attr-defined]
    self.defined = dict(self._names())
    self.wanted = set(wanted)
    self.kept, self.typed = set[str](), set[str]()
    waiting = [name for name in self.wanted if name in self.defined]
    while waiting:
      name = waiting.pop()
      if name not in self.kept:
        self.kept.add(name)
        named = {other for node in self.needs(name) for other in _names_in(node)}
        self.typed |= named & self.types.keys()
        waiting += ["TYPE_CHECKING"] * bool(self.typed) + sorted(named & self.defined.keys())

  def _names(self) -> Iterator[tuple[str, ast.stmt]]:
    """The names that the file defines, with the statements that do so."""
    for node in self.body:
      if isinstance(node, Function | ast.ClassDef):
        yield node.name, node
      elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
          for each in ast.walk(target):
            if isinstance(each, ast.Name):
              yield each.id, node
      elif isinstance(node, ast.Import | ast.ImportFrom):
        for alias in node.names:
          yield (alias.asname or alias.name).partition(".")[0], node

  def needs(self, name: str) -> list[ast.AST]:
    """What a kept name still refers to."""
    node = self.defined[name]
    if isinstance(node, Function):
      return [node] if name in self.used or self._at_import(name) else []
    if isinstance(node, ast.ClassDef):
      return [*node.decorator_list, *node.bases, *node.keywords, *self.members(node)]
    return [] if isinstance(node, ast.Import | ast.ImportFrom) else [node]

  def members(self, node: ast.ClassDef) -> list[ast.stmt]:
    """What is left of a class: its fields, and the methods that stay."""
    fields = [each for each in node.body if not isinstance(each, Function)]
    if self.is_data(node) and not any(name.startswith(f"{node.name}.") for name in self.used):
      return fields
    return [each for each in node.body if not isinstance(each, Function) or f"{node.name}.{each.name}" in self.used]

  def is_data(self, node: ast.ClassDef) -> bool:
    said = " ".join(ast.unparse(each) for each in (*node.decorator_list, *node.bases))
    return any(
      word in said for word in ("dataclass", "NamedTuple", "Enum", "Error", "Exception", "TypedDict", "Protocol")
    )

  def _at_import(self, name: str) -> bool:
    """Whether a constant is made by this function, so that it runs when the file is imported."""
    constants = (node for node in self.body if isinstance(node, ast.Assign | ast.AnnAssign))
    return any(
      isinstance(each, ast.Call) and isinstance(each.func, ast.Name) and each.func.id == name
      for node in constants for each in ast.walk(node)
    )  # fmt: skip

  def text(self) -> str:
    """The source of the stand-in."""
    parts, done = [], set[int]()
    for name, node in self.defined.items():
      if name in self.kept and not isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in done:
        done.add(id(node))
        parts.append(self._statement(node))
    code = "\n".join(parts)
    imports = "".join(f"{line}\n" for line in self.imports())
    error = "" if "ConfigError" not in code or "import ConfigError" in imports else "from errors import ConfigError\n"
    types = "".join(f"  {ast.unparse(self.types[name])}\n" for name in sorted(self.typed))
    types = f"\nif TYPE_CHECKING:\n{types}" if types else ""
    return f"{HEAD.format(feature=self.feature)}\n{imports}{error}{types}\n\n{code}"

  def imports(self) -> list[str]:
    """The imports of what is left."""
    found = list[str]()
    for node in self.body:
      if isinstance(node, ast.Import):
        found += [ast.unparse(ast.Import([a])) for a in node.names if self._bound(a) in self.kept]
      elif isinstance(node, ast.ImportFrom):
        names = [self._exported(alias) for alias in node.names if self._bound(alias) in self.kept]
        found += [ast.unparse(ast.ImportFrom(node.module, names, node.level))] if names else []
    return found

  def _exported(self, alias: ast.alias) -> ast.alias:
    """As `x as x` if others import it from here."""
    return ast.alias(alias.name, alias.asname or (alias.name if alias.name in self.wanted else None))

  @staticmethod
  def _bound(alias: ast.alias) -> str:
    return (alias.asname or alias.name).partition(".")[0]

  def _statement(self, node: ast.stmt) -> str:
    if isinstance(node, Function) and node.name not in self.used and not self._at_import(node.name):
      return f"\ndef {node.name}(*_, **__):\n  {RAISE.format(feature=self.feature)}\n"
    if isinstance(node, ast.ClassDef):
      return f"\n{self._class(node)}\n"
    return f"\n{self._lines(node)}" if isinstance(node, Function) else self._lines(node)

  def _class(self, node: ast.ClassDef) -> str:
    members = self.members(node)
    inside = [self._lines(each) for each in members]
    makes = any(isinstance(each, Function) and each.name == "__init__" for each in node.body)
    if makes and not any(isinstance(each, Function) and each.name == "__init__" for each in members):
      inside.append(f"  def __init__(self, *_, **__):\n    {RAISE.format(feature=self.feature)}\n")
    first = node.decorator_list[0].lineno if node.decorator_list else node.lineno
    head = "".join(self.lines[first - 1 : node.body[0].lineno - 1])
    return head + "\n".join(inside or ["  pass\n"])

  def _lines(self, node: ast.stmt) -> str:
    decorators = node.decorator_list if isinstance(node, Function | ast.ClassDef) else []
    first = decorators[0].lineno if decorators else node.lineno
    return "".join(self.lines[first - 1 : node.end_lineno])


def _names_in(node: ast.AST) -> Iterator[str]:
  """The names that code refers to; of quoted annotations, too."""
  for each in ast.walk(node):
    if isinstance(each, ast.Name):
      yield each.id
    elif isinstance(each, ast.Constant) and isinstance(each.value, str) and each.value.isidentifier():
      yield each.value
