"""A thousand ranks on the panel: what leaves the kernel is bounded, cheap, and still true."""

from __future__ import annotations

import json
import statistics
import time

import pytest

from tests.browser.panel_run import StandIn
from workbench.notebook.panel import many
from workbench.notebook.panel.frame import PARTS, frame, lists, sample
from workbench.notebook.panel.panel import Panel
from workbench.notebook.panel.still import as_html
from workbench.notebook.panel.texts import en

RANKS = 1024
# The aim is 10 ms on a machine of one's own; a busy one is slower.
FRAME_S = 0.04


@pytest.fixture(scope="module")
def run() -> StandIn:
    run = StandIn(ranks=RANKS, step=1, goal=100_000)
    run.change(state="running")
    run.slow_ms = {700: 5.0}
    run.ask("switch", strategy="hybrid", dp=16, pp=8, tp=8).result()
    run.advance(1)
    return run


def test_what_is_sent_does_not_grow_with_the_ranks(run: StandIn):
    sent = [len(part(run.snapshot())) for part in (frame, lists, sample)]
    assert [size < 34_000 for size in sent] == [True] * 3, sent


def test_a_group_is_the_mean_of_its_ranks(run: StandIn):
    rows, sent = run.snapshot()["by_rank"], json.loads(frame(run.snapshot()))["by_rank"]
    assert len(sent) == many.MOST
    assert sum(row["ranks"] for row in sent) == RANKS
    for part in PARTS:
        whole = sum(row[f"{part}_ms"] for row in rows)
        shown = sum(row[f"{part}_ms"] * row["ranks"] for row in sent)
        assert shown == pytest.approx(whole, rel=1e-4, abs=1e-9)
    assert sent[1]["rank"] == RANKS // many.MOST


def test_what_nobody_can_tell_stays_unknown(run: StandIn):
    rows = [
        {**row, "wire_ms": None, "idle_ms": None, "comm_ms": 1.0}
        for row in run.snapshot()["by_rank"]
    ]
    sent = json.loads(frame({**run.snapshot(), "by_rank": rows}))["by_rank"]
    assert {row["wire_ms"] for row in sent} == {None}
    assert {row["comm_ms"] for row in sent} == {1.0}


def test_the_picture_of_a_step_has_its_parts_in_their_shares(run: StandIn):
    seen = run.snapshot()
    taken, sent = seen["sample"], json.loads(sample(seen))
    assert len(sent["ranks"]) == many.MOST
    assert sent["straggler"] == {"rank": 700, "ms": 5.0}
    by_rank = {row["rank"]: row for row in taken["ranks"]}
    for row in sent["ranks"]:
        assert len(row["bins"]) == many.BINS
        spans = by_rank[row["rank"]]["spans"]
        for place, part in enumerate(PARTS):
            taken_ms = sum(end - begin for kind, begin, end, *_ in spans if kind == part)
            bins = row["bins"].count(str(place))
            # Half a bin at each end of each span.
            near = 1 + sum(kind == part for kind, *_ in spans) / 2
            assert bins == pytest.approx(taken_ms / taken["wall_ms"] * many.BINS, abs=near)


def test_ranks_in_trouble_are_listed_first(run: StandIn):
    engines = [dict(row) for row in run.snapshot()["engines"]]
    engines[1000]["state"] = "gone"
    sent = json.loads(frame({**run.snapshot(), "engines": engines}))["engines"]
    assert len(sent) == many.ENGINES_SHOWN
    assert sent[0]["rank"] == 1000


def test_the_fullest_rank_stands_for_its_group(run: StandIn):
    memory = [dict(row) for row in run.snapshot()["memory"]]
    memory[37]["resident"] = 10**12
    sent = json.loads(lists({**run.snapshot(), "memory": memory}))["memory"]
    assert sent[37 // (RANKS // many.MOST)]["rank"] == 37


def test_stages_stand_for_their_ranks(run: StandIn):
    sent = json.loads(lists(run.snapshot()))
    assert sent["places"] == []
    assert [(row["rank"], row["last"]) for row in sent["by_stage"][:2]] == [(0, 127), (128, 255)]
    assert {(row["ranks"], row["shares"], row["slices"]) for row in sent["by_stage"]} == {
        (128, 16, 8)
    }


def test_a_frame_is_cheap(run: StandIn):
    snapshot = run.snapshot()
    curve = {key: [1.0 / (1 + n) for n in range(600)] for key in ("step", "loss", "rate")}
    spent_s = []
    for _ in range(9):
        began_s = time.thread_time()
        frame({**snapshot, "curve": curve})
        lists(snapshot)
        spent_s.append(time.thread_time() - began_s)
    assert statistics.median(spent_s) < FRAME_S


def test_a_step_of_many_ranks_is_pictured_now_and_then(
    run: StandIn, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("workbench.notebook.panel.panel.MANY_S", 3600.0)
    panel = Panel(run)
    try:
        first = panel._board.sample
        assert json.loads(first)["bins"] == many.BINS
        run.advance(1)
        panel.tick()
        assert panel._board.sample == first
        assert json.loads(panel._board.frame)["step"] == run.snapshot()["step"]
    finally:
        panel.close()


def test_the_picture_of_many_ranks_stays_small(run: StandIn):
    assert len(as_html(run.snapshot(), en.TEXTS)) < 80_000
