"""A recorded step of all ranks: who waited for whom is told apart from the wire."""

from __future__ import annotations

import pytest

from workbench.driver.sample import bubble, joined
from workbench.spec.layout import axis_of, parse_layout


def _told(began_s, spans, ops=(), offset_s=0.0):
    return {
        "step": 7, "began_s": began_s, "offset_s": offset_s, "error_s": 0.001,
        "spans": spans, "ops": list(ops),
    }  # fmt: skip


def _all_reduce(launched_s, done_s, size=1000):
    return ("all-reduce", [0, 1], None, size, launched_s, done_s)


def test_until_the_last_came_it_was_waiting_and_then_the_wire():
    early = _told(
        100.0,
        [("forward", 0, 0.010, (0, 0)), ("comm", 0.010, 0.050, [0]), ("other", 0.050, 0.051, None)],
        [_all_reduce(0.010, 0.050)],
    )
    # This rank's clock is 5 s ahead, and it comes 30 ms later.
    late = _told(
        105.0,
        [("forward", 0, 0.040, (0, 0)), ("comm", 0.040, 0.050, [0]), ("other", 0.050, 0.052, None)],
        [_all_reduce(0.040, 0.050)],
        offset_s=5.0,
    )
    sample = joined([early, late], parse_layout("dp2"))
    first, second = sample["ranks"]
    assert [span[0] for span in first["spans"]] == ["forward", "idle", "wire", "other"]
    assert [span[0] for span in second["spans"]] == ["forward", "wire", "other"]
    assert first["spans"][1][1:3] == [10.0, 40.0]
    assert first["spans"][2][5] == "dp_replicate all-reduce"
    assert first["waiting"] == pytest.approx(0.75)
    assert sample["straggler"] == {"rank": 1, "ms": pytest.approx(30.0)}
    (comm,) = sample["comms"]
    assert (comm["count"], comm["bytes"]) == (1, 1000)
    assert comm["exposed_ms"] == pytest.approx(25.0)
    assert comm["waiting_ms"] == pytest.approx(15.0)
    assert comm["overlapped_ms"] == pytest.approx(0.0)
    # 2 (n-1)/n = 1 times 1,000 bytes in the 10 ms after the last had come.
    assert comm["bus_gbps"] == pytest.approx(1000 / 0.010 / 1e9)
    assert sample["clock_error_ms"] == 1.0
    assert bubble(sample) == pytest.approx(30 / (10 + 40 + 30))


def test_a_message_is_waited_for_until_it_is_sent():
    sender = _told(
        0.0,
        [("forward", 0, 0.020, (0, 0)), ("other", 0.020, 0.050, None)],
        [("send", [0, 1], 1, 80, 0.020, None)],
    )
    receiver = _told(
        0.0,
        [("comm", 0, 0.025, [0]), ("forward", 0.025, 0.050, (1, 0))],
        [("recv", [0, 1], 0, 80, 0.0, 0.025)],
    )
    sample = joined([sender, receiver], parse_layout("pp2"))
    assert sample["ranks"][1]["spans"][0][:3] == ["idle", 0.0, 20.0]
    assert sample["ranks"][1]["spans"][1][:3] == ["wire", 20.0, 25.0]
    assert sample["straggler"] is None  # stages wait for each other by design
    send = next(one for one in sample["comms"] if one["op"] == "send")
    assert send["overlapped_ms"] is None  # nobody knows when it was done


def test_stages_that_end_at_different_times_accuse_nobody():
    told = [
        _told(
            0.0,
            [("backward", 0, 0.01 * n, (0, 0)), ("comm", 0.01 * n, 0.05, [0])],
            [("all-reduce", [0, 1, 2, 3], None, 4, 0.01 * n, 0.05)],
        )
        for n in range(1, 5)
    ]
    assert joined(told, parse_layout("pp2 dp2, gpipe x2"))["straggler"] is None
    assert joined(told, parse_layout("dp4"))["straggler"]["rank"] == 3


def test_what_goes_on_while_a_rank_computes_is_overlapped():
    told = [
        _told(
            0.0,
            [("backward", 0, 0.030, (0, 0)), ("comm", 0.030, 0.034, [0])],
            [_all_reduce(0.010, 0.034)],
        )
        for _ in range(2)
    ]
    (comm,) = joined(told, parse_layout("fsdp2"))["comms"]
    assert comm["axis"] == "dp_shard"
    assert comm["exposed_ms"] == pytest.approx(4.0)
    assert comm["overlapped_ms"] == pytest.approx(20.0)


def test_spans_too_short_to_be_seen_leave_no_gap():
    spans = [("forward", 0, 0.5, (0, 0)), ("other", 0.5, 0.50001, None), ("data", 0.50001, 1, None)]
    sample = joined([_told(0.0, spans)], parse_layout("dp1"))
    assert [span[:3] for span in sample["ranks"][0]["spans"]] == [
        ["forward", 0.0, 500.01],
        ["data", 500.01, 1000.0],
    ]


@pytest.mark.parametrize(
    ("text", "ranks", "axis"),
    [
        ("dp4", (0, 1, 2, 3), "dp_replicate"),
        ("pp2 tp2", (0, 1), "tp"),
        ("pp2 tp2", (1, 3), "pp"),
        ("pp2 tp2", (0, 1, 2, 3), "all"),
        ("dp2 fsdp2 tp2", (0, 2, 4, 6), "dp"),
        ("dp2 fsdp2", (0, 1, 2, 3), "all"),
        ("dp2", (0, 1, 2, 3), "all"),  # two of them idle
    ],
)
def test_ranks_lie_along_an_axis(text, ranks, axis):
    assert axis_of(parse_layout(text), ranks) == axis


def test_who_came_late_because_it_waited_is_not_named():
    def rank(forward_s, gather, reduce):
        gathered, reduced = 0.042 if 3 in gather else 0.011, 0.043
        return _told(
            0.0,
            [
                ("forward", 0, forward_s, (0, 0)),
                ("comm", forward_s, gathered, [0]),
                ("comm", gathered, reduced, [1]),
            ],
            [
                ("all-gather", gather, None, 80, forward_s, gathered),
                ("all-reduce", reduce, None, 80, gathered, reduced),
            ],
        )

    # Rank 3 is 30 ms late; rank 2 waits for it, and then rank 0 for rank 2.
    told = [
        rank(0.010, [0, 1], [0, 2]), rank(0.010, [0, 1], [1, 3]),
        rank(0.010, [2, 3], [0, 2]), rank(0.040, [2, 3], [1, 3]),
    ]  # fmt: skip
    sample = joined(told, parse_layout("dp2 fsdp2"))
    assert sample["straggler"] == {"rank": 3, "ms": pytest.approx(30.5)}
