"""The lecture on faults, executed as it is: killed ranks, books, who has the state, intervals."""

from __future__ import annotations

from pathlib import Path

import lectures
import pytest
from lectures import PLOTLY, Cells, number_after, printed, shown, tables

NOTEBOOK = "04_faults.ipynb"
TIMEOUT_S = 240
SLOW_S = 600  # other work may share the cores
PHASES = ["others freed", "place filled", "met again", "state moved", "first step"]

pytestmark = pytest.mark.timeout(SLOW_S)


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Cells:
    folder: Path = tmp_path_factory.mktemp("lecture")
    return lectures.run(NOTEBOOK, folder, timeout_s=TIMEOUT_S)[0]


def test_a_killed_rank_is_replaced_by_a_fresh_process_and_by_a_spare(cells: Cells):
    told = printed(cells)
    assert "rank 2: killed by SIGKILL\n" in told
    assert "a fresh one is rank 2. State from the other ranks.\nSteps lost: 0." in told
    assert "a spare one is rank 2. It stood still for" in told
    bars = shown(cells, PLOTLY)[0]["data"]
    assert [trace["name"] for trace in bars] == PHASES
    for place, name in enumerate(("fresh one is rank 2. State", "spare one is rank 2. It")):
        ms = [trace["x"][place] for trace in bars]
        assert min(ms) >= 0
        stood_s = number_after("It stood still for", told[told.index(name) :])
        assert sum(ms) == pytest.approx(1e3 * stood_s, abs=6)


def test_the_curve_is_that_of_the_run_that_was_left_alone(cells: Cells):
    assert number_after("The two differ by", printed(cells)) == 0  # to the last bit
    alone, struck = shown(cells, PLOTLY)[1]["data"]
    assert list(alone["x"]) == list(struck["x"]) == list(range(1, 151))
    assert len(shown(cells, PLOTLY)[1]["layout"]["shapes"]) == 2


def test_goodput_follows_from_the_two_times(cells: Cells):
    told = printed(cells)
    assert "Faults: 2, steps lost: 0\n" in told
    steps_s = number_after("Time in steps:", told)
    down_s = number_after("standing still:", told)
    goodput = number_after("Goodput:", told)
    assert goodput == pytest.approx(steps_s / (steps_s + down_s), abs=0.01)


def test_a_rank_that_is_stopped_is_named_and_goes_on(cells: Cells):
    told = printed(cells)
    assert "Rank 1: the process is stopped for" in told
    assert "held up: ranks 0,2-3" in told
    assert "It goes on. Steps lost: 0." in told
    assert told.count("Steps lost: 0.") == 2


def test_who_has_nobody_elses_copy_goes_back_to_a_checkpoint(cells: Cells):
    rows = {row[0]: row[1:] for row in tables(cells)[0]}
    assert list(rows) == ["dp4", "dp2 fsdp2", "fsdp4", "pp4, 1f1b x8"]
    for layout in ("dp4", "dp2 fsdp2"):
        assert rows[layout][:2] == ["the other ranks", "0"]
    for layout in ("fsdp4", "pp4, 1f1b x8"):
        assert rows[layout][0].startswith("step-")
        assert int(rows[layout][1]) >= 0


def test_the_interval_is_that_of_young(cells: Cells):
    told = printed(cells)
    cost_ms, step_ms = (number_after(words, told) for words in ("A save costs", "A step takes"))
    best_s = (2 * cost_ms / 1e3 * 4.0) ** 0.5
    assert number_after("Save every", told) == pytest.approx(best_s, rel=0.01, abs=2e-3)
    every = number_after("that is every", told)
    assert every == pytest.approx(max(2, best_s * 1e3 / step_ms), rel=0.05, abs=1)


def test_without_saves_all_is_lost_and_with_too_many_hardly_anything(cells: Cells):
    often, best, seldom = tables(cells)[1]
    saves = [int(row[1]) for row in (often, best, seldom)]
    lost = [int(row[2]) for row in (often, best, seldom)]
    assert saves[0] > saves[1] > saves[2] == 0
    assert max(lost[:2]) < lost[2]
    assert lost[0] <= 9  # of three faults, each between two saves
    for row in (often, best, seldom):
        assert 0 <= int(row[4].rstrip("%")) < 100
        assert int(row[3].rstrip("%")) >= 0


def test_no_rank_is_left(cells: Cells):
    assert shown(cells[-1:], "text/plain") == ["[]"]


def test_cells_are_short_without_outputs_and_links_lead_somewhere():
    lectures.check_form(NOTEBOOK)
