"""Choices: what there is to switch to from here, and why something there is not.

A value is on when it fits the ranks and the model. It keeps the other options of the strategy as
they are; where they do not fit with it, it takes others that do. The number of microbatches alone
changes nothing else. A strategy takes all ranks there are; where fewer train, the values of its
options keep those. What there is now is always one of the values, whatever it was made with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from workbench.errors import LayoutError
from workbench.spec.layout import Layout
from workbench.spec.limits import Limits, is_fit, why_not
from workbench.spec.nearest import CHUNKS_PER_RANK
from workbench.spec.schedules import SCHEDULES
from workbench.spec.strategy import BY, STRATEGIES, layout_for, strategy_of

LABELS = {
    "shard": "Copies",
    "by": "Cut",
    "microbatches": "Microbatches",
    "schedule": "Schedule",
    "degrees": "Degrees",
}
SHARD = {False: "Replicated", True: "Sharded"}
# Taken where a schedule asks too much of the model or of the batch, in this order.
SIMPLER = ("1f1b", "gpipe")

Args = dict[str, Any]


@dataclass(frozen=True)
class _Case:
    """What a layout has to fit, and the one that is there now.

    given: what is said besides, so that fewer ranks take part than there are.
    """

    limits: Limits
    ranks: int
    now: Layout
    given: Args = field(default_factory=dict)


@dataclass(frozen=True)
class _Try:
    """args: options of the strategy; layout: what they mean (None: nothing); why: "" if it fits."""

    args: Args
    layout: Layout | None
    why: str


def choices(limits: Limits, ranks: int, now: Layout) -> list[dict[str, Any]]:
    """One entry for each strategy, in plain values.

    {strategy, layout, why_not, now, args, options}; an option is {name, label, values}; a value is
    {value, label, layout, why_not, now, args}. args: what `layout_for(strategy, ranks, **args)`
    takes, and `ranks` where fewer take part. layout: the text of what it gives. why_not: one
    sentence, or "" for what fits. A strategy that does not fit has no options. Each option of the
    strategy that is now has one value that is now.
    """
    return [_choice(_Case(limits, ranks, now), strategy) for strategy in STRATEGIES]


def _choice(case: _Case, strategy: str) -> dict[str, Any]:
    is_now = strategy_of(case.now) == strategy
    kept = [_args(strategy, case.now)] if is_now else []
    chosen = _first(case, strategy, [*kept, *_presets(case, strategy)])
    within, of = case, chosen
    if is_now:
        of = _Try(kept[0], case.now, "")
        chosen = of if chosen.why else chosen
    if is_now and case.now.world_size < case.ranks:
        used = case.now.world_size
        within = replace(case, ranks=used, given={"ranks": used})
    return {
        "strategy": strategy,
        "layout": _text(chosen),
        "why_not": chosen.why,
        "now": is_now,
        "args": chosen.args,
        "options": [] if of.why else list(_options(within, strategy, of)),
    }


def _args(strategy: str, layout: Layout) -> Args:
    """The options of a strategy that a layout has."""
    order = _order_of(layout)
    shard = {"shard": layout.dp_shard > 1}
    degrees = {"dp": layout.dp, "pp": layout.pp, "tp": layout.tp}
    of: dict[str, Args] = {
        "data": shard,
        "model": {"by": "tensor" if layout.tp > 1 else "layers"},
        "pipeline": order,
        "hybrid": {**degrees, **shard, **(order if layout.pp > 1 else {})},
    }
    return of.get(strategy, {})


def _presets(case: _Case, strategy: str) -> Iterator[Args]:
    """What pressing a strategy means, best first."""
    if strategy == "model":
        yield from ({"by": by} for by in BY)
    elif strategy == "pipeline":
        yield from _eased(_order(case.ranks), case.ranks, SIMPLER)
    elif strategy == "hybrid":
        products = sorted(_products(case.ranks), key=lambda found: _precedence(found, case.ranks))
        for degrees in products:
            yield from _ordered({**degrees, "shard": False}, _order(degrees["pp"]))
        if not products:
            yield {}
    else:
        yield {"shard": False} if strategy == "data" else {}


def _products(ranks: int) -> list[Args]:
    """All degrees with two axes or three; fewer tensor slices first."""
    return [
        {"dp": ranks // (pp * tp), "pp": pp, "tp": tp}
        for tp in range(1, ranks + 1)
        for pp in range(1, ranks // tp + 1)
        if ranks % (pp * tp) == 0 and sum(n > 1 for n in (ranks // (pp * tp), pp, tp)) > 1
    ]


def _precedence(degrees: Args, ranks: int) -> tuple[bool, ...]:
    """Least for what a press takes: 2x2x2 on 8 ranks, else two stages, else no tensor slices."""
    all_three = ranks % 8 == 0 and degrees["pp"] == degrees["tp"] == 2
    two_stages = degrees["pp"] == 2 and degrees["tp"] == 1
    return not all_three, not two_stages, degrees["tp"] > 1, degrees["pp"] == 1


def _order_of(layout: Layout) -> Args:
    return {"schedule": layout.schedule, "microbatches": layout.microbatches}


def _order(pp: int) -> Args:
    return {"schedule": "1f1b", "microbatches": CHUNKS_PER_RANK * pp}


def _ordered(args: Args, order: Args) -> Iterator[Args]:
    """Degrees with an order of their pipeline, then with simpler ones; alone where is none."""
    if args["pp"] == 1:
        yield args
    else:
        yield from _eased({**args, **order}, args["pp"], (order["schedule"], *SIMPLER))


def _eased(args: Args, pp: int, schedules: Sequence[str]) -> Iterator[Args]:
    """The args, then each of the schedules with its usual and its fewest microbatches."""
    yield args
    for schedule in schedules:
        least = max(2, SCHEDULES[schedule].least_microbatches(pp))
        for microbatches in (CHUNKS_PER_RANK * pp, least):
            yield {**args, "schedule": schedule, "microbatches": microbatches}


def _options(case: _Case, strategy: str, chosen: _Try) -> Iterator[dict[str, Any]]:
    args, layout = chosen.args, chosen.layout or Layout()
    if strategy == "hybrid":
        order = {key: args[key] for key in ("schedule", "microbatches") if key in args}
        plain = {"shard": args["shard"]}
        yield _option(case, strategy, "degrees", {
            _degrees(degrees, args["shard"]): _ordered(
                {**degrees, **plain}, order or _order(degrees["pp"])
            )
            for degrees in _products(case.ranks)
        })  # fmt: skip
    if strategy == "data" or (strategy == "hybrid" and layout.dp > 1):
        tries = {shard: [{**args, "shard": shard}] for shard in SHARD}
        yield _option(case, strategy, "shard", tries)
    if strategy == "model":
        yield _option(case, strategy, "by", {by: [{"by": by}] for by in BY})
    if "schedule" in args:
        numbers = _numbers(layout, least=2 if strategy == "pipeline" else 1)
        tries = {number: [{**args, "microbatches": number}] for number in numbers}
        yield _option(case, strategy, "microbatches", tries)
        orders = {
            name: _eased({**args, "schedule": name}, layout.pp, (name,)) for name in SCHEDULES
        }
        yield _option(case, strategy, "schedule", orders)


def _numbers(layout: Layout, least: int) -> list[int]:
    """Numbers of microbatches worth offering: half as many as ranks, then doubled."""
    found = {layout.pp // 2, *(layout.pp << shift for shift in range(4)), layout.microbatches}
    return sorted(number for number in found if number >= least)


def _degrees(degrees: Args, shard: bool) -> str:
    """`pp2 dp2`, in the words and the order of a Layout."""
    copies = {"dp_shard" if shard else "dp_replicate": degrees["dp"]}
    return str(Layout(pp=degrees["pp"], tp=degrees["tp"], **copies)).partition(",")[0]


def _option(
    case: _Case, strategy: str, name: str, tries: Mapping[Any, Iterable[Args]]
) -> dict[str, Any]:
    mine = _value_now(case.now, name) if strategy_of(case.now) == strategy else None
    values = []
    for value in ([mine] if mine is not None and mine not in tries else []) + list(tries):
        if value == mine:
            found = _Try(_args(strategy, case.now), case.now, "")
        else:
            found = _first(case, strategy, tries[value])
        label = {"shard": SHARD.get(value), "by": str(value).capitalize()}.get(name) or str(value)
        values.append({
            "value": value, "label": label, "layout": _text(found), "why_not": found.why,
            "now": value == mine, "args": {**found.args, **case.given},
        })  # fmt: skip
    return {"name": name, "label": LABELS[name], "values": values}


def _value_now(now: Layout, name: str) -> Any:
    """The value of an option that a layout has; where no value makes it, its degrees."""
    degrees = str(now).partition(",")[0]
    if name == "shard":
        return degrees if 1 < now.dp_shard < now.dp else now.dp_shard > 1
    return degrees if name == "degrees" else {**_args("model", now), **_order_of(now)}[name]


def _first(case: _Case, strategy: str, tries: Iterable[Args]) -> _Try:
    """The first that fits; the first of all, with its reason, when none does."""
    first = None
    for args in tries:
        found = _try(case, strategy, args)
        if not found.why and found.layout and is_fit(found.layout, case.limits, case.ranks):
            return found
        first = first or found
    assert first is not None, f"{strategy} was never tried"
    if first.layout is None:
        return first
    return replace(first, why=why_not(first.layout, case.limits, case.ranks))


def _try(case: _Case, strategy: str, args: Args) -> _Try:
    """What the args mean, not yet held against the model."""
    if why := _ranks_why(strategy, case.ranks):
        return _Try(args, None, why)
    try:
        return _Try(args, layout_for(strategy, case.ranks, limits=case.limits, **args), "")
    except LayoutError as error:
        return _Try(args, None, str(error))


def _ranks_why(strategy: str, ranks: int) -> str:
    if ranks == 1 and strategy != "none":
        return f"{strategy.capitalize()} needs 2 ranks or more, and there is 1."
    if strategy == "hybrid" and not _products(ranks):
        return f"Hybrid needs a product of ranks, such as 4, 6 or 8, and there are {ranks}."
    return ""


def _text(found: _Try) -> str:
    return str(found.layout or "")
