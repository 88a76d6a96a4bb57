"""Notebooks run as they are stored: `python tests/notebook_pages.py NAME` executes one and stores it with its outputs."""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "tutorials"


def executed(path, folder):
    """Run the notebook in `folder` and return it with fresh outputs; a failing cell raises."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(folder)}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # the times of this run
        if cell.cell_type == "code":  # progress bars and messages of libraries
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return notebook


def printed(notebook):
    cells = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    return ["".join(output.text for output in outputs if output.get("name") == "stdout") for outputs in cells]


if __name__ == "__main__":
    import tempfile

    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            notebook = executed(FOLDER / name, folder)
        nbformat.write(notebook, FOLDER / name)
