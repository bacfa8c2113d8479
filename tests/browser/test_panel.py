"""The panel in real JupyterLab, on a run that trains nothing."""

from __future__ import annotations

import json

import pytest
from lab import Lab

SETUP = """
import threading, time
from tests.browser.panel_run import StandIn
from workbench.notebook.panel import Panel
run = StandIn(step=137)
run.change(state="running")
panel = Panel(run)
"""
DRAWN = "() => [...document.querySelectorAll('.wb-plot')].map(p => p.data && p.data[0].y.length)"
NUMBERS = "() => [...document.querySelectorAll('.wb-number b')].map(b => b.textContent)"
WAIT_MS = 20_000


def shown(lab: Lab, cells: tuple[str, ...] = ("panel",)) -> None:
    lab.open(lab.write("panel.ipynb", (SETUP, *cells)))
    assert lab.run(0)
    assert lab.run(1)
    drawn(lab)


def drawn(lab: Lab, points: int = 137, panels: int = 1) -> None:
    """Wait until each figure of each panel on the page has its data."""
    want = json.dumps([points, points, 4] * panels, separators=(",", ":"))
    lab.page.wait_for_function(f"() => JSON.stringify(({DRAWN})()) === '{want}'", timeout=WAIT_MS)


def press(lab: Lab, name: str, index: int = 1) -> None:
    lab.cell(index).get_by_role("button", name=name, exact=True).click()


def wait_for(lab: Lab, css: str, text: str, index: int = 1) -> None:
    lab.cell(index).locator(css, has_text=text).first.wait_for(timeout=WAIT_MS)


def test_figures_and_numbers_are_those_of_the_run(lab: Lab):
    shown(lab, ("panel", "run.advance(10)"))
    assert lab.page.evaluate(NUMBERS) == ["137", "0.7461", "2,596", "12 %", "4 / 4"]
    assert lab.run(2)
    drawn(lab, 147)
    wait_for(lab, ".wb-number b", "147")
    assert lab.foreign == []
    assert lab.complaints == []


def test_buttons_command_the_run_and_follow_its_state(lab: Lab):
    shown(lab, ("panel", "run.commands"))
    press(lab, "Pause")
    wait_for(lab, ".wb-pill", "Paused")
    assert lab.cell(1).get_by_role("button", name="Pause", exact=True).is_disabled()
    press(lab, "Step")
    wait_for(lab, ".wb-number b", "138")
    press(lab, "Save checkpoint")
    wait_for(lab, ".wb-name", "step-138")
    press(lab, "Sharded")
    wait_for(lab, "li.wb-switch", "now sharded")
    press(lab, "Resume")
    wait_for(lab, ".wb-pill", "Running")
    press(lab, "Restore step-138")
    wait_for(lab, "li.wb-save", "Restored step-138.")
    press(lab, "Stop")
    wait_for(lab, ".wb-pill", "Stopped")
    assert lab.run(2)
    for told in ("'pause'", "'restore', {'what': 'step-138'}", "'switch', {'shard': True}"):
        assert told in lab.output(2)


def test_a_refused_command_says_why_on_the_panel(lab: Lab):
    refuse = "def ask(verb, **more): raise ValueError('no <b>disk</b>')\nrun.ask = ask\npanel"
    shown(lab, (refuse,))
    press(lab, "Save checkpoint")
    wait_for(lab, ".wb-message.wb-error", "ValueError: no <b>disk</b>")


def test_stop_arrives_while_a_cell_keeps_the_kernel(lab: Lab):
    busy = (
        "until_s = time.monotonic() + 15\n"
        "while run.snapshot()['state'] == 'running' and time.monotonic() < until_s:\n"
        "    time.sleep(0.05)\n"
        "print('left at', run.snapshot()['state'])"
    )
    shown(lab, ("panel", busy))
    lab.page.evaluate(
        "() => { const a = window.jupyterapp, n = window.__notebook.content;"
        " n.activeCellIndex = 2; n.deselectAll(); a.commands.execute('notebook:run-cell'); }"
    )
    lab.cell(2).locator(".jp-InputPrompt", has_text="[*]").wait_for()
    press(lab, "Stop")
    wait_for(lab, ".jp-OutputArea-output", "left at stopped", index=2)


def test_keys_on_a_button_leave_the_notebook_alone(lab: Lab):
    shown(lab)
    count = "() => window.__notebook.content.widgets.length"
    before = lab.page.evaluate(count)
    lab.cell(1).get_by_role("button", name="Pause", exact=True).focus()
    for key in ("b", "a", "d", "d"):
        lab.page.keyboard.press(key)
    assert lab.page.evaluate(count) == before
    lab.page.keyboard.press("Enter")
    wait_for(lab, ".wb-pill", "Paused")


def test_a_reload_and_a_second_view_show_the_same(lab: Lab):
    shown(lab, ("panel", "panel"))
    assert lab.run(2)
    drawn(lab, panels=2)
    before = lab.page.evaluate(NUMBERS)
    assert before[:5] == before[5:]
    press(lab, "Pause", index=2)
    wait_for(lab, ".wb-pill", "Paused", index=1)
    lab.reload()
    drawn(lab, panels=2)
    assert lab.page.evaluate(NUMBERS) == before
    press(lab, "Resume", index=2)
    wait_for(lab, ".wb-pill", "Running", index=1)


def test_a_kernel_that_is_gone_greys_the_panel_and_leaves_a_picture(lab: Lab):
    shown(lab)
    lab.restart_kernel()
    wait_for(lab, ".wb-veil", "run the cell again")
    assert not lab.cell(1).locator(".wb-still").is_visible()
    lab.reload()
    wait_for(lab, ".wb-still", "Still picture")
    assert "not found" not in lab.output(1)


def test_the_notebook_keeps_a_picture_of_the_end(lab: Lab):
    shown(lab, ("panel", "run.advance(363)"))
    assert lab.run(2)
    wait_for(lab, ".wb-pill", "Finished")
    kept = (
        "() => [...Array(window.__notebook.content.widgets[1].model.outputs.length).keys()].some(i"
        " => /500 .{0,3}500/.test(window.__notebook.content.widgets[1].model.outputs.get(i)"
        ".data['text/html']))"
    )
    lab.page.wait_for_function(kept, timeout=WAIT_MS)


@pytest.mark.parametrize("width", [1920, 1280, 760])
def test_nothing_is_cut_or_covered(lab: Lab, width: int):
    shown(lab)
    lab.page.set_viewport_size({"width": width, "height": 720})
    lab.page.wait_for_function(
        "() => [...document.querySelectorAll('.wb-plot')].every("
        "p => Math.abs(p.querySelector('.main-svg').clientWidth - p.clientWidth) < 2)"
    )
    cut = lab.page.evaluate(
        "() => [...document.querySelectorAll('.wb-panel *')].filter(e => e.scrollWidth >"
        " e.clientWidth + 1 && getComputedStyle(e).display !== 'inline' && e.clientWidth"
        " && !e.closest('svg')).map(e => e.className)"
    )
    assert cut == []


def test_a_closed_panel_leaves_the_page(lab: Lab):
    shown(lab, ("panel", "panel.close()\nthreading.enumerate()", "run.snapshot()['state']"))
    assert lab.run(2)
    lab.page.wait_for_function("() => !document.querySelector('.wb-panel')", timeout=WAIT_MS)
    assert "panel-pump" not in lab.output(2)
    assert lab.run(3)
    assert "running" in lab.output(3)
