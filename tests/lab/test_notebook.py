"""The tour as a notebook runs from top to bottom in a fresh kernel, and prints what it shows."""

import os
from pathlib import Path

import pytest

from tools import tour

nbclient = pytest.importorskip("nbclient", reason="nbclient runs the notebook")
nbformat = pytest.importorskip("nbformat", reason="nbformat reads the notebook")
pytest.importorskip("ipykernel", reason="the notebook needs a kernel")


def printed(cell: dict) -> str:
  return "".join(output.text for output in cell.outputs if output.get("name") == "stdout").strip("\n")


@pytest.mark.full
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  """The kernel starts in docs/, as Jupyter starts it. Other settings of this machine's JAX do not count."""
  for name in ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS"):
    monkeypatch.delenv(name, raising=False)
  monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", os.path.expanduser("~/.cache/meshwright/tests"))
  monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
  made = nbformat.read(tour.DOCS / "tour.ipynb", as_version=4)
  expected = [printed(cell) for cell in made.cells if cell.cell_type == "code"]
  resources = {"metadata": {"path": str(tour.DOCS)}}
  nbclient.NotebookClient(made, timeout=300, kernel_name="python3", resources=resources).execute()
  cells = [cell for cell in made.cells if cell.cell_type == "code"]
  assert len(cells) > 40
  for cell, text in zip(cells, expected, strict=True):
    assert printed(cell) == text, cell.source
    assert {output.output_type for output in cell.outputs} <= {"stream"}, cell.source
