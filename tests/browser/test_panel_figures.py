"""Figures of the panel in real JupyterLab: chosen, enlarged, and true to the run."""

from __future__ import annotations

import json
import re

from lab import Lab

SETUP = """
from tests.browser.panel_run import StandIn
from workbench.notebook.panel import Panel
run = StandIn(ranks=4, step=137)
run.change(state="running")
run.ask("switch", strategy="data", shard=True).result()
run.advance(3)
panel = Panel(run)
"""
WAIT_MS = 20_000
NAMES = [
    *("loss", "rate", "time", "layout", "memory"),
    *("timeline", "comms", "engines", "faults", "checkpoints", "events"),
]
SHOWN = (
    "() => [...document.querySelectorAll('.wb-figure')].filter(f => f.clientWidth)"
    ".map(f => /wb-of-(\\w+)/.exec(f.className)[1])"
)
BARS = """() => {
  const plot = document.querySelector('.wb-of-memory .wb-plot');
  return plot.data && plot.data.map(({x, y}) => y);
}"""
TABLE = """(name) => [...document.querySelectorAll(`.wb-of-${name} tr`)].map(
  (tr) => [...tr.children].filter((cell) => !cell.hidden).map((cell) => cell.innerText.trim()))"""


def shown(lab: Lab, *cells: str) -> None:
    lab.open(lab.write("figures.ipynb", (SETUP, "panel", *cells)))
    assert lab.run(0)
    assert lab.run(1)
    lab.cell(1).locator(".wb-of-timeline .wb-sub", has_text="step 140").wait_for(timeout=WAIT_MS)


def press(lab: Lab, name: str) -> None:
    lab.cell(1).get_by_role("button", name=name, exact=True).click()


def figures(lab: Lab) -> list[str]:
    return lab.page.evaluate(SHOWN)


def test_figures_are_chosen_and_remembered(lab: Lab):
    shown(lab)
    first = figures(lab)
    assert first == [name for name in NAMES if name not in ("memory", "comms", "engines", "faults")]
    press(lab, "Memory")
    press(lab, "Throughput")
    chosen = [name for name in NAMES if name not in ("rate", "comms", "engines", "faults")]
    assert figures(lab) == chosen
    lab.reload()
    lab.cell(1).locator(".wb-of-memory").wait_for(timeout=WAIT_MS)
    assert figures(lab) == chosen
    assert lab.complaints == []


def test_one_figure_takes_the_panel_and_gives_it_back(lab: Lab):
    shown(lab)
    before = figures(lab)
    for name, css in (("Loss", ".wb-of-loss .wb-plot"), ("Timeline", ".wb-of-timeline canvas")):
        small = lab.cell(1).locator(css).bounding_box()
        enlarge = lab.cell(1).get_by_role("button", name=f"Enlarge {name}", exact=True)
        enlarge.focus()
        lab.page.keyboard.press("Enter")
        assert figures(lab) == [css.split()[0].removeprefix(".wb-of-")]
        lab.page.wait_for_function(
            "([css, least]) => document.querySelector(css).clientHeight > least",
            arg=[css, 1.5 * (small or {})["height"]],
            timeout=WAIT_MS,
        )
        large = lab.cell(1).locator(css).bounding_box()
        panel = lab.cell(1).locator(".wb-panel").bounding_box()
        assert large is not None
        assert panel is not None
        assert large["width"] > 0.95 * panel["width"]
        assert panel["height"] < 1080
        lab.page.keyboard.press("Escape")
        assert figures(lab) == before
        assert enlarge.evaluate("it => it === document.activeElement")


def test_the_axis_of_the_loss_is_linear_or_logarithmic(lab: Lab):
    shown(lab)
    kind = "() => document.querySelector('.wb-of-loss .wb-plot')._fullLayout?.yaxis.type"
    lab.page.wait_for_function(f"() => ({kind})() === 'linear'", timeout=WAIT_MS)
    press(lab, "Logarithmic axis")
    lab.page.wait_for_function(f"() => ({kind})() === 'log'", timeout=WAIT_MS)
    press(lab, "Logarithmic axis")
    lab.page.wait_for_function(f"() => ({kind})() === 'linear'", timeout=WAIT_MS)


def test_memory_is_stacked_by_rank(lab: Lab):
    parts = "('parameters', 'gradients', 'optimizer', 'activations')"
    told = f"[[row[key] / 1e6 for row in run.snapshot()['memory']] for key in {parts}]"
    shown(lab, f"import json\nprint(json.dumps({told}))")
    assert lab.run(2)
    press(lab, "Memory")
    lab.page.wait_for_function(f"() => !!({BARS})()", timeout=WAIT_MS)
    assert lab.page.evaluate(BARS) == json.loads(lab.output(2))
    # A process is a hundred times its model here: it is said, not drawn.
    legend = lab.cell(1).locator(".wb-of-memory .wb-legend").inner_text()
    assert "whole process: 313 MB" in legend


def test_communication_is_listed_by_axis_and_kind(lab: Lab):
    shown(
        lab,
        "[(c['axis'], c['op'], c['bus_gbps'] is None) for c in run.snapshot()['sample']['comms']]",
    )
    for name in ("Memory", "Communication", "Engines"):
        press(lab, name)
    fits = "([name]) => { const t = document.querySelector(`.wb-of-${name} .wb-scroll`);"
    fits += " return t.querySelector('td') && t.scrollWidth <= t.clientWidth; }"
    for name in ("comms", "engines"):
        lab.page.wait_for_function(fits, arg=[name], timeout=WAIT_MS)
    rows = lab.page.evaluate(TABLE, "comms")
    assert rows[0] == [
        "axis", "operation", "count", "bytes", "time", "exposed", "waiting", "overlapped",
        "bus bandwidth",
    ]  # fmt: skip
    assert [row[:2] for row in rows[1:]] == [
        ["dp_shard", "all-gather"],
        ["dp_shard", "reduce-scatter"],
    ]
    assert all(row[-1].endswith("B/s") for row in rows[1:])
    press(lab, "One rank")
    lab.page.wait_for_function(
        "() => document.querySelectorAll('.wb-of-comms td').length", timeout=WAIT_MS
    )


def test_engines_are_listed_and_a_lost_one_is_told(lab: Lab):
    lost = (
        "rows = run.snapshot()['engines']\n"
        "rows[2].update(state='gone', cpu=None, resident=None)\n"
        "rows[1]['gpu'] = {'name': 'H200', 'utilisation': 0.83, 'memory': 12_300_000_000,"
        " 'temperature_c': 61, 'power_w': 402.3}\n"
        "run.change(engines=rows, alive=3)\n"
        "run.tell('error', 'Rank 2 is gone.')\n"
        "run.tell('error', 'No strategy of that name.')\n"
        "run.change(state='failed', message='Rank 2 is gone.')"
    )
    shown(lab, lost)
    press(lab, "Engines")
    rows = lab.page.evaluate(TABLE, "engines")
    assert rows[0] == ["rank", "device", "state", "process", "CPU", "memory"]
    assert [row[3] for row in rows[1:]] == ["41200", "41201", "41202", "41203"]
    assert lab.run(2)
    lab.cell(1).locator(".wb-dead", has_text="gone").wait_for(timeout=WAIT_MS)
    # What was refused does not cry as what stopped the run does.
    assert lab.cell(1).locator("li.wb-error").count() == 2
    assert lab.cell(1).locator("li.wb-fault span").all_inner_texts() == ["Rank 2 is gone."]
    rows = lab.page.evaluate(TABLE, "engines")
    assert rows[2][6:] == ["83 %", "12 GB", "61 \u00b0C", "402 W"]
    assert rows[3][4:] == ["\u2013", "\u2013", "\u2013", "\u2013", "\u2013", "\u2013"]
    assert lab.complaints == []


def test_a_thousand_ranks_are_pictured_in_groups(lab: Lab):
    many = (
        SETUP.replace("ranks=4, step=137", "ranks=1024, step=2")
        .replace('strategy="data", shard=True', 'strategy="hybrid", dp=16, pp=8, tp=8')
        .replace("advance(3)", "advance(1)")
    )
    lab.open(lab.write("many.ipynb", (many, "panel")))
    assert lab.run(0)
    assert lab.run(1)
    lab.cell(1).locator(".wb-note", has_text="each row the busiest of 16 ranks").wait_for()
    heat = "() => { const p = document.querySelector('.wb-of-time .wb-plot').data?.[0];"
    lab.page.wait_for_function(f"{heat} return p?.type === 'heatmap'; }}", timeout=WAIT_MS)
    assert lab.page.evaluate(f"{heat} return [p.z.length, p.z[0].length]; }}") == [7, 64]
    assert lab.cell(1).locator(".wb-stage b").first.inner_text() == "0\u2013127"
    assert lab.page.evaluate("() => document.querySelectorAll('.wb-panel *').length") < 1200
    assert lab.complaints == []


def test_a_chinese_panel_has_no_english_of_its_own(lab: Lab):
    lab.open(lab.write("zh.ipynb", (SETUP, "Panel(run, lang='zh')")))
    assert lab.run(0)
    assert lab.run(1)
    lab.cell(1).locator(".wb-of-timeline .wb-sub", has_text="140").wait_for(timeout=WAIT_MS)
    for name in ("\u5185\u5b58", "\u901a\u4fe1", "\u5f15\u64ce"):  # memory, communication, engines
        press(lab, name)
    lab.cell(1).locator(".wb-of-engines td").first.wait_for()
    # Under the title, beside the buttons.
    keys, tools = (
        [it.bounding_box() or {} for it in lab.cell(1).locator(f".wb-of-time {css}").all()]
        for css in (".wb-legend > span", ".wb-tools")
    )
    assert keys
    assert all(it["x"] + it["width"] < tools[0]["x"] for it in keys)
    own = ".wb-label, .wb-button, .wb-title, .wb-legend, .wb-unit, th, p, .wb-pill, .wb-wait"
    said = lab.cell(1).locator(f":is({own})").all_inner_texts()
    assert len(said) > 60
    latin = re.compile("[A-Za-z]{2,}")
    known = {"ms", "MB", "MFU", "CPU", "GPU", "NaN", "fsdp"}
    assert [text for text in said if set(latin.findall(text)) - known] == []
    labels = lab.page.evaluate(
        "() => [...document.querySelectorAll('.wb-panel :is(button, figure)[aria-label]')]"
        ".map(it => it.getAttribute('aria-label'))"
    )
    assert [text for text in labels if set(latin.findall(text)) - known] == []
