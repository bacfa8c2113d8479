"""The panel without a browser: what it sends, says, refuses and leaves behind."""

from __future__ import annotations

import json
import math
import re
import threading
from concurrent.futures import Future
from xml.etree import ElementTree

import pytest
from ipywidgets.widgets import widget

from tests.browser.panel_run import StandIn
from workbench.errors import InputError
from workbench.notebook.panel import Panel
from workbench.notebook.panel.board import Board, on_request, plotly_js
from workbench.notebook.panel.frame import PARTS, frame, lists, sample
from workbench.notebook.panel.still import as_html, as_text
from workbench.notebook.panel.texts import Language, en, zh
from workbench.spec import formats
from workbench.spec.events import EVENTS, happened
from workbench.spec.layout import parse_layout
from workbench.spec.strategy import short_name

ESM_LIMIT_BYTES = 12 * 1024
WAIT_S = 10


@pytest.fixture
def run():
    run = StandIn(step=137)
    run.change(state="running")
    return run


@pytest.fixture
def panel(run):
    panel = Panel(run)
    yield panel
    panel.close()


def drawn(panel: Panel, name: str, wanted) -> None:
    """Wait for a trait of the panel's widget; fails after some seconds."""
    seen = threading.Event()
    board = panel._board
    board.observe(lambda change: seen.set() if wanted(change.new) else None, name)
    assert wanted(getattr(board, name)) or seen.wait(WAIT_S)


def say(panel: Panel, **message) -> None:
    """What the page would send, from another thread."""
    heard = panel._board._msg_callbacks
    thread = threading.Thread(target=heard, args=(panel._board, message, []))
    thread.start()
    thread.join()


def test_a_frame_is_the_snapshot(run):
    run.change(loss=math.nan, comm=math.inf)
    seen = json.loads(frame(run.snapshot()))
    assert (seen["step"], seen["loss"], seen["comm"]) == (137, None, None)
    assert len(seen["curve"]["loss"]) == 137
    assert seen["allowed"] == run.snapshot()["allowed"]


@pytest.mark.parametrize(
    ("ranks", "limits"), [(4, (15_000, 14_000, 3_000)), (64, (34_000, 33_000, 20_000))]
)
def test_what_is_sent_of_a_long_run_stays_small(ranks, limits):
    run = StandIn(ranks=ranks, step=600, goal=600)
    run.ask("switch", strategy="hybrid", dp=ranks // 2, pp=2)
    for number in range(200):
        run.tell("info", f"event {number} " + "x" * 80)
    sent = [len(part(run.snapshot())) for part in (frame, lists, sample)]
    assert [size < limit for size, limit in zip(sent, limits, strict=True)] == [True] * 3, sent


def test_a_sample_is_packed_without_loss(run):
    run.ask("switch", strategy="hybrid")
    run.advance(1)
    taken, sent = run.snapshot()["sample"], json.loads(sample(run.snapshot()))
    assert (sent["step"], sent["layout"]) == (138, "pp2 dp2, 1f1b x4")
    for row, packed in zip(taken["ranks"], sent["ranks"], strict=True):
        unpacked = [
            [PARTS[kind], begin / 1000, end / 1000, stage, micro, sent["whats"][what]]
            for kind, begin, end, stage, micro, what in packed["spans"]
        ]
        assert [one[3:] for one in unpacked] == [one[3:] for one in row["spans"]]
        assert [one[0] for one in unpacked] == [one[0] for one in row["spans"]]
        assert [one[1] for one in unpacked] == pytest.approx(
            [one[1] for one in row["spans"]], abs=1e-3
        )


def test_what_did_not_change_is_not_sent_again(run, panel):
    changes: list[str] = []
    panel._board.observe(lambda change: changes.append(change.name), ["frame", "lists", "sample"])
    run.change(loss=0.5)
    drawn(panel, "frame", lambda seen: json.loads(seen)["loss"] == 0.5)
    assert changes == ["frame"]


def test_the_newest_frame_follows_the_run(run, panel):
    run.advance(3)
    drawn(panel, "frame", lambda seen: json.loads(seen)["step"] == 140)


def test_a_beat_comes_though_nothing_changes(panel):
    first = panel._board.beat
    drawn(panel, "beat", lambda now: now > first + 0.9)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"verb": "pause"}, ("pause", {})),
        ({"verb": "save", "args": {"path": "/etc/passwd"}}, ("save", {})),
        (
            {"verb": "switch", "args": {"strategy": "data", "shard": True}},
            ("switch", {"strategy": "data", "shard": True}),
        ),
        (
            {"verb": "switch", "args": {"microbatches": 4, "zebra": 1, "strategy": "pipeline"}},
            ("switch", {"strategy": "pipeline", "microbatches": 4}),
        ),
    ],
)
def test_what_is_pressed_reaches_the_run(run, panel, said, told):
    version = run.version
    say(panel, **said)
    drawn(panel, "note", lambda _: run.version > version)
    assert run.commands == [told]


def test_what_no_button_says_is_not_passed_on(run, panel):
    say(panel, verb="__init__")
    say(panel, verb="pause")
    drawn(panel, "frame", lambda seen: json.loads(seen)["state"] == "paused")
    assert run.commands == [("pause", {})]


def test_a_refusal_is_shown_with_its_reason(run, panel):
    say(panel, verb="resume")
    drawn(panel, "note", lambda note: note.get("kind") == "error")
    assert panel._board.note["text"] == "resume does not fit a run that is running."


def test_a_command_under_way_is_shown_until_it_is_done(run, panel):
    later: Future = Future()
    run.ask = lambda verb, **more: later
    say(panel, verb="restore", args={"what": "step-120"})
    drawn(panel, "note", lambda note: note.get("text") == "Going back to step-120.")
    later.set_result(None)
    drawn(panel, "note", lambda note: note == {})


def test_a_switch_under_way_names_where_it_leads(run, panel):
    run.ask = lambda verb, **more: Future()
    args = {"strategy": "pipeline", "schedule": "gpipe", "microbatches": 4}
    say(panel, verb="switch", args=args)
    drawn(panel, "note", lambda note: note.get("kind") == "busy")
    assert panel._board.note["text"] == "Switching to pipeline at the next step boundary."
    assert panel._board.note["args"] == args


def test_a_frame_has_the_options_of_the_strategy_that_is_on(run):
    run.ask("switch", strategy="hybrid")
    sent = {one["strategy"]: one for one in json.loads(lists(run.snapshot()))["choices"]}
    assert [name for name, one in sent.items() if one["options"]] == ["hybrid"]
    assert sent["pipeline"]["args"] == {"schedule": "1f1b", "microbatches": 8}


def test_only_ranks_that_train_are_counted(run):
    def told() -> tuple:
        seen = run.snapshot()
        first, html = as_text(seen).splitlines()[0], as_html(seen, en.TEXTS)
        return json.loads(frame(seen))["used"], first, "last throughput" in html

    run.lay_out(parse_layout("tp3"))
    assert told() == (3, "digits-3: running, step 137 of 500, tp3 on 3 of 4 ranks", False)
    run.change(state="gone")
    assert told() == (0, "digits-3: gone, step 137 of 500, tp3 on 0 of 4 ranks", True)


def test_a_frame_of_a_run_that_is_not_built_yet(run):
    bare = {k: v for k, v in run.snapshot().items() if k not in ("choices", "places", "stages")}
    assert json.loads(lists(bare))["choices"] == []


def test_a_snapshot_that_cannot_be_had_stops_no_other_panel(run, panel, caplog):
    broken = StandIn(step=3)
    other = Panel(broken)
    try:
        broken.snapshot = None
        broken.version += 1
        run.advance(1)
        drawn(panel, "frame", lambda seen: json.loads(seen)["step"] == 138)
    finally:
        other.run = run
        other.close()


def test_a_hundred_closed_panels_leave_nothing(run):
    widgets, threads = len(widget._instances), threading.active_count()
    for _ in range(100):
        panel = Panel(run)
        panel.close()
        panel.close()
    assert len(widget._instances) == widgets
    assert threading.active_count() == threads
    assert run.snapshot()["state"] == "running"


def test_one_thread_for_all_panels(run):
    before = threading.active_count()
    panels = [Panel(run) for _ in range(5)]
    assert threading.active_count() == before + 1
    for panel in panels:
        panel.close()
    assert threading.active_count() == before


def test_a_language_that_is_not_there_names_those_that_are(run):
    with pytest.raises(InputError, match=r"No language named 'enn'\. Did you mean 'en'\?"):
        Panel(run, lang="enn")


def test_chinese_says_all_that_english_says():
    assert list(zh.TEXTS) == list(en.TEXTS)
    for key, text in zh.TEXTS.items():
        names = re.findall(r"\{\w*\}", en.TEXTS[key])
        assert sorted(re.findall(r"\{\w*\}", text)) == sorted(names), key
        # What is written in Latin letters in a Chinese text as well.
        rest = re.sub(r"\{\w*\}|\b(?:CPU|GPU|MFU|MB|NaN|ms)\b", "", text)
        assert not re.search("[A-Za-z]", rest), key
        assert text


def test_chinese_says_all_that_happens():
    assert list(zh.EVENTS) == list(EVENTS)
    for name, text in zh.EVENTS.items():
        names = re.findall(r"\{\w+\}", EVENTS[name][1])
        assert sorted(re.findall(r"\{\w+\}", text)) == sorted(names), name
    short = {short_name(parse_layout(text)) for text in ("dp2", "fsdp2", "pp2", "tp2", "dp1")}
    assert short <= set(zh.MARKS)


def test_events_and_marks_are_said_in_the_language_of_the_panel():
    switched = {"strategy": "pipeline", "layout": "pp2", "step": 7, "took_ms": 9, "moved": "1 MB"}
    events = [happened("switched", switched), {"kind": "error", "text": "free text"}]
    marks = [{"step": 7, "label": "saved"}, {"step": 9, "label": "else"}]
    said = Language("zh").said({"events": events, "marks": marks, "step": 9})
    shown = {**events[0]["values"], "strategy": zh.TEXTS["strategy_pipeline"]}
    assert said["events"][0]["text"] == zh.EVENTS["switched"].format(**shown)
    assert said["events"][1]["text"] == "free text"
    assert [mark["label"] for mark in said["marks"]] == [zh.MARKS["saved"], "else"]
    same = Language("en").said({"events": events, "marks": marks, "step": 9})
    assert same["events"][0]["text"].startswith("pipeline (pp2) from step 7 on, in 9 ms")


def test_the_picture_speaks_the_language_of_the_panel(run):
    panel = Panel(run, lang="zh")
    html = panel._repr_mimebundle_()["text/html"]
    panel.close()
    assert zh.TEXTS["time_title"] in html
    assert en.TEXTS["time_title"] not in html


def test_plain_text_is_four_lines(run):
    run.ask("save")
    lines = as_text(run.snapshot()).splitlines()
    assert lines == [
        "digits-3: running, step 137 of 500, dp4 on 4 of 4 ranks",
        "loss 0.7461",
        "2,596 samples/s, 4 % of a step in communication, 2 % idle",
        "1 checkpoint, last step-137 (123 KB)",
    ]


@pytest.mark.parametrize("step", [0, 1, 137, 500])
def test_the_picture_is_whole_and_without_script(step):
    run = StandIn(step=step)
    run.change(message="<script>alert(1)</script> & 'so'")
    html = as_html(run.snapshot(), en.TEXTS)
    ElementTree.fromstring(f"<div>{html}</div>")
    assert "<script" not in html
    assert html.count("<polyline") == (2 if step else 0)


def test_the_picture_has_a_colour_for_each_part_of_a_step(run):
    html = as_html(run.snapshot(), en.TEXTS)
    assert [f">{en.TEXTS[f'part_{part}']}</text>" in html for part in PARTS] == [True] * 7
    # Four ranks and the legend, as bars and as a timeline.
    assert html.count('fill="url(#wb-hatch)"') == 10


def test_the_picture_has_the_timeline_of_the_last_step(run):
    run.ask("switch", strategy="pipeline")
    run.advance(1)
    html = as_html(run.snapshot(), en.TEXTS)
    assert "Timeline: step 138, pp4, 1f1b x8" in html
    spans = sum(len(row["spans"]) for row in run.snapshot()["sample"]["ranks"])
    assert html.count("<rect") > spans
    assert len(html) < 60_000


def test_where_wire_and_idle_are_not_known_communication_is_one_part(run):
    rows = run.snapshot()["by_rank"]
    unsplit = {"wire_ms": None, "idle_ms": None}
    run.change(
        idle=None, sample=None, by_rank=[{**row, **unsplit, "comm_ms": 3.25} for row in rows]
    )
    html = as_html(run.snapshot(), en.TEXTS)
    assert html.count('fill="url(#wb-hatch)"') == 5
    assert f">{en.TEXTS['part_idle']}</text>" not in html
    assert as_text(run.snapshot()).splitlines()[2].endswith("communication, - idle")


@pytest.mark.parametrize("strategy", ["data", "model", "pipeline", "hybrid", "none"])
def test_what_stands_in_for_a_run_has_books_that_balance(run, strategy):
    run.ask("switch", strategy=strategy).result()
    run.slow_ms = {0: 30.0}
    run.advance(3)
    seen = run.snapshot()
    spans = {row["rank"]: row for row in seen["sample"]["ranks"]}
    assert {row["rank"] for row in seen["by_rank"]} == set(spans)
    for row in seen["by_rank"]:
        parts_ms = [row[f"{part}_ms"] for part in PARTS]
        ends = [end for _, _, end, *_ in spans[row["rank"]]["spans"]]
        begins = [begin for _, begin, *_ in spans[row["rank"]]["spans"]]
        assert sum(parts_ms) == pytest.approx(row["wall_ms"])
        assert begins[1:] == pytest.approx(ends[:-1])


def test_the_picture_shows_where_it_was_switched(run):
    run.ask("switch", strategy="pipeline")
    run.advance(60)
    run.ask("switch", strategy="hybrid")
    run.advance(1)
    html = as_html(run.snapshot(), en.TEXTS)
    assert html.count("stroke-dasharray") == 4
    assert html.count(">pipeline</text>") == html.count(">hybrid</text>") == 2
    assert "pp2 dp2, 1f1b x4" in html


def test_a_label_that_would_cover_a_newer_one_stays_off_the_picture(run):
    run.ask("switch", strategy="pipeline")
    run.advance(1)
    run.ask("switch", strategy="hybrid")
    html = as_html(run.snapshot(), en.TEXTS)
    assert ">hybrid</text>" in html
    assert ">pipeline</text>" not in html


def test_the_bundle_has_a_form_for_every_reader(panel):
    bundle = panel._repr_mimebundle_()
    assert set(bundle) == {
        "text/plain",
        "text/html",
        "application/vnd.jupyter.widget-view+json",
    }
    panel.close()
    assert set(panel._repr_mimebundle_()) == {"text/plain", "text/html"}


def test_the_script_of_a_panel_is_small():
    assert len(Board._esm.encode()) < ESM_LIMIT_BYTES
    assert len(on_request().encode()) < 5 * ESM_LIMIT_BYTES
    assert len(plotly_js()) < 2_000_000


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        (formats.digits(0.31), "0.3100"),
        (formats.digits(None), "-"),
        (formats.digits(12345.0), "1.234e+04"),
        (formats.rate(2616.0, "samples/s"), "2,616 samples/s"),
        (formats.rate(3.254, "tokens/s"), "3.25 tokens/s"),
        (formats.percent(0.12), "12 %"),
        (formats.percent(0.004), "0.4 %"),
        (formats.size(999), "999 B"),
        (formats.size(123456), "123 KB"),
        (formats.size(1234567), "1.2 MB"),
        (formats.size(40 * 10**9), "40 GB"),
        (formats.age(12.7, en.TEXTS), "12 s ago"),
        (formats.age(3 * 60, en.TEXTS), "3 min ago"),
        (formats.age(2 * 86400, en.TEXTS), "2 d ago"),
    ],
)
def test_numbers_read_well(said, wanted):
    assert said == wanted
