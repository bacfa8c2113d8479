"""The first lecture, executed as it is: from top to bottom, and once more in the same kernel."""

from __future__ import annotations

import lectures
import pytest
from lectures import PLOTLY, Cells, number_after, printed, shown

NOTEBOOK = "01_first_training.ipynb"
TIMEOUT_S = 100
NUM_PASSES = 2


@pytest.fixture(scope="module")
def passes(tmp_path_factory: pytest.TempPathFactory) -> list[Cells]:
    folder = tmp_path_factory.mktemp("lecture")
    return lectures.run(NOTEBOOK, folder, timeout_s=TIMEOUT_S, num_passes=NUM_PASSES)


@pytest.mark.parametrize("turn", range(NUM_PASSES))
class TestEachPass:
    def test_one_rank_and_four_learn_the_same(self, passes: list[Cells], turn: int):
        assert (
            number_after("Largest relative difference in 100 steps:", printed(passes[turn])) < 1e-5
        )
        one, four = (
            text for text in shown(passes[turn], "text/plain") if text.startswith("{'accuracy'")
        )
        assert one == four
        assert number_after("accuracy", one) > 0.9

    def test_the_ranks_show_different_gradients_and_then_one(self, passes: list[Cells], turn: int):
        text = printed(passes[turn])
        assert "[rank 3] gradient before: [[3.0, 4.0, 5.0]]" in text
        assert "[ranks 0-3] gradient after:  [[1.5, 2.5, 3.5]]" in text

    def test_each_rank_sends_what_a_ring_needs(self, passes: list[Cells], turn: int):
        text = printed(passes[turn])
        ring_mb = number_after("Expected in a ring of 4:", text)
        for rank in range(4):
            assert number_after(f"Rank {rank} sent", text) == pytest.approx(ring_mb, rel=0.02)

    def test_the_same_steps_again_give_the_same_losses(self, passes: list[Cells], turn: int):
        assert "Largest difference between the two times: 0.0\n" in printed(passes[turn])

    def test_every_figure_has_all_its_data(self, passes: list[Cells], turn: int):
        curves, times, shares = shown(passes[turn], PLOTLY)
        assert [len(trace["x"]) for trace in curves["data"]] == [100, 100]
        names = [trace["name"] for trace in times["data"]]
        assert names[:2] == ["forward", "backward"]
        assert {"communication", "waiting"} < {*names}
        guessed, measured = (trace["y"] for trace in shares["data"])
        assert len(guessed) == len(measured) > 1

    def test_the_sentence_below_the_bars_is_about_the_same_steps(
        self, passes: list[Cells], turn: int
    ):
        bars = [trace["y"] for trace in shown(passes[turn], PLOTLY)[1]["data"]]
        one, *four = map(sum, zip(*bars, strict=True))
        times = number_after("That is", printed(passes[turn]))
        assert times == pytest.approx(one / (sum(four) / len(four)), rel=0.05)

    def test_no_rank_is_left(self, passes: list[Cells], turn: int):
        assert shown(passes[turn][-1:], "text/plain") == ["[]"]
        assert "4 ranks stopped." in printed(passes[turn])


def test_cells_are_short_without_outputs_and_links_lead_somewhere():
    lectures.check_form(NOTEBOOK)
