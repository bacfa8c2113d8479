"""The lecture on strategies, executed as it is: one curve under all of them, and what they cost."""

from __future__ import annotations

import re

import lectures
import pytest
from lectures import PLOTLY, Cells, number_after, printed, raised, shown, tables

NOTEBOOK = "02_strategies.ipynb"
TIMEOUT_S = 240
SLOW_S = 600  # other work may share the cores
NAMES = ["data", "model, layers", "model, tensor", "pipeline", "hybrid", "data, shards"]
CHUNKS = [1, 2, 4, 8]

pytestmark = pytest.mark.timeout(SLOW_S)


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Cells:
    return lectures.run(NOTEBOOK, tmp_path_factory.mktemp("lecture"), timeout_s=TIMEOUT_S)[0]


def test_the_curve_under_all_strategies_is_that_of_one_rank(cells: Cells):
    assert number_after("Largest relative difference in 72 steps:", printed(cells)) < 1e-5
    curves = shown(cells, PLOTLY)[0]
    one, four = curves["data"]
    assert [trace["x"] for trace in (one, four)] == [list(range(1, 73))] * 2
    assert four["y"] == pytest.approx(one["y"], rel=1e-5)
    assert one["y"][-1] < one["y"][0] / 1.5


def test_each_switch_is_marked_where_it_was(cells: Cells):
    curves = shown(cells, PLOTLY)[0]["layout"]
    assert [shape["x0"] for shape in curves["shapes"]] == [12.5, 24.5, 36.5, 48.5, 60.5]
    told = re.findall(r"After step (\d+): (.*?)  +[\d,]+ ms, +([\d.]+) MB", printed(cells))
    assert [step for step, _, _ in told] == ["12", "24", "36", "48", "60"]
    labels = [note["text"] for note in curves["annotations"]]
    assert [layout for _, layout, _ in told] == labels
    moved_mb = [float(moved) for _, _, moved in told]
    assert moved_mb[0] == 0  # a replica has all that a stage needs
    assert min(moved_mb[1:]) > 1


def test_the_table_says_what_each_rank_holds(cells: Cells):
    rows = {row[0]: row[1:] for row in tables(cells)[0]}
    assert list(rows) == NAMES
    assert rows["data"][1] == "100%: all parts; texts 4 to 7"
    assert rows["model, layers"] == rows["pipeline"]
    assert rows["pipeline"][0].endswith("token, position, blocks.0; texts 0 to 15")
    assert rows["pipeline"][3].endswith("blocks.3, norm, head; texts 0 to 15")
    assert rows["data, shards"][3] == "25%: a piece of each part; texts 12 to 15"
    # The answer on what is whole names what the note of the switch does.
    assert "\nNote: Whole on every tensor-parallel rank: token, position, head\n" in printed(cells)
    held = {trace["name"]: trace["y"] for trace in shown(cells, PLOTLY)[1]["data"]}
    assert list(held) == [f"rank {rank}" for rank in range(4)]
    for name, shares in zip(NAMES, zip(*held.values(), strict=True), strict=True):
        assert shares[0] == pytest.approx(int(rows[name][0].split("%")[0]) / 100, abs=0.006)
        if name in ("model, layers", "pipeline", "data, shards"):
            assert sum(shares) == pytest.approx(1)


def test_the_ranks_send_what_can_be_worked_out(cells: Cells):
    rows = {row[0]: row[1:] for row in tables(cells)[2]}
    assert list(rows) == NAMES
    sent_mb = {name: float(row[1]) for name, row in rows.items()}
    for name in ("data", "model, layers", "model, tensor"):
        worked_out_mb = number_after(f"\n{name}:", printed(cells))
        assert sent_mb[name] == pytest.approx(worked_out_mb, rel=0.03)
    assert max(sent_mb, key=sent_mb.__getitem__) == "model, tensor"
    model_mb = number_after("The model has", printed(cells))
    assert 2.25 * model_mb < sent_mb["data, shards"] < 3.1 * model_mb


def test_chunks_are_measured_beside_the_formula(cells: Cells):
    rows = tables(cells)[1]
    assert [row[0] for row in rows] == [str(chunks) for chunks in CHUNKS]
    assert [row[1] for row in rows] == ["75%", "60%", "43%", "27%"]
    # With one chunk three ranks of four wait, whatever the machine.
    assert 60 < int(rows[0][2].rstrip("%")) < 90
    guess, formula, measured = (trace["y"] for trace in shown(cells, PLOTLY)[2]["data"])
    assert formula == pytest.approx([1, 1.6, 16 / 7, 32 / 11])
    rates = [float(row[3].replace(",", "")) for row in rows]
    assert measured == pytest.approx([rate / rates[0] for rate in rates], rel=1e-2)
    assert all(trace["texttemplate"] for trace in shown(cells, PLOTLY)[2]["data"])
    assert len(guess) == len(measured)


def test_what_does_not_fit_is_refused_and_the_training_goes_on(cells: Cells):
    first, second = raised(cells)
    assert first.startswith("LayoutError: tp=3 does not divide the 4 heads (blocks.0.heads). ")
    assert first.endswith('Use the layout "tp4".')
    assert second.startswith("LayoutError: batch=16 is less than 32 microbatches.")
    assert re.search(r"^running, [3-9]\d* steps further$", printed(cells), re.M)
    assert "pytext-4: paused" in printed(cells)


def test_no_rank_is_left(cells: Cells):
    assert shown(cells[-1:], "text/plain") == ["[]"]
    assert "4 ranks stopped." in printed(cells)


def test_cells_are_short_without_outputs_and_links_lead_somewhere():
    lectures.check_form(NOTEBOOK)
