"""The harness itself: what the other browser tests rely on."""

from __future__ import annotations

from pathlib import Path

from lab import Lab

CELLS = (
    "import sys\nprint('from', sys.executable)",
    "import ipywidgets\n"
    "button, label = ipywidgets.Button(description='Press'), ipywidgets.Label('before')\n"
    "button.on_click(lambda _: setattr(label, 'value', 'after'))\n"
    "ipywidgets.HBox([button, label])",
    "raise ValueError('on purpose')",
    "button",
)


def test_cells_run_widgets_answer_and_nothing_leaves_the_machine(lab: Lab, tmp_path: Path):
    lab.open(lab.write("trivial.ipynb", CELLS))
    assert lab.run(0)
    assert lab.output(0).startswith("from /")
    assert lab.run(1)
    lab.cell(1).get_by_role("button", name="Press").click()
    lab.cell(1).locator(".widget-label", has_text="after").wait_for()
    assert not lab.run(2)
    lab.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 10_000
    assert lab.foreign == []


def test_a_reload_keeps_the_kernel_and_a_restart_does_not(lab: Lab):
    lab.open(lab.write("reloaded.ipynb", CELLS))
    assert lab.run(1)
    lab.reload()
    lab.cell(1).locator(".widget-label", has_text="before").wait_for()
    assert lab.run(3)
    lab.restart_kernel()
    assert not lab.run(3)


def test_a_second_page_shows_the_same_widget(lab: Lab):
    lab.open(lab.write("twice.ipynb", CELLS))
    assert lab.run(1)
    other = lab.second()
    other.cell(1).get_by_role("button", name="Press").click()
    lab.cell(1).locator(".widget-label", has_text="after").wait_for()
