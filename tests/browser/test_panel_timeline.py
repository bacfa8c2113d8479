"""The timeline of a step in real JupyterLab: read, held, compared, walked through by key."""

from __future__ import annotations

import pytest
from lab import Lab

SETUP = """
from tests.browser.panel_run import StandIn
from workbench.notebook.panel import Panel
run = StandIn(ranks={ranks}, step=137)
run.change(state="running")
panel = Panel(run)
"""
WAIT_MS = 20_000
LABEL = "() => document.querySelector('.wb-lanes').getAttribute('aria-label')"
# Which share of the canvas each colour of the parts has, those without a hatch.
SHARES = """() => {
  const canvas = document.querySelector('.wb-lanes canvas'), found = {};
  const style = getComputedStyle(document.querySelector('.wb-panel'));
  const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  for (const name of ['forward', 'backward', 'idle']) {
    const hex = style.getPropertyValue(`--wb-${name}`).trim();
    const want = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
    found[name] = 0;
    for (let at = 0; at < data.length; at += 4)
      if (want.every((value, i) => data[at + i] === value)) found[name]++;
  }
  return found;
}"""


def shown(lab: Lab, *cells: str, ranks: int = 4) -> None:
    lab.open(lab.write("timeline.ipynb", (SETUP.format(ranks=ranks), "panel", *cells)))
    assert lab.run(0)
    assert lab.run(1)
    titled(lab, "step 137 \u00b7 dp4" if ranks == 4 else "step 137")


def titled(lab: Lab, text: str, css: str = ".wb-of-timeline .wb-sub") -> None:
    lab.cell(1).locator(css, has_text=text).first.wait_for(timeout=WAIT_MS)


def press(lab: Lab, name: str) -> None:
    lab.cell(1).get_by_role("button", name=name, exact=True).click()


def test_the_boxes_have_the_sizes_of_the_spans(lab: Lab):
    shown(
        lab,
        "run.ask('switch', strategy='pipeline').result(); run.advance(3)\n"
        "rows = run.snapshot()['by_rank']\n"
        "[round(sum(r[f'{p}_ms'] for r in rows) * 1000) for p in ('forward', 'backward', 'idle')]",
    )
    assert lab.run(2)
    titled(lab, "step 140 \u00b7 pp4, 1f1b x8")
    forward, backward, idle = (int(it) for it in lab.output(2).strip("[] \n").split(","))
    # A row has the same height everywhere, so areas are times; numbers and gaps take some.
    seen = lab.page.evaluate(SHARES)
    assert seen["idle"] / seen["backward"] == pytest.approx(idle / backward, rel=0.15)
    assert seen["forward"] / seen["backward"] == pytest.approx(forward / backward, rel=0.15)
    assert lab.complaints == []


def test_a_held_step_stays_while_the_training_goes_on(lab: Lab):
    shown(lab, "run.advance(5)", "run.advance(5)")
    press(lab, "Hold")
    assert lab.run(2)
    lab.cell(1).locator(".wb-number b", has_text="142").first.wait_for(timeout=WAIT_MS)
    titled(lab, "step 137")
    press(lab, "Held")
    titled(lab, "step 142")
    assert lab.run(3)
    titled(lab, "step 147")


def test_two_layouts_are_compared_on_one_scale(lab: Lab):
    to = "run.ask('switch', strategy='{}').result(); run.advance(5)"
    slow = "run.slow_ms = {2: 30.0}\n"
    shown(lab, to.format("pipeline"), slow + to.format("hybrid"))
    assert lab.run(2)
    titled(lab, "step 142 \u00b7 pp4, 1f1b x8")
    press(lab, "Hold")
    before = lab.cell(1).locator(".wb-lanes canvas").bounding_box()
    assert lab.run(3)
    lab.cell(1).locator(".wb-number b", has_text="147").first.wait_for(timeout=WAIT_MS)
    press(lab, "Compare")
    titled(lab, "pp4", ".wb-block")
    heads = lab.cell(1).locator(".wb-block").all_inner_texts()
    assert [text.rsplit(" \u00b7 ", 1)[0] for text in heads] == [
        "held step 142 \u00b7 pp4, 1f1b x8",
        "now step 147 \u00b7 pp2 dp2, 1f1b x4",
    ]
    # Each with its own numbers.
    assert "bubble 28 %, formula 27 %" in heads[0]
    assert "formula 20 %" in heads[1]
    titled(lab, "the others waited 30.0 ms for rank 2", ".wb-block:nth-child(2) .wb-warn")
    after = lab.cell(1).locator(".wb-lanes canvas").bounding_box()
    assert before is not None
    assert after is not None
    assert after["height"] > 1.4 * before["height"]
    press(lab, "Compare")
    titled(lab, "step 142 \u00b7 pp4, 1f1b x8")


def test_a_span_under_the_pointer_says_what_it_is(lab: Lab):
    span = "run.snapshot()['sample']['ranks'][0]['spans'][1]"
    shown(lab, f"_, b, e, *_ = {span}\nprint(f'begins at {{b:.2f}} ms, takes {{e - b:.2f}} ms')")
    assert lab.run(2)
    box = lab.cell(1).locator(".wb-lanes").bounding_box()
    assert box is not None
    lab.cell(1).locator(".wb-lanes").hover(position={"x": box["width"] * 0.2, "y": 20})
    tip = lab.cell(1).locator(".wb-tip")
    tip.wait_for()
    assert tip.locator("b").inner_text() == "forward"
    assert "rank 0, stage 0, microbatch 0" in tip.inner_text()
    assert lab.output(2).strip() in tip.inner_text()
    lab.cell(1).locator(".wb-pill").hover()
    tip.wait_for(state="hidden")


def test_arrow_keys_go_from_span_to_span(lab: Lab):
    shown(lab)
    lanes = lab.cell(1).locator(".wb-lanes")
    assert lab.page.evaluate(LABEL).startswith("Timeline, step 137 \u00b7 dp4")
    lanes.focus()
    kinds = []
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowDown", "End", "Home"):
        lab.page.keyboard.press(key)
        kinds.append(lab.page.evaluate(LABEL).split(". ")[:2])
    assert [kind for kind, _ in kinds] == [
        "data", "forward", "backward", "backward", "other", "data",
    ]  # fmt: skip
    assert kinds[2][1].startswith("rank 0")
    assert kinds[3][1].startswith("rank 1")
    assert lab.cell(1).locator(".wb-tip").is_visible()
    lab.page.keyboard.press("Escape")
    lab.cell(1).locator(".wb-tip").wait_for(state="hidden")
    assert lab.page.evaluate(LABEL).startswith("Timeline")
    assert len(lab.page.evaluate("() => window.__notebook.content.widgets")) == 2


def test_a_slow_rank_is_named(lab: Lab):
    shown(lab, "run.slow_ms = {2: 30.0}\nrun.ask('switch', strategy='pipeline'); run.advance(1)")
    assert lab.run(2)
    titled(lab, "the others waited 30.0 ms for rank 2", ".wb-note.wb-warn")
    # A bubble is nobody's fault.
    titled(lab, "formula 27 %", ".wb-note:not(.wb-warn)")


@pytest.mark.parametrize("ranks", [16, 64])
def test_more_ranks_have_thinner_rows(lab: Lab, ranks: int):
    shown(lab, ranks=ranks)
    height = lab.page.evaluate("() => document.querySelector('.wb-lanes canvas').clientHeight")
    assert 150 < height < 420
    assert lab.page.evaluate(SHARES)["backward"] > 1000
