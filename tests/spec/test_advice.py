"""Advice: whatever a refusal says to type is accepted, on these ranks and by this model."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from workbench.errors import LayoutError
from workbench.spec.layout import Layout, parse_layout
from workbench.spec.limits import Limits, why_not
from workbench.spec.nearest import nearest
from workbench.spec.schedules import SCHEDULES
from workbench.spec.strategy import STRATEGIES, layout_for

SEVEN = ["token", *(f"blocks.{i}" for i in range(5)), "head"]
LIMITS = {
    "three heads": Limits(batch=64, units=SEVEN, tensor={"heads of blocks.0": 3}),
    "four heads": Limits(batch=64, units=SEVEN, tensor={"heads (blocks.0.heads)": 4, "rows": 6}),
    "three layers": Limits(batch=64, units=["0", "2", "4"], tp_why="No pairs."),
    "one layer": Limits(batch=2, units=["0"], tensor={"outputs of layer 0": 5}),
    "no cut": Limits(batch=64, units=SEVEN, pp_why="Looks at values.", tp_why="No pairs."),
    "no copies": Limits(batch=7, units=SEVEN, dp_why="Sparse.", shard_why="Shared.", tp_why="No."),
    "not both": Limits(batch=12, accumulate=3, units=SEVEN, tensor={"x": 2}, both_why="Not both."),
}
FREE = Limits(batch=10**9, units=[""] * 16)


def layouts() -> Iterator[Layout]:
    """One axis or two up to 4 (and one of 9), a pipeline under each of the schedules."""
    some = (1, 2, 3, 4)
    numbers = itertools.cycle((1, 8, 3, 9, 70))
    for pp, dp, tp in [*itertools.product(some, repeat=3), (9, 1, 1), (1, 9, 1), (1, 1, 9)]:
        if sum(degree > 1 for degree in (pp, dp, tp)) in (1, 2):
            data = [{"dp_replicate": dp}, {"dp_shard": dp}][: 2 if dp > 1 else 1]
            orders = ((name, next(numbers)) for name in SCHEDULES) if pp > 1 else (("gpipe", 1),)
            for copies, (schedule, count) in itertools.product(data, orders):
                yield Layout(pp=pp, tp=tp, schedule=schedule, microbatches=count, **copies)


def strategies() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every strategy, and what is none but looks like one, with each option and pairs of them."""
    options: list[dict[str, Any]] = [
        *({name: degree} for name in ("dp", "pp", "tp") for degree in (1, 2, 3)),
        *({"schedule": name} for name in ("interleaved", "dualpipev")),
        {"microbatches": 1}, {"microbatches": 5}, {"shard": True}, {"by": "tensor"},
    ]  # fmt: skip
    pairs = [one | other for one, other in itertools.combinations(options, 2)]
    for strategy, given in itertools.product((*STRATEGIES, *SCHEDULES), [{}, *options, *pairs]):
        if strategy in STRATEGIES or not given:
            yield strategy, given


def refusal(strategy: str, given: dict[str, Any], limits: Limits, ranks: int) -> str:
    """Why a strategy cannot be used, "" when it can; a model that is not known allows all."""
    try:
        layout = layout_for(strategy, ranks, limits=limits, **given)
    except LayoutError as error:
        return str(error)
    return why_not(layout, limits, ranks)


def python(text: str) -> tuple[str, dict[str, Any]]:
    """The arguments of a call as they are written."""
    call = ast.parse(f"f{text}", mode="eval").body
    assert isinstance(call, ast.Call)
    given = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
    return ast.literal_eval(call.args[0]), given


def check(why: str, limits: Limits, ranks: int) -> None:
    """All that the sentence says to type is accepted, and there is something to type."""
    advice = why.partition("se the layout ")[2]
    for text in re.findall(r'"(.*?)"', advice):
        assert why_not(parse_layout(text), limits, ranks) == "", why
    typed = None if advice else re.search(r"Use ([a-z].*?) (\(.*\))\.$", why)
    if typed:
        strategy, given = python(typed[2])
        assert refusal(strategy, given, limits, ranks) == "", why
        assert typed[1].split()[0] == strategy
        assert typed[1].count("--") == len(given)
    assert advice or typed or "Start with batch >= " in why, why


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", LIMITS)
def test_what_a_refused_layout_is_told_is_accepted(name, ranks):
    limits, refused = LIMITS[name], 0
    for layout in layouts():
        if why := why_not(layout, limits, ranks):
            check(why, limits, ranks)
            refused += 1
    assert refused > 50


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", [*LIMITS, ""])
def test_what_a_refused_strategy_is_told_is_accepted(name, ranks):
    limits, refused = LIMITS.get(name, FREE), 0
    for strategy, given in strategies():
        if why := refusal(strategy, given, limits, ranks):
            check(why, limits, ranks)
            refused += 1
    assert refused > 50


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_batch_as_large_as_it_is_told_is_accepted(accumulate):
    small = Limits(batch=3, accumulate=accumulate, units=SEVEN)
    for layout in map(parse_layout, ("dp4", "pp2 dp2, gpipe x8", "fsdp4")):
        told = re.search(r"tart with batch >= (\d+)\.$", why_not(layout, small, 4))
        assert told
        batch = int(told[1])
        assert why_not(layout, replace(small, batch=batch), 4) == ""
        assert why_not(layout, replace(small, batch=batch - 1), 4)


@pytest.mark.parametrize(
    ("asked", "ranks", "proposed"),
    [
        ("dp64", 8, ["dp8"]),
        ("fsdp3 tp3", 8, ["fsdp4 tp2"]),
        ("dp2 fsdp8", 8, ["dp2 fsdp4"]),
        ("pp64, zbv x128", 64, ["pp64, 1f1b x128"]),
        ("dp40 tp2", 64, ["dp32 tp2"]),
    ],
)
def test_what_is_proposed_is_near(asked, ranks, proposed):
    limits = Limits(batch=10**6, units=[""] * 64, tensor={"heads": 8})
    found = nearest(parse_layout(asked), ranks, 10**6, lambda one: not why_not(one, limits, ranks))
    assert list(map(str, found)) == proposed
