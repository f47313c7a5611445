"""The name of a fork in place of this repository's: in every text, in the right case, and in the names of files."""

import importlib.metadata
import keyword
import re
import sys
import tomllib

from errors import ConfigError
from tools.forking.tree import Files, text_of

# A license names those who wrote the code, and these stay. Benchmarks' records are measurements of this repository.
KEPT = ("LICENSE",)


def check(name: str, files: Files) -> None:
  """Raises ConfigError unless this can be the name of a fork, which may become the name of its package."""
  said, other = f"NAME={name!r}", "choose another, such as acme_lm"
  if not name.isidentifier() or keyword.iskeyword(name) or not name.isascii():
    raise ConfigError(f"{said} cannot be imported; use letters, digits and _, and no word of Python, such as acme_lm")
  if name in sys.stdlib_module_names:
    raise ConfigError(f"{said} is a module of Python's standard library; {other}")
  top = {path.partition("/")[0].removesuffix(".py") for path in files} - {project(files)}
  if name in top:
    raise ConfigError(f"{said} is a file or folder of this repository; {other}")
  if name in importlib.metadata.packages_distributions():
    raise ConfigError(f"{said} is an installed package; {other}")


def project(files: Files, field: str = "name") -> str:
  """The name of the project, or another field of it, from pyproject.toml."""
  return str(tomllib.loads(files["pyproject.toml"].decode())["project"][field])


def forms(name: str) -> dict[str, str]:
  """A name in each case: acme_lm, Acme Lm in a sentence, ACME_LM for environment variables."""
  return {"lower": name, "title": name.replace("_", " ").title(), "upper": name.upper()}


def renamed(files: Files, name: str) -> Files:
  """The files of a fork with this name."""
  ours, theirs = forms(project(files)), forms(name)
  to = {ours[case]: theirs[case] for case in ("upper", "title", "lower")}
  # Names that join words by _ are one word for \b, so the borders here are letters and digits.
  words = re.compile(rf"(?<![A-Za-z0-9])({'|'.join(map(re.escape, to))})(?![A-Za-z0-9])")
  # Kubernetes and bills of materials have names with hyphens.
  hyphens = lambda text: words.sub(lambda found: to[found[0]].replace("_", "-"), text)
  plain = lambda text: words.sub(lambda found: to[found[0]], text)

  result = Files()
  for path, content in files.items():
    text = text_of(content)
    if text is not None and path not in KEPT:
      content = (hyphens if path.endswith("jobset.yaml") else plain)(text).encode()
    result[plain(path)] = content
  return result
