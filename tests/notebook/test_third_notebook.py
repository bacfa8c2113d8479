"""The lecture on where the time goes, executed as it is: books, a straggler, bubbles, links."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from statistics import median

import lectures
import pytest
from lectures import PLOTLY, Cells, number_after, printed, shown, tables

NOTEBOOK = "03_where_time_goes.ipynb"
TIMEOUT_S = 240
SLOW_S = 600  # other work may share the cores
PIPELINES = {"gpipe x1": 75, "gpipe x2": 60, "gpipe x4": 43, "gpipe x8": 27, "1f1b x8": 27}
PARTS = ["forward", "backward", "optimizer", "data", "wire", "idle", "other"]

pytestmark = pytest.mark.timeout(SLOW_S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lecture")


@pytest.fixture(scope="module")
def cells(folder: Path) -> Cells:
    return lectures.run(NOTEBOOK, folder, timeout_s=TIMEOUT_S)[0]


def values(numbers: object) -> list[float]:
    """The numbers of a trace that was given as a list."""
    assert isinstance(numbers, list)
    return numbers


def test_the_books_of_a_step_balance(cells: Cells):
    rows = tables(cells)[0]
    assert [row[0] for row in rows] == [f"rank {rank}" for rank in range(4)]
    step_ms = number_after("took", printed(cells))
    for row in rows:
        *parts, total, wall = (float(cell) for cell in row[1:])
        assert len(parts) == len(PARTS)
        assert total == pytest.approx(wall, abs=0.3)
        assert sum(parts) == pytest.approx(total, abs=0.5)  # each is rounded
        assert min(parts[:2]) > 0
    # From the first rank's begin to the last rank's end.
    assert max(float(row[-1]) for row in rows) <= step_ms + 1


def test_the_books_agree_with_another_clock(cells: Cells):
    own_s = number_after("by the clock of the notebook:", printed(cells))
    books_s = number_after("by the books of the ranks:", printed(cells))
    # What is asked of the ranks is under way for a while before the first step, and after the last.
    assert 0.8 * own_s < books_s < 1.02 * own_s


def test_a_timeline_has_a_row_a_rank_without_gaps(cells: Cells):
    for figure in (shown(cells, PLOTLY)[n] for n in (0, 3, 4, 8)):
        assert [trace["name"] for trace in figure["data"]] == PARTS
        for rank in range(4):
            spans = sorted(
                (begin, begin + width)
                for trace in figure["data"]
                for name, begin, width in zip(
                    trace["y"], values(trace["base"]), values(trace["x"]), strict=True
                )
                if name == f"rank {rank}"
            )
            ends = [end for _, end in spans[:-1]]
            assert [begin for begin, _ in spans[1:]] == pytest.approx(ends, abs=0.01)


def test_bytes_go_with_the_model_and_not_with_the_batch(cells: Cells):
    rows = {(int(batch), int(ranks)): rest for batch, ranks, *rest in tables(cells)[1]}
    assert list(rows) == [(batch, ranks) for batch in (4, 16, 64) for ranks in (1, 2, 4)]
    for (_, ranks), (sent_mb, comm, idle, rate) in rows.items():
        # In a ring of n: 2 (n - 1) / n of 3.5 MB.
        assert float(sent_mb) == pytest.approx(3.501 * 2 * (ranks - 1) / ranks, rel=0.03)
        assert (comm == idle == "0%") or ranks > 1
        assert float(rate.replace(",", "")) > 0
    wire, idle, guess = shown(cells, PLOTLY)[1]["data"]
    assert [trace["name"] for trace in (wire, idle, guess)] == ["wire", "idle", "your guess"]
    assert all(0 <= a + b < 1 for a, b in zip(wire["y"], idle["y"], strict=True))


def test_the_slow_rank_is_found_by_the_waiting_of_the_others(cells: Cells):
    told = printed(cells)
    assert number_after("\nRank", told) == 2
    assert number_after("The others waited", told) == pytest.approx(30, abs=15)
    traces = {trace["name"]: trace["y"] for trace in shown(cells, PLOTLY)[2]["data"]}
    assert list(traces) == [
        f"{part}, {when}" for part in ("idle", "wire") for when in ("before", "with a slow rank")
    ]
    idle = traces["idle, with a slow rank"]
    others = [idle[rank] for rank in (0, 1, 3)]
    assert idle[2] < 10 < min(others)
    assert median(others) == pytest.approx(30, abs=15)


def test_bubbles_are_measured_beside_the_formula(cells: Cells):
    rows = tables(cells)[2]
    assert {row[0]: int(row[1].rstrip("%")) for row in rows} == PIPELINES
    # With one chunk three ranks of four wait, whatever the machine.
    assert 60 < int(rows[0][2].rstrip("%")) < 90
    figures = shown(cells, PLOTLY)[4:9]
    assert [figure["layout"]["title"]["text"] for figure in figures] == list(PIPELINES)
    assert len({tuple(figure["layout"]["xaxis"]["range"]) for figure in figures}) == 1
    for name, figure in zip(PIPELINES, figures, strict=True):
        chunks = {str(chunk) for chunk in range(int(name.split("x")[1]))}
        for trace in figure["data"][:2]:
            assert set(values(trace["text"])) == chunks


def test_1f1b_keeps_as_many_chunks_as_ranks_follow(cells: Cells):
    one, gpipe, one_f_one_b = (trace["y"] for trace in shown(cells, PLOTLY)[9]["data"])
    assert gpipe == pytest.approx(one, rel=0.01)
    for rank in range(4):
        assert one_f_one_b[rank] / gpipe[rank] == pytest.approx((4 - rank) / 8, rel=0.02)
        assert f"Rank {rank}: 1F1B keeps {4 - rank}.0 chunks of 8.\n" in printed(cells)


def test_tensor_parallelism_talks_most_often_and_most(cells: Cells):
    rows = {(row[0], row[1]): row[2:] for row in tables(cells)[3]}
    counts = {key: (int(row[0]), float(row[1])) for key, row in rows.items()}
    assert counts == {
        ("pipeline", "all-reduce"): (1, 0.0),
        ("pipeline", "recv"): (12, 1.57),
        ("pipeline", "send"): (12, 1.57),
        ("data", "all-reduce"): (2, 3.5),
        ("tensor", "all-reduce"): (17, 16.78),
    }
    for _, _, held, waiting, _ in rows.values():
        assert 0 <= float(waiting) <= float(held)
    links = {row[0]: [float(cell) for cell in row[1:]] for row in tables(cells)[4]}
    sent_mb = {name: row[0] for name, row in links.items()}
    assert sent_mb["pipeline"] < sent_mb["data"] < sent_mb["tensor"]
    for row in links.values():
        assert row[1:] == pytest.approx([row[0] / gbps for gbps in (0.125, 12.5, 450)], rel=0.02)


def test_files_are_taken_along(cells: Cells, folder: Path):
    with (folder / "steps.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(1, 43))
    assert "\n42 steps. Columns: step, loss, rate, wall_ms, forward_ms," in printed(cells)
    assert json.loads((folder / "step.json").read_text())["traceEvents"]


def test_no_rank_is_left(cells: Cells):
    assert shown(cells[-1:], "text/plain") == ["[]"]
    assert "4 ranks stopped." in printed(cells)


def test_cells_are_short_without_outputs_and_links_lead_somewhere():
    lectures.check_form(NOTEBOOK)
