"""Makes docs/panel.png, the README's picture: the first three magics in a real JupyterLab.

.venv/bin/python tests/browser/panel_png.py docs/panel.png
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from lab import Lab, browse, serve
from playwright.sync_api import sync_playwright

CELLS = (
    "%load_ext workbench",
    "%dist_start -n 4",
    "%dist_train digits --strategy data --steps 500",
    "%dist_stop",
)
PANEL = 2
WIDTH, HEIGHT = 1360, 1450
MARGIN = 12
WAIT_MS = 60_000
PLAIN = """
.jp-Toolbar, .jp-cell-toolbar, .jp-Notebook-footer {display: none !important}
.jp-Collapser, .jp-WindowedPanel-scrollbar {visibility: hidden !important}
.jp-Cell {border-color: transparent !important}
"""
STEP = "() => Number(document.querySelector('.wb-number b').textContent.replace(',', ''))"
# Nothing but the notebook.
ALONE = """async () => {
  const run = (name) => window.jupyterapp.commands.execute(name);
  if (window.jupyterapp.commands.isToggled('application:toggle-left-area'))
    await run('application:toggle-left-area');
  await run('statusbar:toggle');
}"""


def wait_for_step(lab: Lab, step: int) -> None:
    lab.page.wait_for_function(f"() => ({STEP})() >= {step}", timeout=WAIT_MS)


def press(lab: Lab, name: str) -> None:
    lab.cell(PANEL).get_by_role("button", name=name, exact=True).click()


def train(lab: Lab) -> None:
    """Bring the panel to where it has something of everything to show."""
    lab.open(lab.write("first.ipynb", CELLS))
    lab.page.add_style_tag(content=PLAIN)
    lab.page.evaluate(ALONE)
    for index in range(PANEL + 1):
        assert lab.run(index), lab.output(index)
    wait_for_step(lab, 100)
    press(lab, "Save checkpoint")
    lab.cell(PANEL).locator(".wb-name").first.wait_for()
    wait_for_step(lab, 240)
    press(lab, "Pipeline")
    lab.cell(PANEL).locator("li.wb-switch").first.wait_for()
    wait_for_step(lab, 380)


def main(path: Path) -> None:
    """Train, and take the picture while it runs."""
    with (
        tempfile.TemporaryDirectory() as root,
        sync_playwright() as playwright,
        serve(Path(root)) as server,
        browse(playwright, server, width=WIDTH, height=HEIGHT) as lab,
    ):
        train(lab)
        first, last = (lab.cell(index).bounding_box() for index in (0, PANEL))
        assert first is not None
        assert last is not None
        top, bottom = first["y"] - MARGIN, last["y"] + last["height"]
        clip = {"x": last["x"], "y": top, "width": last["width"], "height": bottom - top}
        lab.page.screenshot(path=str(path), clip=clip)
        lab.run(PANEL + 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
