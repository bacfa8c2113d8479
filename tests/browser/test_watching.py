"""Two notebooks in real JupyterLab: the second watches, and its button takes over."""

from __future__ import annotations

from pathlib import Path

from lab import Lab
from test_panel import wait_for

WAIT_MS = 60_000
FIRST = ("%load_ext workbench", "%dist_start -n 2;", "%dist_train digits --steps 1000000")
SECOND = ("%load_ext workbench", "%dist_attach", "%dist_pause")
STEP = "() => +document.querySelector('.wb-number b').textContent.replaceAll(',', '')"


def opened(lab: Lab, name: str, cells: tuple[str, ...], *, workspace: str = "") -> Lab:
    """A tab of 1280 x 800 with a notebook."""
    tab = Lab(lab.server, lab.context, lab.context.new_page())
    tab.page.set_viewport_size({"width": 1280, "height": 800})
    tab.open(tab.write(name, cells), workspace=workspace)
    return tab


def test_a_second_notebook_watches_and_its_button_takes_over(lab: Lab, tmp_path: Path):
    first = opened(lab, "first.ipynb", FIRST)
    for index in range(3):
        assert first.run(index)
    wait_for(first, ".wb-pill", "Running", 2)
    second = opened(lab, "second.ipynb", SECOND, workspace="second")
    assert second.run(0)
    assert second.run(1)
    wait_for(second, ".wb-watching", "Watching: notebook first.ipynb (process", 1)
    panel = second.cell(1)
    assert not panel.get_by_role("button", name="Pause", exact=True).is_visible()
    before = second.page.evaluate(STEP)
    moved = f"(before) => ({STEP})() > before + 20"
    second.page.wait_for_function(moved, arg=before, timeout=WAIT_MS)
    panel.locator(".wb-plot .main-svg").first.wait_for(timeout=WAIT_MS)
    second.screenshot(tmp_path / "watching.png")

    panel.get_by_role("button", name="Take over", exact=True).click()
    panel.get_by_role("button", name="Pause", exact=True).wait_for(timeout=WAIT_MS)
    assert not panel.locator(".wb-watching").is_visible()
    assert second.run(2)
    wait_for(second, ".wb-pill", "Paused", 1)
    wait_for(first, ".wb-message", "was taken over by notebook second.ipynb (process", 2)
    first.screenshot(tmp_path / "taken.png")
    assert first.complaints == second.complaints == []
