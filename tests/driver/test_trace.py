"""Trace: the rules by which Perfetto and chrome://tracing read a file, and what it then says."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise

import pytest

from workbench.driver import trace
from workbench.errors import InputError

# Rank 1 begins later; three operations of rank 0 are under way at once.
SPANS = {
    0: [
        ["data", 0.0, 0.7001, None, None, ""],
        ["forward", 0.7001, 3.1, 0, 1, ""],
        ["idle", 3.1, 3.5, None, None, "pp recv"],
        ["backward", 3.5, 9.2, 0, 1, ""],
        ["wire", 9.2, 9.9, None, None, "dp_shard all-gather"],
    ],
    1: [["optimizer", 0.05, 8.0, None, None, ""]],
}
UNDER = {
    0: [
        ["dp_shard all-gather", 4.0, 9.9, 4000],
        ["dp_shard all-gather", 4.1, 5.0, 3000],
        ["pp send", 4.2, 4.9, 500],
        ["pp send", 5.0, 5.1, 500],
    ],
    1: [],
}


def sample(step=7, ranks=(0, 1)):
    rows = [
        {"rank": rank, "wall_ms": 9.9, "spans": SPANS[rank % 2], "under": UNDER[rank % 2]}
        for rank in ranks
    ]
    return {
        "step": step,
        "layout": "pp2, 1f1b x2",
        "wall_ms": 9.9,
        "ranks": rows,
        "comms": [],
        "straggler": None,
        "clock_error_ms": 0.0,
    }


def profile(begin_us=5_189_119_710_778.153, marker=trace.MARKER):
    """As torch.profiler writes it: host, one device, arrows, and spans of its own."""
    host, device = {"pid": 19526, "tid": 19526}, {"pid": 0, "tid": 7}

    def event(ph, name, where, after_us=0.0, **more):
        return {"ph": ph, "name": name, **where, "ts": begin_us + after_us, **more}

    events = [
        event("M", "process_name", host, args={"name": "python"}),
        event("M", "thread_name", host, args={"name": "main"}),
        event("X", marker, device, -9, dur=1, cat="gpu_user_annotation"),
        event("X", marker, host, dur=99.5, cat="user_annotation"),
        event("X", "aten::mm", host, 10.25, dur=5, cat="cpu_op"),
        event("X", "gemm", device, 30, dur=5, cat="kernel"),
        event("s", "ac2g", host, 10.25, cat="ac2g", id=3),
        event("f", "ac2g", device, 30, cat="ac2g", id=3, bp="e"),
        event("X", "it", {"pid": "Spans", "tid": "x"}, dur=1, cat="Trace"),
        event("i", "Record Window End", {"pid": "", "tid": ""}, 99),
    ]
    return {"schemaVersion": 1, "traceEvents": events}


def spans_of(found, rank, kind=None):
    return [
        event
        for event in found["traceEvents"]
        if event["ph"] == "X" and event["pid"] == rank and kind in (None, event["cat"])
    ]


def names_of(found):
    return {
        (event["pid"], event.get("tid")): event["args"]["name"]
        for event in found["traceEvents"]
        if event["ph"] == "M" and "name" in event["args"]
    }


FILES = {
    "one step": lambda: trace.chrome_trace([sample()]),
    "many ranks": lambda: trace.chrome_trace([sample(ranks=range(5))]),
    "two steps": lambda: trace.chrome_trace([sample(7), sample(19)]),
    "with profiles": lambda: trace.merged(sample(), {0: profile(), 1: profile(1000.5)}),
}


@pytest.mark.parametrize("make", FILES.values(), ids=FILES)
def test_events_of_a_thread_nest(make):
    """Perfetto drops an event that overlaps the one before on its thread."""
    found = make()
    threads = {event["tid"] for event in found["traceEvents"] if "tid" in event}
    for thread in threads:
        open_until = []
        events = [e for e in found["traceEvents"] if e["ph"] == "X" and e["tid"] == thread]
        for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
            ends = [
                round(1000 * event["ts"]),
                round(1000 * event["ts"]) + round(1000 * event["dur"]),
            ]
            while open_until and open_until[-1] <= ends[0]:
                open_until.pop()
            assert not open_until or ends[1] <= open_until[-1], event
            open_until.append(ends[1])


@pytest.mark.parametrize("make", FILES.values(), ids=FILES)
def test_a_thread_has_a_number_of_its_own_and_a_name(make):
    """Perfetto takes thread 0, and one of its process's number, for the process's first."""
    found = make()
    events = [event for event in found["traceEvents"] if "tid" in event]
    of_rank = {(event["tid"], event["pid"]) for event in events}
    ranks = {rank for _, rank in of_rank}
    assert len({thread for thread, _ in of_rank}) == len(of_rank)
    assert not {thread for thread, _ in of_rank} & {0, *ranks}
    assert {(rank, thread) for thread, rank in of_rank} < set(names_of(found))
    assert all(names_of(found)[rank, None] == f"rank {rank}" for rank in ranks)


@pytest.mark.parametrize("make", FILES.values(), ids=FILES)
def test_times_are_whole_nanoseconds_from_zero_on(make):
    times = [
        event[name] for event in make()["traceEvents"] for name in ("ts", "dur") if name in event
    ]
    assert min(times) == 0
    assert all(time == round(time, 3) for time in times)


def test_the_step_is_around_what_the_rank_did_without_gaps():
    found = trace.chrome_trace([sample()])
    around, *inside = [e for e in spans_of(found, 0) if e["cat"] != "communication"]
    assert (around["name"], around["ts"], around["dur"]) == ("step 7", 0, 9900)
    assert around["args"] == {"layout": "pp2, 1f1b x2", "step_ms": 9.9}
    for before, after in pairwise(inside):
        assert round(before["ts"] + before["dur"], 3) == after["ts"]
    assert [event["name"] for event in inside] == [
        "data", "forward 1", "idle pp recv", "backward 1", "wire dp_shard all-gather",
    ]  # fmt: skip
    assert inside[1]["args"] == {"stage": 0, "microbatch": 1}
    assert inside[2]["args"] == {"operation": "pp recv"}


def test_communication_that_overlaps_is_on_threads_of_its_own():
    found = trace.chrome_trace([sample()])
    names = names_of(found)
    lanes = [(names[0, e["tid"]], e["ts"]) for e in spans_of(found, 0, "communication")]
    assert lanes == [
        ("communication", 4000.0),
        ("communication 2", 4100.0),
        ("communication 3", 4200.0),
        ("communication 2", 5000.0),
    ]
    assert not spans_of(found, 1, "communication")


def test_the_counter_says_what_is_under_way_and_ends_at_zero():
    counts = [e for e in trace.chrome_trace([sample()])["traceEvents"] if e["ph"] == "C"]
    assert [(event["ts"], event["args"]["bytes"]) for event in counts] == [
        (4000, 4000), (4100, 7000), (4200, 7500),
        (4900, 7000), (5000, 4500), (5100, 4000), (9900, 0),
    ]  # fmt: skip


def test_a_later_step_begins_after_all_of_the_one_before():
    found = trace.chrome_trace([sample(7), sample(19)])
    first, second = (spans_of(found, 0, "step")[n] for n in (0, 1))
    assert second["name"] == "step 19"
    assert second["ts"] > first["ts"] + first["dur"]
    assert [one["step"] for one in found["otherData"]["steps"]] == [7, 19]
    assert trace.chrome_trace([])["traceEvents"] == []


def test_profiles_lie_on_the_clock_of_the_step():
    found = trace.merged(sample(), {0: profile(), 1: profile(1000.5)})
    for rank in (0, 1):
        at_us = spans_of(found, rank, "step")[0]["ts"]
        marker = spans_of(found, rank, "user_annotation")[0]
        assert marker["name"] == trace.MARKER
        assert marker["ts"] == pytest.approx(at_us, abs=0.002)
        assert spans_of(found, rank, "cpu_op")[0]["ts"] == pytest.approx(at_us + 10.25, abs=0.002)
        assert spans_of(found, rank, "kernel")[0]["tid"] != marker["tid"]
    names = names_of(found)
    assert names[0, spans_of(found, 0, "cpu_op")[0]["tid"]] == "main"
    assert not [event for event in found["traceEvents"] if event.get("cat") == "Trace"]


def test_arrows_of_one_rank_do_not_lead_to_another():
    found = trace.merged(sample(), {0: profile(), 1: profile()})
    arrows = [(e["id"], e["pid"]) for e in found["traceEvents"] if e["ph"] in "sf"]
    assert len(arrows) == 4
    assert len(set(arrows)) == len({number for number, _ in arrows}) == 2


def test_a_profile_that_cannot_be_aligned_is_refused():
    with pytest.raises(InputError, match="of rank 1 has no event workbench_step"):
        trace.merged(sample(), {1: profile(marker="step")})
    with pytest.raises(InputError, match="of rank 5, and the step has ranks 0, 1"):
        trace.merged(sample(), {5: profile()})


def test_the_file_is_json_packed_where_its_name_says_so():
    made = trace.chrome_trace([sample()])
    assert json.loads(trace.write(made, "a.json").read_text()) == made
    assert json.loads(gzip.decompress(trace.write(made, "a.json.gz").read_bytes())) == made
    with pytest.raises(InputError, match="is there already"):
        trace.write(made, "a.json")
    trace.write(trace.chrome_trace([]), "a.json", force=True)


@pytest.mark.parametrize("name", ["a", "a.txt", "a.CSV", "a.gz", "a.json.zip", ".json"])
def test_a_name_of_another_kind_is_refused(tmp_path, name):
    with pytest.raises(InputError, match=rf"{name}: name a file that ends in \.json or \.json\.gz"):
        trace.write(trace.chrome_trace([]), name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", [None, 5, b"a.json", ""])
def test_what_names_no_file_is_told_in_one_sentence(path):
    with pytest.raises(InputError) as caught:
        trace.write(trace.chrome_trace([]), path)
    assert str(caught.value) == f"{path!r} names no file. Name one that ends in .json or .json.gz."
