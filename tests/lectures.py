"""A lecture of the folder `notebooks`: its cells, executed as they are, and what they showed."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
MOST_LINES = 11
PLOTLY = "application/vnd.plotly.v1+json"
LINK = re.compile(r"\]\(([^)\s]+)\)")
# What the kernel's fork server still has: a rank or a controller that was not ended.
LEFT = """
import psutil
from workbench.driver import session
[child.pid for child in psutil.Process(session.current().forks.pid).children()]
"""

Cells = list[NotebookNode]


def read(name: str) -> NotebookNode:
    """The notebook of that file name."""
    return nbformat.read(FOLDER / name, as_version=4)


def code(cells: Cells) -> Cells:
    """The code cells among them."""
    return [cell for cell in cells if cell.cell_type == "code"]


def run(name: str, folder: Path, *, timeout_s: int, num_passes: int = 1) -> list[Cells]:
    """Code cells with their outputs, of each pass in one kernel; the last says what is left.

    folder: where the kernel runs. timeout_s: of one cell.
    """
    notebook = read(name)
    notebook.cells.append(nbformat.v4.new_code_cell(LEFT))
    where = {"metadata": {"path": str(folder)}}
    client = NotebookClient(notebook, timeout=timeout_s, resources=where)
    done = []
    with client.setup_kernel():
        for _ in range(num_passes):
            for index, cell in enumerate(notebook.cells):
                client.execute_cell(cell, index)
            done.append(copy.deepcopy(code(notebook.cells)))
    return done


def printed(cells: Cells) -> str:
    """All that was printed."""
    return "".join(
        out.text for cell in cells for out in cell.outputs if out.get("name") == "stdout"
    )


def shown(cells: Cells, kind: str) -> list:
    """What was shown in one format, such as PLOTLY, in the order of the cells."""
    outputs = [out for cell in cells for out in cell.outputs if "data" in out]
    return [out.data[kind] for out in outputs if kind in out.data]


def tables(cells: Cells) -> list[list[list[str]]]:
    """The rows below the head of each table that a cell has shown, as texts of its cells."""
    found = []
    for text in shown(cells, "text/markdown"):
        rows = [line.strip("| ").split(" | ") for line in text.splitlines()[2:]]
        found.append([[cell.strip("* ") for cell in row] for row in rows])
    return found


def raised(cells: Cells) -> list[str]:
    """`Class: sentence` of each error."""
    outputs = [out for cell in cells for out in cell.outputs if out.output_type == "error"]
    return [f"{out.ename}: {out.evalue}" for out in outputs]


def number_after(words: str, text: str) -> float:
    """The first number after the words."""
    found = re.search(re.escape(words) + r"\D*?([\d.,]*\d(?:e[-+]\d+)?)", text)
    assert found is not None, f"{words!r} is not in:\n{text}"
    return float(found[1].replace(",", ""))


def check_form(name: str) -> None:
    """Cells fit on a screen and are kept without outputs; links lead somewhere."""
    cells = read(name).cells
    for cell in code(cells):
        assert len(cell.source.splitlines()) <= MOST_LINES
        assert cell.outputs == []
        assert cell.execution_count is None
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    local = [target for target in LINK.findall(text) if "://" not in target]
    assert local
    assert [target for target in local if not (FOLDER / target).exists()] == []
