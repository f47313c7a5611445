"""A bill of materials: every package of the locked files, with its version and the hashes of its files.

    python -m tools.sbom [FILE.lock ...] > sbom.json

Without names it takes requirements.lock alone, which is what `make train` installs. It writes CycloneDX 1.5 as JSON
(cyclonedx.org), the same for the same files. A package that is locked in several versions, for different Pythons, is
there once for each, and `meshwright:marker` says where it is installed.
"""

import argparse
import json
import re
import tomllib
from pathlib import Path
from typing import Any

from errors import ConfigError
from runtime.command_line import bad_input_ends_the_program

ROOT = Path(__file__).parents[1]
PACKAGE = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[^ ;\\]+)(?: *; *(?P<marker>[^\\]+?))? *\\?$")
HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


def packages(lock: str, where: str) -> list[dict[str, Any]]:
  """The packages of a locked file, as components. Raises ConfigError for a line that is none, or without hashes."""
  found: list[dict[str, Any]] = []
  for number, line in enumerate(lock.splitlines(), 1):
    text = line.strip()
    if not text or text.startswith("#"):
      continue
    if hashed := HASH.match(text):
      if not found:
        raise ConfigError(f"line {number} of {where} is a hash of nothing; write the file again with `make lock`")
      found[-1]["hashes"].append({"alg": "SHA-256", "content": hashed[1]})
      continue
    if not (matched := PACKAGE.match(text)):
      raise ConfigError(
        f"line {number} of {where} is no package with one version; write the file again with `make lock`"
      )
    name, version, marker = matched["name"], matched["version"], matched["marker"]
    reference = f"pkg:pypi/{re.sub(r'[-_.]+', '-', name).lower()}@{version}"
    component = {"type": "library", "bom-ref": reference, "name": name, "version": version, "purl": reference}
    where_installed = {"properties": [{"name": "meshwright:marker", "value": marker}]} if marker else {}
    found.append(component | where_installed | {"hashes": []})
  if without := next((own for own in found if not own["hashes"]), None):
    raise ConfigError(f"{without['name']} has no hash in {where}; write the file again with `make lock`")
  return found


def bill(locks: list[Path]) -> dict[str, Any]:
  """The bill of materials of locked files."""
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  components: dict[str, dict[str, Any]] = {}
  for lock in locks:
    for component in packages(lock.read_text(), str(lock)):
      components.setdefault(component["bom-ref"], component)
  own = {"type": "application", "bom-ref": "meshwright", "name": project["name"], "version": project["version"]}
  return {
    "bomFormat": "CycloneDX",
    "specVersion": "1.5",
    "version": 1,
    "metadata": {"component": own},
    "components": [components[reference] for reference in sorted(components)],
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("locks", nargs="*", type=Path, default=[ROOT / "requirements.lock"])
  print(json.dumps(bill(parser.parse_args().locks), indent=2))


if __name__ == "__main__":
  with bad_input_ends_the_program():
    main()
