"""What earlier commits wrote is still read: prepared data, checkpoints of all kinds, exports.

tests/kept/make.py has made it. A failure here means that a user's folder would be read in another way, or be refused.
"""

import json
import zipfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers import PARITY, in_full
from kept import make
from safetensors.numpy import load_file

from tools import evaluate, generate

PREPARED = sorted(file.stem for file in make.FOLDER.glob("data/*.json"))
RUNS = {file.parent.name: json.loads(file.read_text()) for file in sorted(make.FOLDER.glob("runs/*/run.json"))}
READ = [
  (tool, name, source) for tool in ("evaluate", "generate") for name in RUNS for source in RUNS[name][tool]["found"]
]
READ_FIRST = [case for case in READ if case != ("generate", "experts", "export")]
EXPORTED = sorted(folder.parent.name for folder in make.FOLDER.glob("runs/*/export"))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
  """A folder with the sources and the runs, in which the test runs."""
  for tool in (evaluate, generate):
    monkeypatch.setattr(tool, "start_jax", lambda config: jax.devices())  # keeps the cache of conftest.py
  make.lay_out(tmp_path)
  monkeypatch.chdir(tmp_path)
  return tmp_path


def assert_holds(found: Any, kept: Any, where: str = "") -> None:
  """Checks that `found` has all that was kept. Dicts may have more; numbers that are not whole agree up to rounding."""
  if isinstance(kept, dict):
    assert kept.keys() <= found.keys(), where
    for name in kept:
      assert_holds(found[name], kept[name], f"{where} {name}")
  elif isinstance(kept, list) and any(isinstance(x, dict) for x in kept):
    assert len(found) == len(kept), where
    for i, pair in enumerate(zip(found, kept, strict=True)):
      assert_holds(*pair, f"{where} {i}")
  else:
    assert found == (pytest.approx(kept, rel=PARITY) if isinstance(kept, float) else kept), where


@pytest.mark.parametrize("name", PREPARED)
def test_a_source_is_prepared_as_before_and_found_in_the_cache(name: str, here: Path):
  """Equal fingerprints and examples; equal files, under equal names in the cache.

  If the form of prepared files is meant to change, its FORMAT has to, and every user's data is prepared again. Then
  remove `data/NAME.zip` where it differs; what `data/NAME.json` says must not differ.
  """
  kept = json.loads((make.FOLDER / f"data/{name}.json").read_text())
  if name == "folder":  # rows and plain text: since data.form is there, whoever wants both names the files
    own = (file for file in sorted(Path("folder").rglob("[!.]*")) if file.is_file() and file.suffix != ".dat")
    kept["fields"]["data.path"] = kept["found"]["parts"][0]["name"] = ",".join(map(str, own))
  found, files = make.loaded(kept["fields"], here)
  assert_holds(found, kept["found"])
  if (archive := make.FOLDER / f"data/{name}.zip").exists():
    with zipfile.ZipFile(archive) as opened:
      for file in opened.namelist():
        if file.endswith("meta.json"):  # may say more
          assert_holds(json.loads(files[file]), json.loads(opened.read(file)), file)
        else:
          assert files[file] == opened.read(file), file


@pytest.mark.parametrize("name", in_full(RUNS, "windows"))
def test_a_kept_run_resumes_with_the_next_batches_and_losses(name: str, capsys: pytest.CaptureFixture):
  """Under another strategy than the one that saved."""
  kept, workdir = RUNS[name], Path("runs", name, "workdir")
  step = min(map(int, kept["batches"]))
  assert kept["resumed_under"] != kept["saved_under"]
  found = make.trained(make.config_of(kept["resumed_under"], kept["fields"]), workdir, step)
  assert f"resumed   at step {step}, saved by {kept['saved_under']}" in capsys.readouterr().out
  assert found["batches"].keys() == kept["batches"].keys()
  assert_holds(found["batches"], kept["batches"])
  assert_holds(found["lines"], kept["lines"])


@pytest.mark.parametrize(
  "tool, name, source", in_full(READ, *(case for case in READ if case != ("generate", "experts", "export")))
)
def test_a_tool_finds_in_a_kept_model_what_it_found(tool: str, name: str, source: str):
  kept, run = RUNS[name][tool], {"evaluate": make.evaluated, "generate": make.generated}[tool]
  assert_holds(run(f"runs/{name}/{source}", kept["arguments"]), kept["found"][source])


@pytest.mark.parametrize("name", EXPORTED)
def test_a_kept_run_is_exported_as_before(name: str):
  """The weights bit for bit."""
  make.export_to(Path("out"), f"runs/{name}/workdir")
  kept = {file.name: file for file in Path("runs", name, "export").iterdir()}
  assert kept.keys() <= {file.name for file in Path("out").iterdir()}
  for file in kept.values():
    if file.suffix == ".safetensors":
      found, expected = load_file(Path("out", file.name)), load_file(file)
      assert found.keys() == expected.keys()
      for tensor in expected:
        np.testing.assert_array_equal(found[tensor], expected[tensor], tensor)
    else:
      assert json.loads(Path("out", file.name).read_text()) == json.loads(file.read_text())
