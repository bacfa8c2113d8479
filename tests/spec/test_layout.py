"""Layout: its text form, and where a rank lies."""

from __future__ import annotations

import itertools

import pytest

from workbench.errors import LayoutError
from workbench.spec.layout import AXES, Layout, parse_layout
from workbench.spec.schedules import SCHEDULES


def layouts(ranks: int) -> list[Layout]:
    """Every product of four degrees that equals the number of ranks."""
    found = []
    for degrees in itertools.product(range(1, ranks + 1), repeat=len(AXES)):
        how = dict(zip(AXES, degrees, strict=True))
        layout = Layout(**how)
        if layout.world_size == ranks:
            found.append(layout)
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8])
def test_every_layout_is_read_from_its_own_text(ranks):
    for layout in layouts(ranks):
        assert parse_layout(str(layout)) == layout


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_is_read_from_the_text(schedule):
    layout = Layout(pp=2, dp_shard=2, schedule=schedule, microbatches=8)
    assert str(layout) == f"pp2 fsdp2, {schedule} x8"
    assert parse_layout(str(layout)) == layout


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("dp1", Layout()),
        ("dp4", Layout(dp_replicate=4)),
        ("tp2 fsdp2", Layout(dp_shard=2, tp=2)),
        ("pp4", Layout(pp=4)),
        ("pp2 dp2 tp2, 1f1b x8", Layout(2, 2, 1, 2, "1f1b", 8)),
        ("pp2, x4 1f1b", Layout(pp=2, schedule="1f1b", microbatches=4)),
    ],
)
def test_texts_mean_layouts(text, layout):
    assert parse_layout(text) == layout


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", '\'\' is no layout. Write one such as "dp4" or "pp2 dp2, 1f1b x8"\\.'),
        ("zz4", r"'zz4' in 'zz4' is no degree\. Use pp, dp, fsdp, tp with a number"),
        ("dp2 dp2", "each once"),
        ("4", "is no degree"),
        ("dp\u0663", r"no degree\. Use pp, dp, fsdp, tp"),
        ("pp2, x\u0663", "No schedule named"),
        ("dp0", r"^dp=0 is not a degree\. Use a whole number >= 1"),
        ("pp2, 1f2b x4", r"No schedule named '1f2b'\. Did you mean '1f1b'\?"),
        ("dp4, 1f1b x4", 'belongs to a pipeline, and dp4 is none. Use the layout "dp4".'),
        ("dp2 1f1b x4", 'belongs to a pipeline, and dp2 is none. Use the layout "dp2".'),
        ("pp2, x0", "microbatches=0 is not a number of microbatches. Use a whole number >= 1."),
        ("pp2 dp2 1f1b x8", 'no degree: it goes behind a comma. Use "pp2 dp2, 1f1b x8".'),
        ("pp2 dp2 x4, 1f1b", 'no degree: it goes behind a comma. Use "pp2 dp2, x4 1f1b".'),
        ("pp2 dp2, 1f1b y8", 'no number of microbatches. Use "pp2 dp2, 1f1b x8".'),
        ("pp8, 8 1f1b", 'no number of microbatches. Use "pp8, x8 1f1b".'),
        ("1f1b", r'begins with one. Use pipeline --schedule 1f1b \("pipeline", schedule="1f1b"\)'),
        (
            "zbv x8",
            "Use pipeline --schedule zbv --microbatches 8 "
            r'\("pipeline", schedule="zbv", microbatches=8\)',
        ),
    ],
)
def test_texts_that_mean_nothing_are_refused(text, why):
    with pytest.raises(LayoutError, match=why):
        parse_layout(text)


@pytest.mark.parametrize("degree", [True, 2.0, "2", -1])
def test_a_degree_is_a_whole_number(degree):
    with pytest.raises(LayoutError, match="is not a degree"):
        Layout(tp=degree)


@pytest.mark.parametrize("ranks", [4, 8])
def test_each_rank_has_a_place_of_its_own(ranks):
    for layout in layouts(ranks):
        places = [tuple(layout.coordinate(rank).values()) for rank in range(ranks)]
        assert len(set(places)) == ranks
        assert places == sorted(places)
        shares = [layout.share(rank) for rank in range(ranks)]
        assert {shares.count(share) for share in range(layout.dp)} == {ranks // layout.dp}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_each_stage_is_on_one_pipeline_rank(schedule, pp):
    layout = Layout(pp=pp, tp=2, schedule=schedule, microbatches=8)
    held = [stage for rank in range(0, layout.world_size, 2) for stage in layout.stages(rank)]
    assert sorted(held) == list(range(layout.num_stages))
    assert all(layout.stages(rank) == layout.stages(rank + 1) for rank in range(0, 2 * pp, 2))


def test_a_layout_travels_as_plain_values():
    layout = parse_layout("pp2 fsdp2, zbv x4")
    assert Layout(**layout.to_dict()) == layout
    assert layout.used() == {"pp": 2, "dp_shard": 2}


def test_a_v_begins_and_ends_on_the_first_rank():
    layout = Layout(pp=4, schedule="zbv", microbatches=8)
    assert [layout.stages(rank) for rank in range(4)] == [[0, 7], [1, 6], [2, 5], [3, 4]]


@pytest.mark.parametrize(
    ("schedule", "ranks", "microbatches", "why"),
    [
        ("gpipe", 4, 1, ""),
        ("1f1b", 4, 3, "needs at least 4 microbatches on 4 pipeline ranks"),
        ("1f1b", 4, 5, ""),
        ("interleaved", 4, 9, "needs 2 rounds of equal length on 4 pipeline ranks"),
        ("interleaved", 4, 10, ""),
        ("interleaved", 2, 3, ""),
        ("dualpipev", 4, 7, "needs at least 8 microbatches on 4 pipeline ranks"),
    ],
)
def test_a_schedule_says_how_many_microbatches_it_runs(schedule, ranks, microbatches, why):
    assert SCHEDULES[schedule].why_not(ranks, microbatches) == why
