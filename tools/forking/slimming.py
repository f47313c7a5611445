"""Leaves out of a fork what is not named in --keep, with its tests, docs and dependencies (features.py)."""

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterable

from tools.forking import features
from tools.forking.naming import project
from tools.forking.standins import StandIn
from tools.forking.tree import Files
from tools.forking.trimming import FILES, Tests

# What every fork begins with; `single` is the reference of all strategies, and the default of a config.
ROOTS = ("train.py", "configs/base.py", "configs/single.py", "strategies/single.py", "checkpointing/finished.py")
WITH = {"text": ("data/text/__init__.py",), "synthetic": ("data/synthetic.py",), "images": ("data/images/__init__.py",)}
# Packages whose names are not those of their modules.
MODULE_OF = {
  "orbax-checkpoint": "orbax", "ml-collections": "ml_collections", "absl-py": "absl", "pillow": "PIL",
  "tensorflow-datasets": "tensorflow_datasets", "array-record": "array_record",
  "importlib-resources": "tensorflow_datasets",
  "tensorboardX": "tensorboardX",
}  # fmt: skip
PLAIN = ("Makefile", "LICENSE", "pyproject.toml", "requirements.lock", ".gitignore")
ABOUT = """# {title}

A slim fork of a training repository in JAX: one Transformer, and these features: {kept}.

```
make train                                    # trains configs/fsdp.py on the source of Python's standard library
python train.py --config=configs/{config}.py --config.data.path=my/texts --workdir=runs/mine
make test                                     # the tests that are left
```

`configs/base.py` has every field with its default and meaning. A field of a feature that is not here ends a run with
one sentence. FORK.md says what this was made from.
"""


def slim(files: Files, keep: Iterable[str]) -> Files:
  """The files of a fork with these features alone."""
  kept = features.chosen(keep, files)
  return Slim(files, kept).files()


class Slim:
  """A slim fork. `here`: the files of code that stay as they are; `standins`: those that others stand in for."""

  def __init__(self, every: Files, kept: set[str]):
    self.every, self.kept = every, kept
    self.out = features.left_out(kept, every)
    self.strategies = [name for name in features.strategies_of(every) if name in kept]
    self.here, self.wanted = set[str](), defaultdict[str, set[str]](set)
    self.standins = dict[str, str]()
    tools = [path for path in every if re.fullmatch(r"(tools|lab)/.*[a-z0-9]\.py", path) and path not in self.out]
    roots = [*ROOTS, *(f"{where}/{name}.py" for name in self.strategies for where in ("strategies", "configs"))]
    roots += [path for name in kept for path in WITH.get(name, ())] + tools
    projects = [path for path in every if re.fullmatch(r"projects/.*\.py", path) and path not in self.out]
    self.tests_of_projects = [path for path in projects if re.search(r"/(test_\w+|conftest)\.py$", path)]
    roots += [path for path in projects if path not in self.tests_of_projects]
    self._follow([path for path in roots if path in every])

  def _follow(self, waiting: list[str]) -> None:
    """Finds what the files import, and stand-ins for what is left out, until nothing is added."""
    while waiting:
      path = waiting.pop()
      source = self.standins[path] if path in self.out else self.every[path].decode()
      if path not in self.out:
        if path in self.here:
          continue
        self.here.add(path)
        folders = path.split("/")[:-1]
        around = ["/".join([*folders[:n], "__init__.py"]) for n in range(1, len(folders) + 1)]
        waiting += [init for init in around if init in self.every and init not in self.out]
      for found, names in imports(source, self.every):
        if found not in self.out:
          waiting.append(found)
        elif found not in self.standins or names - self.wanted[found]:
          self.wanted[found] |= names
          feature = self.out[found]
          standin = StandIn(
            self.every[found].decode(), feature, self.wanted[found], features.FEATURES[feature].used.split()
          )
          self.standins[found] = standin.text()
          waiting.append(found)

  def files(self) -> Files:
    """All files of the fork."""
    code = {path: self.every[path] for path in self.here} | {p: text.encode() for p, text in self.standins.items()}
    other = {path: self.every[path] for path in PLAIN if path in self.every}
    folders = {path.rpartition("/")[0] for path in code}
    beside = {
      p: c for p, c in self.every.items() if p.rpartition("/")[0] in folders - {""} and p.endswith((".css", ".js"))
    }
    records = {p: c for p, c in self.every.items() if p.startswith("lab/") and "lab" in self.kept and p not in code}
    of_projects = {path: self.every[path] for path in self.tests_of_projects}
    result = code | beside | records | other | self.tests() | of_projects
    result["README.md"] = self.about().encode()
    result["pyproject.toml"], result["requirements.lock"] = self.dependencies(result)
    return dict(sorted(result.items()))

  def about(self) -> str:
    names = ", ".join(sorted(self.kept))
    config = self.strategies[0] if self.strategies else "single"
    return ABOUT.format(title=project(self.every).capitalize(), kept=names, config=config)

  def tests(self) -> Files:
    """The tests of what is here. A name of a stand-in counts as here only if it is as it was."""
    gone = set(features.strategies_of(self.every)) - self._listed()
    words = [rf"[\"']{name}[\"']" for name in gone] + [
      FILES.pattern,
      r"\.make\b",
      "PRESETS",
      "README",
    ]  # files that are not copied
    words += [feature.words for name, feature in features.FEATURES.items() if name not in self.kept and feature.words]
    files = {path for path in self.every if "/" in path and path not in self.here and not path.startswith("tests/")}
    folders = {path.partition("/")[0] for path in files} - {path.partition("/")[0] for path in self.here}
    words += [rf"[\"']{re.escape(folder)}[\"'/]" for folder in folders]
    words += [rf"\b{re.escape(path)}\b" for path in files if path.startswith("configs/")]
    return Tests(self.every, self._is_here, {path.partition("/")[0] for path in self.here}, "|".join(words)).files()

  def _is_here(self, module: str, name: str) -> bool:
    path = (name and file_of(f"{module}.{name}", self.every)) or file_of(module, self.every)
    return path is None or path in self.here

  def _listed(self) -> set[str]:
    """The strategies that are here: also those that others are made of."""
    return {path.split("/")[1].removesuffix(".py") for path in self.here if re.fullmatch(r"strategies/\w+\.py", path)}

  def dependencies(self, files: Files) -> tuple[bytes, bytes]:
    """pyproject.toml and requirements.lock without the packages that no file of the fork imports."""
    text = self.every["pyproject.toml"].decode()
    modules = {name for path, content in files.items() if path.endswith(".py") for name in imported(content.decode())}
    gone = set[str]()

    def line(found: re.Match[str]) -> str:
      package = re.split(r"[><=;\[ ]", found[2])[0]
      if package == "jax" or MODULE_OF.get(package, package.replace("-", "_")) in modules:
        return found[0]
      gone.add(package.lower())
      return ""

    begin, end = text.index("dependencies = ["), text.index("\n]", text.index("dependencies = ["))
    shorter = re.sub(r'^(  )"([^"]+)",.*\n', line, text[begin : end + 1], flags=re.MULTILINE)
    text = text[:begin] + shorter + text[end + 1 :]
    return text.encode(), unlocked(self.every["requirements.lock"].decode(), gone, project(self.every)).encode()


def packages(files: Files) -> list[str]:
  """The packages that pyproject.toml asks for."""
  asked = tomllib.loads(files["pyproject.toml"].decode())["project"]["dependencies"]
  return [re.split(r"[><=;\[ ]", each)[0] for each in asked]


def imports(source: str, files: Files) -> list[tuple[str, set[str]]]:
  """The files of this repository that a file imports, with the names that it takes from each."""
  found = defaultdict[str, set[str]](set)
  modules = dict[str, str]()  # names that are bound to modules
  tree = ast.parse(source)

  def add(module: str, names: Iterable[str] = ()) -> None:
    parts = module.split(".")
    for n in range(1, len(parts) + 1):
      if path := file_of(".".join(parts[:n]), files):
        found[path].update(names if n == len(parts) else ())

  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      for alias in node.names:
        add(alias.name)
        modules[alias.asname or alias.name] = alias.name
    elif isinstance(node, ast.ImportFrom) and node.module:
      for alias in node.names:
        if file_of(f"{node.module}.{alias.name}", files):
          add(f"{node.module}.{alias.name}")
          modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        else:
          add(node.module, {alias.name})
    elif isinstance(node, ast.Constant) and re.fullmatch(r"data\.\w+", str(node.value)) and file_of(node.value, files):
      add(node.value, {"load"})  # a name in a registry
  for node in ast.walk(tree):
    if isinstance(node, ast.Attribute) and (module := modules.get(ast.unparse(node.value))):
      add(module, {node.attr})
  return list(found.items())


def file_of(module: str, files: Files) -> str | None:
  path = module.replace(".", "/")
  return next((file for file in (f"{path}.py", f"{path}/__init__.py") if file in files), None)


def imported(source: str) -> set[str]:
  """The top names of all modules that a file imports."""
  found = set[str]()
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Import):
      found |= {alias.name.partition(".")[0] for alias in node.names}
    elif isinstance(node, ast.ImportFrom) and node.module:
      found.add(node.module.partition(".")[0])
  return found


def unlocked(lock: str, gone: set[str], name: str) -> str:
  """The locked packages without those that nothing asks for any more. The comments `# via` say what does."""
  entries = re.split(r"^(?=\S)", lock, flags=re.MULTILINE)
  title = lambda entry: re.split(r"[=\[]", entry)[0].strip().lower()
  via = {}
  for entry in entries:
    asked = set(re.findall(r"^ +#(?: via)? +([\w.-]+)", entry, re.MULTILINE)) - {"via"}
    via.setdefault(title(entry), set()).update(each.lower() for each in asked)
  for package in gone & via.keys():
    via[package].discard(name.lower())
  lost = set[str]()
  while more := {package for package, asked in via.items() if package and package not in lost and not asked - lost}:
    lost |= more
  return "".join(entry for entry in entries if title(entry) not in lost)
