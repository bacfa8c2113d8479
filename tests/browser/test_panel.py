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
# Figures that are not chosen have no width.
DRAWN = (
    "() => [...document.querySelectorAll('.wb-plot')].filter(p => p.clientWidth)"
    ".map(p => p.data && p.data[0].y.length)"
)
NUMBERS = "() => [...document.querySelectorAll('.wb-number b')].map(b => b.textContent)"
# Each rank's field of the picture; what is switched, as the curves mark it.
RANKS = "() => [...document.querySelectorAll('.wb-rank')].map(r => r.textContent)"
MARKS = (
    "() => [...document.querySelectorAll('.wb-plot')].slice(0, 2).map(p =>"
    " [p.layout.annotations[0].text, p.data[1].x[0]])"
)
NAMED = (
    "() => { const it = document.querySelector('.wb-plot').layout; return"
    " [it.annotations.map(a => a.text), it.shapes.map(l => l.opacity), it.xaxis.tickangle]; }"
)
# What is wider than its place.
CUT = (
    "() => [...document.querySelectorAll('.wb-panel *')].filter(e => e.scrollWidth >"
    " e.clientWidth + 1 && getComputedStyle(e).textOverflow !== 'ellipsis' &&"
    " getComputedStyle(e).display !== 'inline' && e.clientWidth"
    " && !e.closest('svg')).map(e => e.className)"
)
WAIT_MS = 20_000


def shown(lab: Lab, cells: tuple[str, ...] = ("panel",)) -> None:
    lab.open(lab.write("panel.ipynb", (SETUP, *cells)))
    assert lab.run(0)
    assert lab.run(1)
    drawn(lab)


def drawn(lab: Lab, points: int = 137, panels: int = 1, ranks: int = 4) -> None:
    """Wait until each figure of each panel on the page has its data."""
    want = json.dumps([points, points, ranks] * panels, separators=(",", ":"))
    lab.page.wait_for_function(f"() => JSON.stringify(({DRAWN})()) === '{want}'", timeout=WAIT_MS)


def press(lab: Lab, name: str, index: int = 1) -> None:
    lab.cell(index).get_by_role("button", name=name, exact=True).click()


def wait_for(lab: Lab, css: str, text: str, index: int = 1) -> None:
    lab.cell(index).locator(css, has_text=text).first.wait_for(timeout=WAIT_MS)


def test_figures_and_numbers_are_those_of_the_run(lab: Lab):
    shown(lab, ("panel", "run.advance(10)"))
    assert lab.page.evaluate(NUMBERS) == ["137", "0.7461", "2,596", "4 %", "2 %", "4 / 4"]
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
    wait_for(lab, "li.wb-switch", "fsdp4 from step 138")
    press(lab, "Resume")
    wait_for(lab, ".wb-pill", "Running")
    press(lab, "Go back to step-138")
    wait_for(lab, "li.wb-save", "Restored step-138.")
    press(lab, "Stop")
    wait_for(lab, ".wb-pill", "Stopped")
    assert lab.run(2)
    switched = "'switch', {'strategy': 'data', 'shard': True}"
    for told in ("'pause'", "'restore', {'what': 'step-138'}", switched):
        assert told in lab.output(2)


def test_a_strategy_and_its_options_are_pressed_and_pictured(lab: Lab):
    three = (
        "import dataclasses\n"
        "from workbench.spec.layout import Layout\n"
        "run.limits = dataclasses.replace(run.limits, tensor={'heads': 3})\n"
        "run.lay_out(Layout(tp=3))"
    )
    told = "run.advance(10)\n[args for _, args in run.commands]"
    shown(lab, ("panel", told, three, "run.change(state='gone')"))
    assert lab.page.evaluate(RANKS) == ["rank 0holds 100 %"] + [
        f"rank {rank}holds 100 %" for rank in (1, 2, 3)
    ]
    press(lab, "Pipeline")
    wait_for(lab, ".wb-now", "pp4, 1f1b x8")
    assert lab.cell(1).locator(".wb-units").all_inner_texts() == [
        "token, position", "blocks.0\u20132", "blocks.3\u20135", "norm, head",
    ]  # fmt: skip
    press(lab, "16")
    wait_for(lab, ".wb-now", "pp4, 1f1b x16")
    press(lab, "Hybrid")
    wait_for(lab, ".wb-now", "pp2 dp2, 1f1b x4")
    assert lab.cell(1).locator(".wb-share").all_inner_texts() == ["0\u201331", "32\u201363"]
    press(lab, "One rank")
    wait_for(lab, ".wb-off", "rank 3")
    assert lab.page.evaluate(RANKS)[1:] == [f"rank {rank}idle" for rank in (1, 2, 3)]
    assert lab.run(2)
    assert "{'strategy': 'pipeline', 'microbatches': 16, 'schedule': '1f1b'}" in lab.output(2)
    drawn(lab, 147, ranks=1)
    wait_for(lab, ".wb-number.ranks[title='idle: ranks 1 to 3'] b", "1 of 4")
    # A layout that no button leads to is chosen all the same.
    assert lab.run(3)
    wait_for(lab, ".wb-number.ranks[title='idle: rank 3'] b", "3 of 4")
    wait_for(lab, ".wb-options [aria-pressed=true][aria-disabled=false]", "Inside layers")
    assert lab.run(4)
    wait_for(lab, ".wb-number.ranks b", "0 of 4")
    wait_for(lab, ".wb-over .wb-label", "last throughput")
    assert lab.complaints == []


def test_a_switch_is_marked_with_what_it_cost(lab: Lab):
    names = ["data", "model", "hybrid", "none"] * 2
    more = f"for name in {names}:\n    run.ask('switch', strategy=name)\n    run.advance(40)"
    shown(lab, ("panel", "run.advance(10)", more))
    press(lab, "Pipeline")
    wait_for(lab, ".wb-cost", "switched at step 137 in 0.21 s, 1.2 MB moved")
    assert lab.run(2)
    drawn(lab, 147)
    marked = lab.page.evaluate(MARKS)
    assert marked == [["pipeline<br>0.21 s, 1.2 MB", 137], ["pipeline", 137]]
    assert lab.run(3)
    drawn(lab, 467, ranks=1)
    # The newest are named; of the others the pointer says the name.
    named, faint, angle = lab.page.evaluate(NAMED)
    assert named == [*reversed(names)][:4]  # there is no room for the fifth
    assert faint == [0.4] * 4 + [1] * 5
    assert angle == 0
    hovers = "() => document.querySelector('.wb-plot').data[1].text.map(t => t.split(':')[0])"
    assert lab.page.evaluate(hovers) == ["pipeline", *names]


def test_a_button_that_is_off_says_why_and_sends_nothing(lab: Lab):
    few = (
        "from workbench.spec.limits import Limits\n"
        "from workbench.spec.layout import Layout\n"
        "run.limits = Limits(batch=64, units=['a', 'b', 'c'], tp_why='No pairs of layers.')\n"
        "run.lay_out(Layout(dp_replicate=4))\npanel"
    )
    shown(lab, (few, "run.commands"))
    off = lab.cell(1).get_by_role("button", name="Pipeline", exact=True)
    lab.page.wait_for_function("() => document.querySelectorAll('.wb-option').length === 1")
    why = (
        "needs 4 stages, and the model has 3 parts with parameters (a, b, c). "
        'Use the layout "pp3, 1f1b x6" (3 of 4 ranks) or "pp2 dp2, 1f1b x4".'
    )
    assert off.is_disabled()
    assert off.get_attribute("title") == off.get_attribute("aria-description")
    assert (off.get_attribute("title") or "").endswith(why)
    off.click(force=True)
    press(lab, "Hybrid")
    wait_for(lab, ".wb-now", "pp2 dp2, 1f1b x4")
    assert lab.run(2)
    assert "pipeline" not in lab.output(2)


def test_a_menu_of_options_is_used_with_the_keyboard(lab: Lab):
    shown(lab)
    press(lab, "Pipeline")
    menu = lab.cell(1).get_by_role("menu", name="Schedule")
    menu_button = lab.cell(1).get_by_role("button", name="Schedule: 1f1b", exact=True)
    menu_button.focus()
    lab.page.keyboard.press("Enter")
    menu.wait_for()
    assert menu.get_by_role("menuitemradio", checked=True).inner_text() == "1f1b"
    lab.page.keyboard.press("Escape")
    menu.wait_for(state="hidden")
    lab.page.keyboard.press("ArrowDown")
    menu.wait_for()
    lab.page.keyboard.press("ArrowUp")
    lab.page.keyboard.press("Enter")
    wait_for(lab, ".wb-now", "pp4, gpipe x8")
    focused = "() => document.activeElement.getAttribute('aria-label')"
    lab.page.wait_for_function(f"() => ({focused})() === 'Schedule: gpipe'", timeout=WAIT_MS)
    menu.wait_for(state="hidden")


def test_nothing_is_made_anew_while_nothing_but_the_numbers_changes(lab: Lab):
    shown(lab, ("panel", "run.advance(10)"))
    press(lab, "Hybrid")
    wait_for(lab, ".wb-now", "pp2 dp2, 1f1b x4")
    lab.page.evaluate(
        "() => { window.made = 0; for (const el of document.querySelectorAll("
        "'.wb-picture, .wb-options, .wb-controls, .wb-row-table')) new MutationObserver((seen) =>"
        " (window.made += seen.length)).observe(el, {childList: true, subtree: true}); }"
    )
    assert lab.run(2)
    drawn(lab, 147)
    assert lab.page.evaluate("() => window.made") == 0


def test_a_run_without_choices_is_shown_with_its_switch_off(lab: Lab):
    old = (
        "whole = run.snapshot\n"
        "new = ('strategy', 'choices', 'places', 'stages')\n"
        "run.snapshot = lambda: {k: v for k, v in whole().items() if k not in new}\n"
        "run.advance(1)\npanel"
    )
    lab.open(lab.write("panel.ipynb", (SETUP, old)))
    assert lab.run(0)
    assert lab.run(1)
    drawn(lab, 138)
    wait_for(lab, ".wb-wait", "Known when the training is built.")
    assert lab.cell(1).get_by_role("button", name="Hybrid", exact=True).is_disabled()
    assert lab.complaints == []


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
    assert before[:6] == before[6:]
    press(lab, "Pause", index=2)
    wait_for(lab, ".wb-pill", "Paused", index=1)
    lab.reload()
    for index in (1, 2):  # figures out of sight are not drawn
        lab.cell(index).locator(".wb-figures").scroll_into_view_if_needed()
        lab.cell(index).locator(".wb-plot .main-svg").first.wait_for()
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


@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize("width", [1920, 1280, 760, 480])
def test_nothing_is_cut_or_covered(lab: Lab, width: int, ranks: int):
    strategy = {4: "pipeline", 8: "hybrid"}[ranks]
    is_big, height = (True, 1080) if width == 1920 else (False, 720)
    cell = f"run = StandIn(ranks={ranks}, step=137)\nrun.ask('switch', strategy={strategy!r})"
    lab.open(lab.write("panel.ipynb", (SETUP, cell, f"Panel(run, big={is_big})")))
    for index in range(3):
        assert lab.run(index)
    drawn(lab, ranks=ranks)
    lab.page.set_viewport_size({"width": width, "height": height})
    lab.page.wait_for_function(
        "() => [...document.querySelectorAll('.wb-plot')].filter(p => p.clientWidth).every("
        "p => Math.abs(p.querySelector('.main-svg').clientWidth - p.clientWidth) < 2)"
    )
    assert lab.page.evaluate(CUT) == []
    if is_big:  # controls in two rows, and a row of figures whole on a projector
        seen = ".wb-group", ".wb-controls > .wb-button", ".wb-of-loss"
        top, pause, save, loss = (
            lab.cell(2).locator(f"{css}:visible").first.bounding_box() or {}
            for css in (".wb-panel", *seen)
        )
        assert save["y"] == pause["y"]
        assert loss["y"] - top["y"] < 0.35 * height
        assert loss["y"] + loss["height"] - top["y"] < 0.6 * height
        assert "rank" in lab.cell(2).locator(".wb-rank").first.inner_text()


def test_a_closed_panel_leaves_the_page(lab: Lab):
    shown(lab, ("panel", "panel.close()\nthreading.enumerate()", "run.snapshot()['state']"))
    assert lab.run(2)
    lab.page.wait_for_function("() => !document.querySelector('.wb-panel')", timeout=WAIT_MS)
    assert "panel-pump" not in lab.output(2)
    assert lab.run(3)
    assert "running" in lab.output(3)
