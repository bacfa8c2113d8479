"""Faults in the panel in real JupyterLab: what is shown of them, what is asked, going back."""

from __future__ import annotations

from lab import Lab
from test_panel import CUT, SETUP, WAIT_MS, drawn, press, wait_for

SPARE = """
run.change(faults={**run.snapshot()["faults"], "spares": 1})
"""
LOSE = "run.advance(9); run.lose(2, filled=''); run.change(alive=3)"
ROWS = """() => [...document.querySelectorAll('.wb-of-faults tbody tr')].map(
  (tr) => [...tr.children].filter((cell) => !cell.hidden).map((cell) => cell.innerText.trim()))"""
LINES = "() => document.querySelector('.wb-of-loss .wb-plot').layout.shapes.map(s => s.line.dash)"
ENDS = """() => document.querySelector('.wb-of-loss .wb-plot').data.slice(2)
  .map(({x, mode, opacity}) => [x[0], x[x.length - 1], opacity < 1])"""


def test_a_rank_is_lost_and_the_user_says_what_to_do(lab: Lab):
    told = "\nrun.commands"
    lab.open(lab.write("faults.ipynb", (SETUP + SPARE, "panel", LOSE, told)))
    assert lab.run(0)
    assert lab.run(1)
    drawn(lab)
    panel = lab.cell(1)
    wait_for(lab, ".wb-number:last-child", "+1 spare")
    assert not panel.locator(".wb-of-faults").is_visible()
    assert not panel.get_by_role("button", name="Replace", exact=True).is_visible()

    assert lab.run(2)
    wait_for(lab, ".wb-pill", "Waiting")
    wait_for(lab, ".wb-of-faults tr", "rank 2: its process was killed by SIGKILL")
    wait_for(lab, ".wb-rank.wb-dead", "gone")
    assert panel.locator(".wb-dead").count() == 1
    for name in ("Stop", "Replace"):
        assert panel.get_by_role("button", name=name, exact=True).first.is_enabled()
    small = panel.get_by_role("button", name="Go on smaller", exact=True).first
    assert small.get_attribute("aria-disabled") == "true"
    assert "data parallelism" in (small.get_attribute("title") or "")
    press(lab, "Replace")
    wait_for(lab, ".wb-pill", "Running")
    lab.page.wait_for_function(f"() => ({ROWS})()[0].includes('20.2 s')", timeout=WAIT_MS)
    (row,) = lab.page.evaluate(ROWS)
    assert "a fresh one is rank 1" in row[0]
    # Freed, waited for the user, filled, met, state, first step, together.
    assert row[2:] == ["20.0 ms", "20.0 s", "5.00 ms", "85.0 ms", "50.0 ms", "40.0 ms", "20.2 s"]
    assert lab.page.evaluate(LINES) == ["solid"]
    assert lab.page.evaluate(CUT) == []

    assert panel.locator(".wb-dead").count() == 0

    lost, stands = (panel.get_by_role("group", name=f"When {name}") for name in ("a rank", "one"))
    lost.get_by_role("button", name="Wait", exact=True).click()
    wait_for(lab, ".wb-explained", "else you say what to do")
    stands.get_by_role("button", name="Interrupt it", exact=True).click()
    wait_for(lab, ".wb-explained", "The step is broken off")
    assert lab.run(3)
    asked = " ".join(lab.output(3).split())
    assert "('recover', {'how': 'replace'}), ('policy', {'on_loss': 'wait'})" in asked
    assert "('policy', {'on_stall': 'interrupt'})" in asked
    assert lab.complaints == []


def test_a_fault_is_a_button(lab: Lab):
    told = "\nrun.commands"
    lab.open(lab.write("strike.ipynb", (SETUP + SPARE, "panel", "run.lose(2)", told)))
    for index in range(3):
        assert lab.run(index)
    drawn(lab)
    panel = lab.cell(1)
    wait_for(lab, ".wb-of-faults tr", "rank 2")
    mend = panel.get_by_role("button", name="Mend", exact=True)
    assert not mend.is_visible()
    panel.get_by_label("which rank").fill("3")
    press(lab, "Slow down")
    wait_for(lab, ".wb-of-faults", "slow of rank 3 in forward of step 138")
    mend.click()
    mend.wait_for(state="hidden")
    press(lab, "Stop for 5 s")
    wait_for(lab, ".wb-of-faults", "stall of rank 3")
    assert lab.page.evaluate(CUT) == []
    assert lab.run(3)
    asked = " ".join(lab.output(3).split())
    assert "('inject', {'kind': 'slow', 'rank': 3}), ('clear_faults', {})" in asked
    assert "('inject', {'kind': 'stall', 'rank': 3, 'for_s': 5})" in asked
    assert lab.complaints == []


def test_going_back_leaves_a_branch(lab: Lab):
    cells = ("panel", "run.ask('save').result(); run.advance(40)", "run.advance(7)")
    lab.open(lab.write("back.ipynb", (SETUP, *cells)))
    for index in range(3):
        assert lab.run(index)
    drawn(lab, points=177)
    wait_for(lab, ".wb-of-checkpoints tr", "stood 3.10 ms, written in 41.0 ms")
    press(lab, "Go back to step-137")
    press(lab, "Pipeline")
    assert lab.run(3)
    lab.page.wait_for_function(
        f"() => JSON.stringify(({ENDS})()) === '[[137,177,true]]'", timeout=WAIT_MS
    )
    assert lab.complaints == []
