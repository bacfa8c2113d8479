"""Law 1 over the whole registry: every layout up to 8 ranks gives one plain process's gradients."""

from __future__ import annotations

import pytest

from tests.contract.batteries import Ranks, differences, gpt, layouts, on_ranks, plain
from workbench.spec.limits import why_not
from workbench.spec.options import TrainOptions

STEPS = 2


def _battery(rank, store, size, options):
    """Layouts that were run, and what was wrong with each."""
    recipe = gpt(blocks=6 if size <= 4 else 14)
    chosen = TrainOptions(**options)
    one = Ranks(rank, size, store, recipe, chosen)
    expected = plain(recipe, STEPS, chosen) if rank == 0 else []
    told = {}
    for layout in layouts(size, every_schedule=size <= 4):
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


SIZES = {
    1: {},
    2: {"clip": 0.05, "accumulate": 2},
    3: {},
    4: {"clip": 0.05},
    6: {},
    8: {"clip": 0.05},
}


@pytest.mark.parametrize("size", SIZES)
def test_gradients_of_every_layout_are_those_of_one_process(size):
    told = on_ranks(size, _battery, size, SIZES[size])[0]
    wrong = {layout: what for layout, what in told.items() if what}
    # Not by what a schedule or the heads allow: refused before anything is built.
    refused = {
        layout for layout, what in wrong.items() if "needs" in what[0] or "divide" in what[0]
    }
    assert {layout: wrong[layout] for layout in wrong if layout not in refused} == {}
    assert len(told) > 2 * len(refused)
