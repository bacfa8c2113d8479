"""Law 1 over the whole registry: every layout up to 8 ranks gives one plain process's gradients."""

from __future__ import annotations

import pytest

from tests.contract.batteries import Ranks, differences, gpt, layouts, on_ranks, plain
from workbench.spec.layout import parse_layout
from workbench.spec.limits import why_not
from workbench.spec.options import TrainOptions

# Minutes on a busy machine, a quarter of that on a quiet one.
pytestmark = pytest.mark.timeout(900)

STEPS = 2


def _battery(rank, store, size, options, texts=()):
    """Layouts that were run, and what was wrong with each."""
    recipe = gpt(blocks=6)
    chosen = TrainOptions(**options)
    one = Ranks(rank, size, store, recipe, chosen)
    expected = plain(recipe, STEPS, chosen) if rank == 0 else []
    told = {}
    every = layouts(size, every_schedule=size <= 4)
    for layout in map(parse_layout, texts) if texts else every:
        if why := why_not(layout, one.blueprint.limits, size):
            told[str(layout)] = [why]
            continue
        try:
            found = one.steps(one.fresh(layout), STEPS)
        except Exception as error:
            raise RuntimeError(f"{layout}: {error}") from error
        told[str(layout)] = differences(found, expected) if rank == 0 else []
    one.close()
    return told


# The numbers of ranks, each with other options; the larger ones take one schedule a product.
SIZES = {
    1: {},
    2: {"clip": 0.05, "accumulate": 2},
    3: {},
    4: {"clip": 0.05},
    6: {},
    8: {"clip": 0.05},
}
LONG = (6, 8)


@pytest.mark.parametrize(
    "size", [pytest.param(n, marks=pytest.mark.long if n in LONG else ()) for n in SIZES]
)
def test_gradients_of_every_layout_are_those_of_one_process(size):
    told = on_ranks(size, _battery, size, SIZES[size])[0]
    wrong = {layout: what for layout, what in told.items() if what}
    # Not by what a schedule or the heads allow: refused before anything is built.
    allowed = ("needs", "divide", "computes gradients of weights apart")
    refused = {key for key, what in wrong.items() if any(word in what[0] for word in allowed)}
    assert {layout: wrong[layout] for layout in wrong if layout not in refused} == {}
    assert len(told) > 2 * len(refused)


def _three_axes(rank, store):
    return _battery(rank, store, 8, {}, ("pp2 dp2 tp2, 1f1b x2", "pp2 fsdp2 tp2, gpipe x2"))


def test_three_axes_at_once_on_eight_ranks():
    told = on_ranks(8, _three_axes)[0]
    assert list(told.values()) == [[], []]


def _rounds(rank, store):
    texts = (
        "pp2 fsdp2, interleaved x3", "pp2 dp2, zero-bubble x3", "pp4, interleaved x5",
        "pp4, interleaved x10", "pp4, zero-bubble x7",
    )  # fmt: skip
    return _battery(rank, store, 4, {}, texts)


def test_rounds_may_be_longer_than_there_are_pipeline_ranks():
    told = on_ranks(4, _rounds)[0]
    assert len(told) == 5
    assert {key: what for key, what in told.items() if what} == {}
