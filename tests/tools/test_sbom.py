"""The bill of materials has every locked package, with the hashes that pip checks."""

import re
from pathlib import Path

import pytest
from helpers import one_sentence

from tools import sbom

LOCKS = ["requirements.lock", "compilers.lock", "emulators.lock"]


@pytest.mark.parametrize("name", LOCKS)
def test_every_locked_package_is_in_the_bill_with_its_hashes(name: str):
  text = (sbom.ROOT / name).read_text()
  found = sbom.bill([sbom.ROOT / name])
  expected = set(re.findall(r"^([^\s#]+)==(\S+)", text, re.MULTILINE))
  assert {(own["name"], own["version"]) for own in found["components"]} == expected
  assert sum(len(own["hashes"]) for own in found["components"]) == text.count("--hash=sha256:")
  assert (found["bomFormat"], found["specVersion"]) == ("CycloneDX", "1.5")
  assert len({own["bom-ref"] for own in found["components"]}) == len(expected)


def test_packages_for_some_pythons_say_so():
  jax = [own for own in sbom.bill([sbom.ROOT / LOCKS[0]])["components"] if own["name"] == "jax"]
  assert [own["properties"][0]["value"] for own in jax] == [
    "python_full_version < '3.12'",
    "python_full_version >= '3.12'",
  ]


def test_what_is_installed_beside_the_lock_has_its_versions():
  """Installing the compilers, or the emulators, changes no package of requirements.lock."""
  locked = {(own["name"], own["version"]) for own in sbom.bill([sbom.ROOT / LOCKS[0]])["components"]}
  names = {name for name, _ in locked}
  for lock in LOCKS[1:]:
    others = {(own["name"], own["version"]) for own in sbom.bill([sbom.ROOT / lock])["components"]}
    assert {own for own in others if own[0] in names} <= locked


def test_makefile_and_ci_install_only_what_has_a_hash():
  installs = re.findall(r"^\t.*pip install .*", (sbom.ROOT / "Makefile").read_text(), re.MULTILINE)
  assert len(installs) == 3
  assert all("--require-hashes" in line for line in installs)
  for used in re.findall(r"uses: (\S+)", (sbom.ROOT / ".github/workflows/ci.yml").read_text()):
    assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", used), used


@pytest.mark.parametrize("line", ["a>=1", "a==1", "--hash=sha256:" + "0" * 64])
def test_a_file_that_is_not_locked_is_refused(line: str, tmp_path: Path):
  (tmp_path / "a.lock").write_text(line + "\n")
  with one_sentence("a.lock", "make lock"):
    sbom.bill([tmp_path / "a.lock"])
