"""The first lecture in real JupyterLab: its cells, its figures, its panel."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import nbformat
import pytest
from lab import REPOSITORY, Lab

NOTEBOOK = REPOSITORY / "notebooks" / "01_first_training.ipynb"
WAIT_MS, POLL_MS = 60_000, 250
SOURCES = [
    (index, cell.source)
    for index, cell in enumerate(nbformat.read(NOTEBOOK, as_version=4).cells)
    if cell.cell_type == "code"
]
# Points of the loss line in the panel below the cell.
POINTS = """(i) => {
  const cell = document.querySelector(`.jp-Notebook-cell[data-windowed-list-index="${i}"]`);
  const plot = cell?.querySelector('.wb-plot');
  return plot?.data?.[0].y.length ?? 0;
}"""


LOOK_AT = "async (i) => { await window.__notebook.content.scrollToItem(i, 'start'); }"


def index_of(start: str) -> int:
    """The cell whose source starts so, counted with the markdown cells."""
    return next(index for index, source in SOURCES if source.startswith(start))


def run_until(lab: Lab, last: int, first: int = 0) -> None:
    for index, source in SOURCES:
        if first <= index <= last:
            assert lab.run(index), f"{source}\n{lab.output(index)}"


def look_at(lab: Lab, index: int) -> None:
    """JupyterLab takes cells that are far from the screen out of the page."""
    lab.page.evaluate(LOOK_AT, index)
    lab.cell(index).wait_for()


def points(lab: Lab, index: int, more_than: int) -> int:
    """Wait until the loss line has more points -> how many."""
    # What is above the cell may still grow and push it off the screen.
    lab.page.wait_for_function(
        f"([i, least]) => ({POINTS})(i) > least || (({LOOK_AT})(i), false)",
        arg=[index, more_than],
        timeout=WAIT_MS,
        polling=POLL_MS,
    )
    return lab.page.evaluate(POINTS, index)


def press(lab: Lab, index: int, name: str) -> None:
    lab.cell(index).get_by_role("button", name=name, exact=True).click()


def wait_for(lab: Lab, index: int, css: str, text: str) -> None:
    lab.cell(index).locator(css, has_text=text).first.wait_for(timeout=WAIT_MS)


def step_of(lab: Lab, index: int) -> int:
    return int(lab.cell(index).locator(".wb-number b").first.inner_text().replace(",", ""))


@pytest.fixture
def lecture(lab: Lab) -> Iterator[Lab]:
    """The notebook, opened; its last cell runs in any case, so that no rank waits for its lease."""
    shutil.copy(NOTEBOOK, lab.server.root)
    lab.open(NOTEBOOK.name)
    yield lab
    lab.run(SOURCES[-1][0])


@pytest.mark.timeout(400)
def test_the_lecture_runs_and_its_panel_obeys(lecture: Lab):
    lab = lecture
    live = index_of("live = ")
    run_until(lab, live)
    assert points(lab, index_of("four = "), 99) == 100
    for start in ("import plotly", "PARTS"):
        look_at(lab, index_of(start))
        lab.cell(index_of(start)).locator(".js-plotly-plot .main-svg").first.wait_for()

    look_at(lab, live)
    seen = points(lab, live, 0)
    assert points(lab, live, seen) > seen
    press(lab, live, "Pause")
    wait_for(lab, live, ".wb-pill", "Paused")
    paused = step_of(lab, live)
    press(lab, live, "Step")
    wait_for(lab, live, ".wb-number b", str(paused + 1))
    press(lab, live, "Save checkpoint")
    wait_for(lab, live, ".wb-name", f"step-{paused + 1}")
    press(lab, live, "Step")
    wait_for(lab, live, ".wb-number b", str(paused + 2))
    press(lab, live, f"Go back to step-{paused + 1}")
    wait_for(lab, live, "li.wb-save", f"restored step-{paused + 1}")
    assert step_of(lab, live) == paused + 1

    lab.reload()
    look_at(lab, live)
    points(lab, live, 0)
    assert step_of(lab, live) == paused + 1

    run_until(lab, SOURCES[-1][0], live + 1)
    assert "4 ranks stopped." in lab.output(SOURCES[-1][0])
    assert lab.foreign == []
    assert lab.complaints == []
