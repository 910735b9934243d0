"""The notebooks run from top to bottom on models of the repository, and have no output."""

from pathlib import Path

import nbformat
import pytest
from ipykernel.kernelspec import write_kernel_spec
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))

MARKS = {"adaptive": pytest.mark.exhaustive, "conversion": pytest.mark.exhaustive}
"""`tests/engine/test_k_by_load.py`, `tests/test_adaptive_rounds.py` and `tests/convert` test what
these show.
"""

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@pytest.fixture
def kernel(tmp_path, monkeypatch) -> str:
    """Name of a kernel that is this interpreter, whatever kernels the machine has."""
    write_kernel_spec(str(tmp_path / "kernels" / "this-interpreter"))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    return "this-interpreter"


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=MARKS.get(path.stem, pytest.mark.slow))
        for path in NOTEBOOKS
    ],
)
def test_notebook_runs(path, kernel):
    notebook = nbformat.read(path, as_version=4)
    folder = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, kernel_name=kernel, timeout=600, resources=folder).execute()


@each_notebook
def test_notebook_is_stored_without_output(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
