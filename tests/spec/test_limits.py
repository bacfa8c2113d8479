"""Limits: why a layout does not fit, with the values that do."""

from __future__ import annotations

import pytest

from workbench.spec.layout import parse_layout
from workbench.spec.limits import Limits, why_not

TRUNK = Limits(
    batch=64,
    units=["token", *(f"blocks.{i}" for i in range(4)), "head"],
    tensor={"heads (blocks.0.heads)": 4, "rows of token": 256},
)


@pytest.mark.parametrize(
    "text", ["dp4", "fsdp8", "pp6", "pp2 dp2 tp2, 1f1b x8", "tp4", "pp3, interleaved x6", "dp64"]
)
def test_what_fits_has_no_reason(text):
    assert why_not(parse_layout(text), TRUNK, ranks=64) == ""


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("dp8", 'dp8 needs 8 ranks, and there are 4. Use the layout "dp4".'),
        ("pp2 dp3", 'pp2 dp3 needs 6 ranks, and there are 4. Use the layout "pp2 dp2".'),
        ("dp3 tp9", 'dp3 tp9 needs 27 ranks, and there are 4. Use the layout "dp2 tp2".'),
        (
            "pp4, 1f1b x3",
            "1f1b x3 needs at least 4 microbatches on 4 pipeline ranks. "
            'Use the layout "pp4, 1f1b x4" or "pp4, gpipe x3".',
        ),
        (
            "pp4, interleaved x8",
            "pp4, interleaved x8 needs 8 stages, and the model has 6 parts with parameters "
            '(token, blocks.0, blocks.1, ...). Use the layout "pp4, 1f1b x8".',
        ),
        (
            "pp4, interleaved x9",
            "pp4, interleaved x9 needs 8 stages, and the model has 6 parts with parameters "
            '(token, blocks.0, blocks.1, ...). Use the layout "pp4, 1f1b x9".',
        ),
        (
            "pp3, interleaved x7",
            "interleaved x7 needs 2 rounds of equal length on 3 pipeline ranks. "
            'Use the layout "pp3, interleaved x6" (3 of 4 ranks) or "pp3, 1f1b x7" (3 of 4 ranks).',
        ),
        (
            "pp2 fsdp2, zbv x4",
            "zbv computes gradients of weights apart from the rest, where sharding (FSDP2) misses "
            'some. Use the layout "pp2 fsdp2, 1f1b x4".',
        ),
        ("tp3", 'tp=3 does not divide the 4 heads (blocks.0.heads). Use the layout "tp4".'),
        (
            "pp2 dp2, gpipe x64",
            "batch=64 is less than 2 shares x 64 microbatches. "
            'Use the layout "pp2 dp2, gpipe x32", or start with batch >= 128.',
        ),
    ],
)
def test_what_does_not_fit_says_what_would(text, why):
    assert why_not(parse_layout(text), TRUNK, ranks=4) == why


def test_a_small_batch_is_named_with_what_it_is_cut_into():
    small = Limits(batch=6, accumulate=2, units=["all"], tp_why="No pairs.")
    assert why_not(parse_layout("dp3"), small, ranks=4) == ""
    assert why_not(parse_layout("dp4"), small, ranks=4) == (
        "batch=6 is less than 4 shares x 2 accumulate. "
        'Use the layout "dp3" (3 of 4 ranks), or start with batch >= 8.'
    )


def test_a_model_that_cannot_be_cut_says_so_itself():
    whole = Limits(batch=64, pp_why="No stages: give them.", tp_why="No pairs.")
    instead = 'As the model is, use the layout "dp2".'
    assert why_not(parse_layout("pp2"), whole, ranks=2) == f"No stages: give them. {instead}"
    assert why_not(parse_layout("tp2"), whole, ranks=2) == f"No pairs. {instead}"
    assert why_not(parse_layout("dp2"), whole, ranks=2) == ""


def test_a_model_of_one_part_is_sent_to_data_parallelism():
    one = Limits(batch=64, units=["linear"], tp_why="No pairs.")
    assert why_not(parse_layout("pp2"), one, ranks=2) == (
        "pp2 needs 2 stages, and the model has 1 part with parameters (linear). "
        'Use the layout "dp2".'
    )


def test_sizes_that_share_no_degree_send_to_another_strategy():
    odd = Limits(batch=64, units=TRUNK.units, tensor={"heads": 3, "vocabulary": 256})
    assert why_not(parse_layout("tp2"), odd, ranks=2) == (
        'tp=2 does not divide the 3 heads. Use the layout "dp2".'
    )


def test_fewer_ranks_are_proposed_before_another_strategy():
    three_heads = Limits(batch=64, units=TRUNK.units[:3], tensor={"heads": 3})
    for text, why in {
        "tp2": 'tp=2 does not divide the 3 heads. Use the layout "tp3" (3 of 4 ranks) or "dp4".',
        "pp4": "pp4 needs 4 stages, and the model has 3 parts with parameters (token, blocks.0, "
        'blocks.1). Use the layout "pp3" (3 of 4 ranks) or "pp2 dp2".',
    }.items():
        assert why_not(parse_layout(text), three_heads, ranks=4) == why


def test_a_batch_that_is_too_small_for_anything_is_to_be_larger():
    assert why_not(parse_layout("dp4"), Limits(batch=2, accumulate=4), ranks=4) == (
        "batch=2 is less than 4 shares x 4 accumulate. Start with batch >= 16."
    )


def test_limits_travel_as_plain_values():
    assert Limits(**TRUNK.to_dict()) == TRUNK
