"""What the panel says of faults: in its frames, its picture, its text, and in other languages."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import pytest

from tests.browser.panel_run import PHASES_S, StandIn
from workbench.driver.outages import Outages
from workbench.notebook.panel.frame import frame, lists
from workbench.notebook.panel.outages import COLOURS, SHOWN, phases
from workbench.notebook.panel.still import as_html, as_text
from workbench.notebook.panel.texts import Language, en, zh
from workbench.spec.policies import ON_LOSS, ON_STALL


@pytest.fixture
def run():
    run = StandIn(step=137)
    run.change(state="running")
    run.lose(1)
    return run


def test_the_phases_of_an_outage_add_up(run):
    (outage,) = json.loads(lists(run.snapshot()))["outages"]
    assert list(outage["phases"]) == list(COLOURS)
    assert sum(outage["phases"].values()) == pytest.approx(outage["took_ms"])
    assert outage["took_ms"] == pytest.approx(1e3 * max(PHASES_S.values()))


def test_what_the_driver_marks_is_known_to_the_panel():
    outages = Outages("replace")
    outage = outages.begin("rank 1: killed", [1], 3, 0.0)
    for what in ("free", "places filled", "met", "state"):
        outage.mark(what)
    outages.new_step()
    assert list(phases(outages.last.to_dict())) == list(COLOURS)


def test_time_until_the_user_has_chosen_is_told_apart(run):
    run.lose(2, filled="")
    assert json.loads(frame(run.snapshot()))["state"] == "waiting"
    run.ask("recover", how="replace").result()
    last = json.loads(lists(run.snapshot()))["outages"][-1]
    assert last["phases"]["again"] == pytest.approx(20_000)
    assert sum(last["phases"].values()) == pytest.approx(last["took_ms"])


def test_only_the_last_outages_are_sent_and_none_with_each_step(run):
    for _ in range(2 * SHOWN):
        run.lose(2)
    assert len(json.loads(lists(run.snapshot()))["outages"]) == SHOWN
    faults = json.loads(frame(run.snapshot()))["faults"]
    assert "outages" not in faults
    assert (faults["faults"], faults["policy"]) == (1 + 2 * SHOWN, "replace")


def test_the_text_has_a_line_of_faults(run):
    assert as_text(run.snapshot()).splitlines()[4:] == [
        "faults 1, steps lost 0, stood still 0.20 s, goodput 93 %"
    ]


def test_the_picture_has_a_bar_for_each_outage(run):
    run.lose(2, lost=3)
    html = as_html(run.snapshot(), en.TEXTS)
    ElementTree.fromstring(f"<div>{html}</div>")
    assert "faults 2, steps lost 3" in html
    assert "rank 2: its process was killed by SIGKILL, a spare one is rank 2, state from" in html
    for colour in COLOURS.values():
        widths = re.findall(rf"width:([\d.]+)px;background:{colour}", html)
        assert [float(width) > 0 for width in widths] == [True] * 3  # the legend's, and two
    assert en.TEXTS["faults_title"] not in as_html(StandIn(step=3).snapshot(), en.TEXTS)


def test_who_took_the_place_is_said_in_the_language_of_the_panel(run):
    run.lose(2, filled="a fresh one is rank {}")
    run.lose(3, filled="2 ranks are left")
    said = Language("zh").said(run.snapshot())
    told = [(one["filled"], one["source"]) for one in said["faults"]["outages"]]
    assert not re.search("[A-Za-z]", str(told).replace("'", ""))
    assert [mark["label"] for mark in said["marks"]] == [zh.MARKS["lost"]] * 3
    assert {mark["kind"] for mark in said["marks"]} == {"fault"}
    assert said["events"][0]["text"].startswith("\u8fdb\u7a0b 1 ")


def test_every_policy_and_the_spares_are_explained(run):
    for key, names in (("on_loss", ON_LOSS), ("on_stall", ON_STALL)):
        assert all(en.TEXTS[f"{key}_{name}{more}"] for name in names for more in ("", "_more"))
    assert all("{spares}" in en.TEXTS[f"on_loss_{name}_more"] for name in ON_LOSS)
    run.change(faults={**run.snapshot()["faults"], "spares": 1})
    assert ">4 / 4 +1 spare<" in as_html(run.snapshot(), en.TEXTS)
