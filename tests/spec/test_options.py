"""Options, layouts and time limits: refused by name, value and what to use instead."""

from __future__ import annotations

import pytest

from workbench.errors import InputError
from workbench.spec.options import TrainOptions
from workbench.spec.timeouts import Timeouts


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", -1),
        ("steps", 1.5),
        ("batch", 0),
        ("seed", -1),
        ("accumulate", 0),
        ("clip", 0.0),
        ("clip", float("nan")),
        ("precision", "fp8"),
        ("save_every", -2),
        ("save_every", True),
        ("save_every", "0s"),
        ("save_every", "-3s"),
        ("save_every", "5 weeks"),
        ("save_every", "30"),
        ("save_every", 2.5),
    ],
)
def test_an_option_out_of_range_is_named_with_its_value(name, value):
    with pytest.raises(InputError, match=f"{name}=.*use"):
        TrainOptions(**{name: value})


@pytest.mark.parametrize(
    ("value", "steps", "seconds"),
    [(0, 0, None), (100, 100, None), ("30s", 0, 30.0), (" 1.5 min", 0, 90.0), ("2h", 0, 7200.0)],
)
def test_saves_are_every_so_many_steps_or_by_the_clock(value, steps, seconds):
    options = TrainOptions(save_every=value)
    assert (options.save_every_steps, options.save_every_s) == (steps, seconds)
    assert TrainOptions(**options.to_dict()) == options


@pytest.mark.parametrize("total_s", [1, 5, 60, 3600])
def test_inner_limits_are_shorter_than_outer_ones(total_s):
    limits = Timeouts(total_s)
    assert limits.rendezvous_s < limits.total_s
    assert 5 <= limits.freed_s <= max(5, total_s)


@pytest.mark.parametrize("total_s", [0, -5, 1e9])
def test_a_limit_that_is_none_is_refused(total_s):
    with pytest.raises(InputError, match="timeout"):
        Timeouts(total_s)
