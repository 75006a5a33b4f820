"""The notebook runs from top to bottom: its planning half alone quickly, all of it with NeMo."""

import os
import sys

import pytest

from tests.conftest import ROOT

nbformat = pytest.importorskip("nbformat")

NOTEBOOK = ROOT / "examples" / "notebook" / "tour.ipynb"


def executed(cells, folder):
    """The cells after a kernel has run them in `folder`; a cell that raises ends the test with its traceback."""
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    notebook.cells = cells(notebook.cells)
    where = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=where).execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(cell):
    return "".join(output.get("text", "") for output in cell.outputs)


def pictures(cells):
    return [output for cell in cells for output in cell.outputs if "image/png" in output.get("data", {})]


@pytest.fixture
def on_path(monkeypatch):
    """`!recipes` finds this environment's command, as it does where the environment is active."""
    monkeypatch.setenv("PATH", f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}")


def test_it_is_committed_without_outputs():
    code = [cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    assert len(code) >= 5
    assert not [cell.source for cell in code if cell.outputs or cell.execution_count]


def test_its_planning_half_needs_no_nemo(tmp_path):
    def planning(cells):
        train = next(i for i, cell in enumerate(cells) if cell.source.startswith("## Train"))
        check = nbformat.v4.new_code_cell("import sys; assert not {'torch', 'nemo'} & set(sys.modules)")
        return [*cells[:train], check]

    cells = executed(planning, tmp_path)
    assert "legal layouts," in outputs(cells[0])
    assert len(pictures(cells)) == 1
    assert outputs(cells[2]).count("tokens/s/GPU") == 4


@pytest.mark.long
@pytest.mark.nemo
def test_all_of_it_trains_and_compares(tmp_path, on_path):
    cells = executed(lambda cells: cells, tmp_path)
    assert len(pictures(cells)) == 2
    assert outputs(cells[-1]).count("done") == 2
