"""What a reader is told when a cell raised on some of the ranks."""

from __future__ import annotations

from workbench.driver.cells import failure
from workbench.errors import EnginesError


def raised(name, text="", line=None, where=()):
    error = {"name": name, "text": text, "line": line, "traceback": list(where)}
    return {"ok": False, "error": error}


GOOD = {"ok": True, "value_text": None}


def test_nothing_raised_is_no_error():
    assert failure({0: GOOD, 1: GOOD}) is None


def test_equal_errors_are_one_report():
    error = failure(
        {rank: raised("ValueError", "no", 3, ["cell 1, line 3: f()"]) for rank in range(4)}
    )
    assert error._render_traceback_() == [
        "RankError: ranks 0-3: ValueError: no (line 3 of the cell)",
        "  cell 1, line 3: f()",
    ]


def test_different_errors_are_told_apart():
    error = failure({0: raised("A", "x", 1), 1: GOOD, 2: raised("B", "y", 2)})
    assert error._render_traceback_() == [
        "RankError: rank 0: A: x (line 1 of the cell)",
        "rank 2: B: y (line 2 of the cell)",
    ]


CLOSED = "[/build/gloo/transport/tcp/pair.cc:1] Connection closed by peer [127.0.0.1]:1"


def test_a_peer_that_went_away_is_not_the_first_cause():
    error = failure({0: raised("RuntimeError", CLOSED, 2), 1: raised("ValueError", "no", 1)})
    assert error._render_traceback_() == [
        "RankError: rank 1: ValueError: no (line 1 of the cell)",
        "rank 0: waited in a collective (line 2 of the cell)",
    ]


def test_a_peer_that_went_away_without_another_cause_is_told():
    error = failure({0: raised("RuntimeError", CLOSED, 2)})
    assert str(error) == (
        "rank 0: RuntimeError: Connection closed by peer [127.0.0.1]:1 (line 2 of the cell)"
    )


def test_an_interrupt_is_said_in_a_sentence():
    replies = {0: raised("KeyboardInterrupt", "x", 1), 1: raised("RuntimeError", CLOSED, 1)}
    assert failure(replies, interrupted=True)._render_traceback_() == [
        "RankError: ranks 0-1: interrupted (line 1 of the cell); variables stay",
    ]


def test_a_rank_that_is_gone_is_said_in_its_own_words():
    gone = EnginesError("Rank 1 is gone.")
    reply = {**raised("EnginesError", "Rank 1 is gone."), "lost": gone}
    assert failure({0: GOOD, 1: reply}) is gone
