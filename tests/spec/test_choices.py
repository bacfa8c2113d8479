"""Choices: whatever is on can be switched to, whatever is off says why."""

from __future__ import annotations

import itertools
import json

import pytest

from workbench.spec.choices import choices
from workbench.spec.layout import Layout, parse_layout
from workbench.spec.limits import Limits, why_not
from workbench.spec.strategy import STRATEGIES, layout_for, strategy_of

TRUNK = Limits(
    batch=64,
    units=["token", *(f"blocks.{i}" for i in range(6)), "head"],
    tensor={"heads": 4, "vocabulary": 256},
)
LIMITS = {
    "trunk": TRUNK,
    "short": Limits(batch=6, units=["a", "b", "c"], tp_why="No pairs of linear layers."),
    "whole": Limits(batch=64, pp_why="No stages: give them.", tp_why="No pairs."),
    "tiny batch": Limits(batch=2, accumulate=2, units=TRUNK.units, tensor=TRUNK.tensor),
}


def chosen(strategy: str, limits: Limits, ranks: int, now: Layout) -> dict:
    return next(one for one in choices(limits, ranks, now) if one["strategy"] == strategy)


def values(choice: dict, option: str) -> dict:
    """The values of an option by their labels."""
    found = next(one for one in choice["options"] if one["name"] == option)
    return {value["label"]: value for value in found["values"]}


def reachable(limits: Limits, ranks: int) -> list[Layout]:
    """Layouts that presses of buttons lead to, two presses deep."""
    seen = {Layout()}
    for _ in range(2):
        for now in list(seen):
            for one in choices(limits, ranks, now):
                offers = [one, *(v for option in one["options"] for v in option["values"])]
                seen |= {parse_layout(v["layout"]) for v in offers if not v["why_not"]}
    return sorted(seen, key=str)


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_what_is_on_fits_and_what_is_off_says_why(limits, ranks):
    for now in reachable(limits, ranks)[:60]:
        for one in choices(limits, ranks, now):
            for offer in (one, *(v for option in one["options"] for v in option["values"])):
                if offer["why_not"]:
                    assert offer["why_not"].endswith(".")
                    continue
                layout = layout_for(one["strategy"], ranks, **offer["args"])
                assert str(layout) == offer["layout"]
                assert why_not(layout, limits, ranks) == ""


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_one_strategy_is_now_and_one_value_of_each_of_its_options(ranks):
    for now in reachable(TRUNK, ranks)[:60]:
        offered = choices(TRUNK, ranks, now)
        assert [one["strategy"] for one in offered if one["now"]] == [strategy_of(now)]
        for one in offered:
            for option in one["options"]:
                assert sum(value["now"] for value in option["values"]) == int(one["now"])


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_press_of_what_is_there_changes_nothing(ranks):
    for now in reachable(TRUNK, ranks)[:60]:
        assert chosen(strategy_of(now), TRUNK, ranks, now)["layout"] == str(now)


def test_there_is_a_choice_for_every_strategy_in_plain_values():
    offered = choices(TRUNK, 8, Layout(dp_replicate=8))
    assert [one["strategy"] for one in offered] == list(STRATEGIES)
    assert json.loads(json.dumps(offered)) == offered


@pytest.mark.parametrize(
    ("ranks", "limits", "text"),
    [
        (4, "trunk", "pp2 dp2, 1f1b x4"),
        (6, "trunk", "pp2 dp3, 1f1b x4"),
        (8, "trunk", "pp2 dp2 tp2, 1f1b x4"),
        (9, "trunk", "pp3 dp3, 1f1b x6"),
        (4, "short", "pp2 dp2, 1f1b x2"),
        (8, "short", ""),
        (4, "whole", ""),
    ],
)
def test_hybrid_takes_the_first_product_that_fits(ranks, limits, text):
    hybrid = chosen("hybrid", LIMITS[limits], ranks, Layout())
    assert ("" if hybrid["why_not"] else hybrid["layout"]) == text


def test_hybrid_on_eight_ranks_without_a_tensor_plan_is_without_it():
    plain = Limits(batch=64, units=TRUNK.units, tp_why="No pairs.")
    assert chosen("hybrid", plain, 8, Layout())["layout"] == "pp2 dp4, 1f1b x4"


def test_model_is_cut_inside_its_layers_where_it_has_too_few():
    few = Limits(batch=64, units=["a", "b"], tensor=TRUNK.tensor)
    model = chosen("model", few, 4, Layout())
    assert model["layout"] == "tp4"
    assert "needs 4 stages" in values(model, "by")["Layers"]["why_not"]


@pytest.mark.parametrize("strategy", ["data", "model", "pipeline", "hybrid"])
def test_one_rank_is_too_few_for_all_but_none(strategy):
    why = chosen(strategy, TRUNK, 1, Layout())["why_not"]
    assert why == f"{strategy.capitalize()} needs 2 ranks or more, and there is 1."
    assert chosen("none", TRUNK, 1, Layout())["why_not"] == ""


def test_hybrid_names_the_ranks_it_needs():
    why = chosen("hybrid", TRUNK, 3, Layout())["why_not"]
    assert why == "Hybrid needs a product of ranks, such as 4, 6 or 8, and there are 3."


def test_another_schedule_keeps_the_microbatches_where_it_can():
    offered = chosen("pipeline", TRUNK, 4, parse_layout("pp4, 1f1b x6"))
    schedules = values(offered, "schedule")
    assert schedules["gpipe"]["layout"] == "pp4, gpipe x6"
    assert schedules["dualpipev"]["layout"] == "pp4, dualpipev x8"


def test_a_number_of_microbatches_keeps_the_schedule_or_is_off():
    offered = values(chosen("pipeline", TRUNK, 4, parse_layout("pp4, 1f1b x8")), "microbatches")
    assert list(offered) == ["2", "4", "8", "16", "32"]
    assert offered["4"]["layout"] == "pp4, 1f1b x4"
    assert offered["2"]["why_not"].startswith("1f1b x2 needs at least 4 microbatches on 4 pip")


def test_another_product_keeps_sharding_and_order_where_they_fit():
    now = parse_layout("pp2 fsdp4, interleaved x4")
    products = values(chosen("hybrid", TRUNK, 8, now), "degrees")
    assert products["pp2 fsdp4"]["now"]
    assert products["pp4 fsdp2"]["layout"] == "pp4 fsdp2, interleaved x4"
    assert products["fsdp4 tp2"]["layout"] == "fsdp4 tp2"
    assert products["fsdp2 tp4"]["args"]["shard"] is True


def test_a_number_of_microbatches_that_was_typed_is_among_those_offered():
    now = parse_layout("pp4, gpipe x7")
    assert values(chosen("pipeline", TRUNK, 4, now), "microbatches")["7"]["now"]


def test_every_product_of_the_ranks_is_offered_once():
    offered = values(chosen("hybrid", TRUNK, 8, Layout()), "degrees")
    degrees = [
        (dp, pp, tp)
        for dp, pp, tp in itertools.product((1, 2, 4, 8), repeat=3)
        if dp * pp * tp == 8 and 8 not in (dp, pp, tp)
    ]
    found = [tuple(v["args"][name] for name in ("dp", "pp", "tp")) for v in offered.values()]
    assert sorted(found) == sorted(degrees)


@pytest.mark.parametrize(
    ("strategy", "now", "text"),
    [
        ("data", "dp2", "dp8"),
        ("pipeline", "pp2, gpipe x6", "pp8, gpipe x6"),
        ("hybrid", "pp2 dp2, gpipe x4", "pp2 dp2 tp2, 1f1b x4"),
    ],
)
def test_fewer_ranks_in_use_than_there_are_is_offered_all_of_them(strategy, now, text):
    offered = chosen(strategy, TRUNK, 8, parse_layout(now))
    assert offered["now"]
    assert offered["layout"] == text


THREE_HEADS = Limits(batch=64, units=TRUNK.units, tensor={"heads": 3})


@pytest.mark.parametrize(
    ("ranks", "now", "option", "label"),
    [
        (4, "tp3", "by", "Tensor"),
        (4, "pp3", "by", "Layers"),
        (4, "dp3", "shard", "Replicated"),
        (4, "dp2 fsdp2", "shard", "dp2 fsdp2"),
        (8, "pp2 dp2, gpipe x4", "degrees", "pp2 dp2"),
        (8, "pp2 dp2 fsdp2, gpipe x4", "degrees", "pp2 dp2 fsdp2"),
    ],
)
def test_what_is_there_is_chosen_whatever_it_was_made_with(ranks, now, option, label):
    layout = parse_layout(now)
    offered = chosen(strategy_of(layout), THREE_HEADS, ranks, layout)
    assert offered["now"]
    assert offered["why_not"] == ""
    for one in offered["options"]:
        marked = [value for value in one["values"] if value["now"]]
        assert [(value["layout"], value["why_not"]) for value in marked] == [(str(layout), "")]
    assert values(offered, option)[label]["now"]


def test_options_keep_the_ranks_that_train_and_their_strategy_takes_all():
    offered = chosen("model", THREE_HEADS, 4, parse_layout("tp3"))
    assert offered["layout"] == "pp4, gpipe x1"
    layers = values(offered, "by")["Layers"]
    assert (layers["layout"], layers["args"]) == ("pp3, gpipe x1", {"by": "layers", "ranks": 3})
    few = Limits(batch=64, units=["a", "b"], tensor={"heads": 3})
    alone = chosen("model", few, 4, parse_layout("tp3"))
    assert (alone["layout"], alone["why_not"]) == ("tp3", "")
    assert values(alone, "by")["Layers"]["why_not"]
