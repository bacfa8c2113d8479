"""Strategies: the names a user types, as layouts and back."""

from __future__ import annotations

import pytest

from workbench.errors import LayoutError
from workbench.spec.layout import Layout
from workbench.spec.strategy import STRATEGIES, layout_for, options_of, strategy_of


@pytest.mark.parametrize(
    ("strategy", "ranks", "options", "text"),
    [
        ("none", 4, {}, "dp1"),
        ("data", 4, {}, "dp4"),
        ("data", 4, {"shard": True}, "fsdp4"),
        ("model", 4, {}, "pp4, gpipe x1"),
        ("model", 4, {"by": "tensor"}, "tp4"),
        ("pipeline", 4, {}, "pp4, 1f1b x8"),
        ("pipeline", 2, {"microbatches": 6, "schedule": "gpipe"}, "pp2, gpipe x6"),
        ("hybrid", 4, {}, "pp2 dp2, 1f1b x4"),
        ("hybrid", 6, {}, "pp2 dp3, 1f1b x4"),
        ("hybrid", 8, {}, "pp2 dp2 tp2, 1f1b x4"),
        ("hybrid", 8, {"pp": 4}, "pp4 dp2, 1f1b x8"),
        ("hybrid", 4, {"dp": 2, "tp": 2, "shard": True}, "fsdp2 tp2"),
        ("data", 4, {"shard": False, "microbatches": None}, "dp4"),
    ],
)
def test_a_name_with_its_options_means_a_layout(strategy, ranks, options, text):
    assert str(layout_for(strategy, ranks, **options)) == text


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("ranks", [4, 6, 8, 16])
def test_a_layout_is_called_by_the_name_it_came_from(strategy, ranks):
    layout = layout_for(strategy, ranks)
    assert strategy_of(layout) == strategy
    assert layout.world_size == (1 if strategy == "none" else ranks)


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "hybrid"])
def test_on_one_rank_all_is_one(strategy):
    assert layout_for(strategy, 1) == Layout()


@pytest.mark.parametrize(
    ("strategy", "ranks", "options", "why"),
    [
        ("zebra", 4, {}, r"No strategy named 'zebra'\. Known: data, hybrid, model, none, pipeline"),
        ("model", 4, {"by": "layer"}, r"No way to cut \(--by\) named 'layer'\. Did you mean"),
        (
            "data",
            4,
            {"by": "tensor"},
            r'is an option of model\. Use model --by tensor \("model", by="tensor"\)\.$',
        ),
        (
            "pipeline",
            4,
            {"shard": True},
            r'of data and hybrid\. Use hybrid --shard \("hybrid", shard=True\)\.$',
        ),
        ("pipeline", 2, {"shard": True}, r'Use data --shard \("data", shard=True\)\.$'),
        ("data", 4, {"microbatches": 4}, r"Use hybrid --microbatches 4 .* microbatches=4\)"),
        (
            "pipeline",
            4,
            {"pp": 3},
            r"option of hybrid, where pp=3 does not divide 4 ranks\. Use the layout "
            r'"pp3, 1f1b x6" \(3 of 4 ranks\)\.$',
        ),
        (
            "interleaved",
            4,
            {},
            "interleaved is a schedule of a pipeline. Use pipeline --schedule interleaved "
            r'\("pipeline", schedule="interleaved"\)\.$',
        ),
        ("pipeline", 1, {"schedule": "gpip"}, "No schedule named 'gpip'. Did you mean 'gpipe'"),
        ("data", 4, {"zebra": None}, "No option of a strategy named 'zebra'"),
        ("data", 4, {"zebra": 1}, "No option of a strategy named 'zebra'"),
        ("pipeline", 4, {"microbatches": 0}, "microbatches=0 is not a number of microbatches"),
        ("pipeline", 4, {"schedule": "1f2b"}, "No schedule named '1f2b'"),
        ("hybrid", 3, {}, '3 ranks have no product .* layout "pp2, 1f1b x4" .2 of 3 ranks.'),
        ("hybrid", 1, {}, '1 rank has no product for hybrid by itself. Use the layout "dp1".$'),
        ("hybrid", 4, {"dp": 0}, r"dp=0 is not a degree\. Use a whole number >= 1"),
        ("hybrid", 4, {"pp": 8}, r'pp=8 does not divide 4 ranks\. Use the layout "pp4, 1f1b x8"\.'),
        (
            "hybrid",
            4,
            {"pp": 3},
            r'divide 4 ranks\. Use the layout "pp3, 1f1b x6" \(3 of 4 ranks\)\.',
        ),
        (
            "hybrid",
            3,
            {"tp": 2},
            r'tp=2 does not divide 3 ranks\. Use the layout "tp2" \(2 of 3 ranks\).',
        ),
        ("hybrid", 8, {"pp": 3, "tp": 2}, "pp=3 x tp=2 is 6, which does not divide 8 ranks"),
        ("hybrid", 4, {"dp": 2}, 'dp=2 takes 2 ranks, and there are 4. Use the layout "dp2" .2 of'),
        (
            "hybrid",
            8,
            {"dp": 4, "pp": 4},
            'takes 16 ranks, and there are 8. Use the layout "pp2 dp4, 1f1b x4".',
        ),
        ("hybrid", 3, {"dp": 2}, "dp=2 takes 2 ranks, and there are 3"),
        ("hybrid", 1, {"pp": 2}, r'pp=2 does not divide 1 rank\. Use the layout "dp1"\.'),
        (
            "hybrid",
            4,
            {"tp": 2, "microbatches": 4},
            'and pp=1 is none. Use the layout "pp2 tp2, 1f1b x4".',
        ),
    ],
)
def test_what_means_no_layout_is_refused(strategy, ranks, options, why):
    with pytest.raises(LayoutError, match=why):
        layout_for(strategy, ranks, **options)


def test_the_options_of_a_strategy_are_those_it_takes():
    assert options_of("hybrid") == ["dp", "pp", "tp", "shard", "microbatches", "schedule"]
    assert options_of("none") == []
