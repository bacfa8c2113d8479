"""Lines of several ranks on one screen."""

from __future__ import annotations

import io
import json

import pytest
import zmq

from workbench.driver.echo import WINDOW_S, Echo, Grouping, Screen, named


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([2], "rank 2"),
        ([0, 1, 2, 3], "ranks 0-3"),
        ([5, 0, 2, 1], "ranks 0-2,5"),
        ([1, 3], "ranks 1,3"),
    ],
)
def test_ranks_are_named_in_spans(ranks, text):
    assert named(ranks) == text


def grouped(*queues, running=(), now_s=0.0, final=True):
    grouping = Grouping()
    for rank, lines in enumerate(queues):
        grouping.add(rank, lines, 0.0)
    return grouping.take(now_s, running=set(running), final=final)


def test_equal_lines_are_one():
    assert grouped("ab", "ab", "ab") == [([0, 1, 2], "a"), ([0, 1, 2], "b")]


def test_a_line_of_one_rank_does_not_part_the_lines_of_all():
    assert grouped("xab", "ab", "ayb") == [
        ([0], "x"),
        ([0, 1, 2], "a"),
        ([2], "y"),
        ([0, 1, 2], "b"),
    ]


def test_the_order_within_a_rank_is_kept_where_ranks_disagree():
    found = grouped("ab", "ba")
    for rank, expected in enumerate(["ab", "ba"]):
        assert "".join(text for ranks, text in found if rank in ranks) == expected


def test_a_line_that_all_have_is_not_held_back():
    assert grouped("a", "a", running={0, 1}, final=False) == [([0, 1], "a")]


def test_a_line_that_others_may_still_print_waits_for_the_window():
    assert grouped("a", running={0, 1}, final=False) == []
    late = grouped("a", running={0, 1}, final=False, now_s=WINDOW_S * 2)
    assert late == [([0], "a")]


def test_a_line_of_the_only_running_rank_is_not_held_back():
    assert grouped("a", running={0}, final=False) == [([0], "a")]


def message(rank, lines=(), stream="stdout", *, live="", cell=1):
    return {"rank": rank, "cell": cell, "stream": stream, "lines": list(lines), "live": live}


@pytest.fixture
def screen():
    return Screen(io.StringIO(), io.StringIO())


def test_streams_are_kept_apart(screen):
    screen.receive(message(0, ["good"]))
    screen.receive(message(1, ["bad"], "stderr"))
    screen.refresh(set(), final=True)
    assert screen.files["stdout"].getvalue() == "[rank 0] good\n"
    assert screen.files["stderr"].getvalue() == "[rank 1] bad\n"


def test_progress_bars_change_in_place_and_end_as_lines(screen):
    for percent in ("10%", "20%"):
        for rank in (0, 1):
            screen.receive(message(rank, stream="stderr", live=f"{percent} of {rank}"))
        screen.refresh({0, 1})
    for rank in (0, 1):
        screen.receive(message(rank, ["100%"], "stderr"))
    screen.refresh(set(), final=True)
    written = screen.files["stderr"].getvalue()
    assert written.count("\n") == 1
    assert "\r[rank 0] 20% of 0 (and 1 more)" in written
    assert written.endswith("\r[ranks 0-1] 100%\n")


def test_a_value_of_several_lines_is_aligned(screen):
    screen.block([0, 1], "tensor([1,\n        2])")
    assert screen.files["stdout"].getvalue() == (
        "[ranks 0-1] tensor([1,\n                    2])\n"
    )


@pytest.fixture
def echo(tmp_path):
    echo = Echo(f"ipc://{tmp_path}/echo")
    yield echo
    echo.stop()


def test_messages_reach_the_watch_of_their_cell(echo):
    with zmq.Context.instance().socket(zmq.PUSH) as push, echo.watch([0]) as watch:
        push.connect(echo.address)
        push.send(json.dumps(message(0, ["other"], cell=watch.number + 1)).encode())
        push.send(json.dumps(message(0, ["mine"], cell=watch.number)).encode())
        assert watch.events.get(timeout=5)["lines"] == ["mine"]
    assert echo.stray[0]["lines"] == ["other"]


def test_the_address_is_free_after_stop(tmp_path):
    for _ in range(3):
        Echo(f"ipc://{tmp_path}/again").stop()
