"""The first lecture, executed as it is: from top to bottom, and once more in the same kernel."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "01_first_training.ipynb"
TIMEOUT_S = 100
MOST_LINES = 11
NUM_PASSES = 2
PLOTLY = "application/vnd.plotly.v1+json"
LINK = re.compile(r"\]\(([^)\s]+)\)")
# What the kernel's fork server still has: a rank or a controller that was not ended.
LEFT = """
import psutil
from workbench.driver import session
[child.pid for child in psutil.Process(session.current().forks.pid).children()]
"""

Cells = list[NotebookNode]


def lecture() -> NotebookNode:
    return nbformat.read(NOTEBOOK, as_version=4)


def code(cells: Cells) -> Cells:
    return [cell for cell in cells if cell.cell_type == "code"]


def printed(cells: Cells) -> str:
    return "".join(
        out.text for cell in cells for out in cell.outputs if out.get("name") == "stdout"
    )


def shown(cells: Cells, kind: str) -> list:
    outputs = [out for cell in cells for out in cell.outputs if "data" in out]
    return [out.data[kind] for out in outputs if kind in out.data]


def number_after(words: str, text: str) -> float:
    found = re.search(re.escape(words) + r"\D*?([\d.,]*\d(?:e[-+]\d+)?)", text)
    assert found is not None, f"{words!r} is not in:\n{text}"
    return float(found[1].replace(",", ""))


@pytest.fixture(scope="module")
def passes(tmp_path_factory: pytest.TempPathFactory) -> list[Cells]:
    """Code cells with their outputs, of each pass in one kernel; the last says what is left."""
    notebook = lecture()
    notebook.cells.append(nbformat.v4.new_code_cell(LEFT))
    folder = str(tmp_path_factory.mktemp("lecture"))
    client = NotebookClient(notebook, timeout=TIMEOUT_S, resources={"metadata": {"path": folder}})
    done = []
    with client.setup_kernel():
        for _ in range(NUM_PASSES):
            for index, cell in enumerate(notebook.cells):
                client.execute_cell(cell, index)
            done.append(copy.deepcopy(code(notebook.cells)))
    return done


@pytest.mark.parametrize("turn", range(NUM_PASSES))
class TestEachPass:
    def test_one_rank_and_four_learn_the_same(self, passes: list[Cells], turn: int):
        assert (
            number_after("Largest relative difference in 100 steps:", printed(passes[turn])) < 1e-5
        )
        one, four = (
            text for text in shown(passes[turn], "text/plain") if text.startswith("{'accuracy'")
        )
        assert one == four
        assert number_after("accuracy", one) > 0.9

    def test_the_ranks_show_different_gradients_and_then_one(self, passes: list[Cells], turn: int):
        text = printed(passes[turn])
        assert "[rank 3] gradient before: [[3.0, 4.0, 5.0]]" in text
        assert "[ranks 0-3] gradient after:  [[1.5, 2.5, 3.5]]" in text

    def test_each_rank_sends_what_a_ring_needs(self, passes: list[Cells], turn: int):
        text = printed(passes[turn])
        ring_mb = number_after("Expected in a ring of 4:", text)
        for rank in range(4):
            assert number_after(f"Rank {rank} sent", text) == pytest.approx(ring_mb, rel=0.02)

    def test_the_same_steps_again_give_the_same_losses(self, passes: list[Cells], turn: int):
        assert "Largest difference between the two times: 0.0\n" in printed(passes[turn])

    def test_every_figure_has_all_its_data(self, passes: list[Cells], turn: int):
        curves, times, shares = shown(passes[turn], PLOTLY)
        assert [len(trace["x"]) for trace in curves["data"]] == [100, 100]
        assert [trace["name"] for trace in times["data"]][:2] == ["compute", "communication"]
        guessed, measured = (trace["y"] for trace in shares["data"])
        assert len(guessed) == len(measured) > 1

    def test_no_rank_is_left(self, passes: list[Cells], turn: int):
        assert shown(passes[turn][-1:], "text/plain") == ["[]"]
        assert "4 ranks stopped." in printed(passes[turn])


def test_cells_are_short_and_kept_without_outputs():
    for cell in code(lecture().cells):
        assert len(cell.source.splitlines()) <= MOST_LINES
        assert cell.outputs == []
        assert cell.execution_count is None


def test_links_lead_somewhere():
    text = "\n".join(cell.source for cell in lecture().cells if cell.cell_type == "markdown")
    local = [target for target in LINK.findall(text) if "://" not in target]
    assert local
    assert [target for target in local if not (NOTEBOOK.parent / target).exists()] == []
