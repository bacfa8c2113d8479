"""Limits: why a layout does not fit, with the values that do."""

from __future__ import annotations

import pytest

from workbench.spec.layout import parse_layout
from workbench.spec.limits import Limits, why_not

TRUNK = Limits(
    batch=64,
    units=["token", *(f"blocks.{i}" for i in range(4)), "head"],
    tensor={"heads": 4, "vocabulary": 256},
)


@pytest.mark.parametrize(
    "text", ["dp4", "fsdp8", "pp6", "pp2 dp2 tp2, 1f1b x8", "tp4", "pp3, interleaved x6", "dp64"]
)
def test_what_fits_has_no_reason(text):
    assert why_not(parse_layout(text), TRUNK, ranks=64) == ""


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("dp8", "dp8 needs 8 ranks, and there are 4. Use a layout such as dp4."),
        ("pp2 dp3", "pp2 dp3 needs 6 ranks, and there are 4. Use a layout such as pp2 dp2."),
        ("dp3 tp9", "dp3 tp9 needs 27 ranks, and there are 4. Use a layout such as dp2 tp2."),
        (
            "pp4, 1f1b x3",
            "1f1b x3 needs at least 4 microbatches on 4 pipeline ranks. Use 4 or more, or schedule "
            "gpipe.",
        ),
        (
            "pp4, interleaved x8",
            "pp4, interleaved x8 needs 8 stages, and the model has 6 parts with parameters "
            "(token, blocks.0, blocks.1, ...). Use pp <= 3.",
        ),
        ("tp3", "tp=3 does not divide heads, 4. Use tp=2 or 4."),
        (
            "pp2 dp2, gpipe x64",
            "batch=64 is less than 2 shares x 64 microbatches. Use batch >= 128, or at most 32 "
            "microbatches.",
        ),
    ],
)
def test_what_does_not_fit_says_what_would(text, why):
    assert why_not(parse_layout(text), TRUNK, ranks=4) == why


def test_a_small_batch_is_named_with_what_it_is_cut_into():
    small = Limits(batch=6, accumulate=2)
    assert why_not(parse_layout("dp3"), small, ranks=4) == ""
    assert why_not(parse_layout("dp4"), small, ranks=4) == (
        "batch=6 is less than 4 shares x 2 accumulate. Use batch >= 8."
    )


def test_a_model_that_cannot_be_cut_says_so_itself():
    whole = Limits(batch=64, pp_why="No stages: give them.", tp_why="No pairs.")
    assert why_not(parse_layout("pp2"), whole, ranks=2) == "No stages: give them."
    assert why_not(parse_layout("tp2"), whole, ranks=2) == "No pairs."
    assert why_not(parse_layout("dp2"), whole, ranks=2) == ""


def test_a_model_of_one_part_is_sent_to_data_parallelism():
    one = Limits(batch=64, units=["linear"])
    assert why_not(parse_layout("pp2"), one, ranks=2) == (
        "pp2 needs 2 stages, and the model has 1 part with parameters (linear). "
        "Use data parallelism."
    )


def test_sizes_that_share_no_degree_send_to_another_strategy():
    odd = Limits(batch=64, tensor={"heads": 3, "vocabulary": 256})
    assert why_not(parse_layout("tp2"), odd, ranks=2) == (
        "tp=2 does not divide heads, 3. Use another strategy."
    )


def test_limits_travel_as_plain_values():
    assert Limits(**TRUNK.to_dict()) == TRUNK
