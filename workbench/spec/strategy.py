"""Strategies: the names a user types for a region of Layouts.

Each is a function of the number of ranks and of its own options; what it returns is a Layout, and
nothing below knows the name.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from workbench.errors import LayoutError
from workbench.spec.layout import Layout, check_count
from workbench.spec.limits import Limits, use_instead, why_not
from workbench.spec.near import unknown
from workbench.spec.nearest import CHUNKS_PER_RANK
from workbench.spec.schedules import SCHEDULES
from workbench.spec.typed import typed

BY = ("layers", "tensor")


def none(_ranks: int) -> Layout:
    """One rank trains, the others wait: the yardstick."""
    return Layout()


def data(ranks: int, *, shard: bool = False) -> Layout:
    """Every rank trains on its share of each batch; replicated (DDP) or sharded (FSDP2)."""
    return Layout(dp_shard=ranks) if shard else Layout(dp_replicate=ranks)


def model(ranks: int, *, by: str = "layers") -> Layout:
    """One model over all ranks: consecutive layers on consecutive ranks, or inside the layers."""
    if by not in BY:
        raise LayoutError(unknown("way to cut (--by)", str(by), BY))
    return Layout(tp=ranks) if by == "tensor" else Layout(pp=ranks)


def pipeline(ranks: int, *, microbatches: int | None = None, schedule: str | None = None) -> Layout:
    """Consecutive layers on consecutive ranks, several microbatches under way at once."""
    schedule = "1f1b" if schedule is None else schedule
    if schedule not in SCHEDULES:
        raise LayoutError(unknown("schedule", schedule, SCHEDULES))
    if ranks == 1:
        return Layout()
    return Layout(
        pp=ranks,
        schedule=schedule,
        microbatches=CHUNKS_PER_RANK * ranks if microbatches is None else microbatches,
    )


def hybrid(  # noqa: PLR0913 - keyword-only, each an option of %dist_train
    ranks: int,
    *,
    dp: int | None = None,
    pp: int | None = None,
    tp: int | None = None,
    shard: bool = False,
    microbatches: int | None = None,
    schedule: str | None = None,
) -> Layout:
    """Any product of data, pipeline and tensor parallelism; what is not given is found.

    dp fills the rest. Without any: dp x pp2, and tp2 besides where 8 ranks allow it.
    """
    pipe, why = pp or 1, ""
    if dp is pp is tp is None:
        if ranks < 4 or ranks % 2:
            have = "has" if ranks == 1 else "have"
            why = f"{_many(ranks)} {have} no product for hybrid by itself"
        pipe, tp = 2, 2 if ranks % 8 == 0 else 1
    elif pipe == 1 and not microbatches is schedule is None:
        key = "schedule" if microbatches is None else "microbatches"
        why = f"{key} belongs to a pipeline, and pp=1 is none"
        pipe = 2
    chosen = pipeline(pipe, microbatches=microbatches, schedule=schedule)
    rest = max(1, ranks // (pipe * (tp or 1)))
    copies = {"dp_shard" if shard else "dp_replicate": rest if dp is None else dp}
    layout = replace(chosen, tp=tp or 1, **copies)
    if why or layout.world_size != ranks:
        raise _UnfitError(why or _product_why(layout, ranks, dp), layout)
    return layout


class _UnfitError(LayoutError):
    """near: the layout that comes nearest to what was asked for."""

    def __init__(self, why: str, near: Layout) -> None:
        super().__init__(f"{why}.")
        self.near = near


def _product_why(layout: Layout, ranks: int, dp: int | None) -> str:
    """Why the degrees of a hybrid are not those of so many ranks; dp: as it was given."""
    have = {"dp": dp, "pp": layout.pp, "tp": layout.tp}
    used = {name: degree for name, degree in have.items() if degree and degree > 1} or {"dp": 1}
    text = " x ".join(f"{name}={degree}" for name, degree in used.items())
    size = math.prod(used.values())
    if dp is not None:
        return f"{text} takes {_many(size)}, and there {'is' if ranks == 1 else 'are'} {ranks}"
    product = f" is {size}, which" if len(used) > 1 else ""
    return f"{text}{product} does not divide {_many(ranks)}"


def _many(ranks: int) -> str:
    return f"{ranks} rank{'' if ranks == 1 else 's'}"


STRATEGIES: dict[str, Callable[..., Layout]] = {
    strategy.__name__: strategy for strategy in (data, model, pipeline, hybrid, none)
}


def options_of(strategy: str) -> list[str]:
    """The options that a strategy takes. Raises LayoutError for a name that is not known."""
    if strategy not in STRATEGIES:
        raise LayoutError(unknown("strategy", strategy, STRATEGIES))
    return list(inspect.signature(STRATEGIES[strategy]).parameters)[1:]


LAYOUT_OPTIONS = tuple(dict.fromkeys(option for name in STRATEGIES for option in options_of(name)))


def layout_for(
    strategy: str, ranks: int, *, limits: Limits | None = None, **options: Any
) -> Layout:
    """The Layout that a strategy name with its options means on so many ranks.

    Options that are None or False count as not given. limits: of the model, where they are known;
    what a refusal proposes is accepted by them.

    Raises LayoutError for a name that is not known, and for an option of another strategy.
    """
    limits = limits or _any_model(ranks)
    if strategy in SCHEDULES:
        raise LayoutError(_of_pipeline(strategy, ranks, limits))
    taken = options_of(strategy)
    check_options(options)
    # Not `in (None, False)`: 0 is equal to False, and is to be refused.
    given = {k: value for k, value in options.items() if value is not None and value is not False}
    for key in given:
        if key not in taken:
            raise LayoutError(_of_another(strategy, key, given, (ranks, limits)))
    try:
        return STRATEGIES[strategy](ranks, **given)
    except _UnfitError as error:
        raise LayoutError(f"{error} {use_instead(error.near, limits, ranks)}") from None


def _any_model(ranks: int) -> Limits:
    """Of a model that nothing is known of."""
    return Limits(batch=sys.maxsize, units=[""] * 2 * ranks)


def _of_pipeline(schedule: str, ranks: int, limits: Limits) -> str:
    why = why_not(pipeline(ranks, schedule=schedule), limits, ranks)
    use = f". Use {typed('pipeline', {'schedule': schedule})}."
    return f"{schedule} is a schedule of a pipeline{f', and {why}' if why else use}"


def _of_another(strategy: str, key: str, given: dict[str, Any], case: tuple[int, Limits]) -> str:
    """Whose option it is, and what to type: the strategy that comes next and can be."""
    ranks, limits = case
    whose = [name for name in STRATEGIES if key in options_of(name)]
    what = f"{key} does not go with {strategy}: it is an option of {' and '.join(whose)}"
    why = ""
    # Those first that take more of what this strategy takes: hybrid for a sharded pipeline.
    mine = {*given, *options_of(strategy)}
    for name in sorted(whose, key=lambda one: -len(mine & {*options_of(one)})):
        those = {k: value for k, value in given.items() if k in options_of(name)}
        try:
            layout = layout_for(name, ranks, limits=limits, **those)
            why = why_not(layout, limits, ranks)
        except LayoutError as error:
            why = str(error)
        if not why:
            return f"{what}. Use {typed(name, those)}."
    return f"{what}, where {why}"


def check_options(options: Mapping[str, Any]) -> None:
    """Raises LayoutError for an option that no strategy has, given or not, or of another kind."""
    for key in options:
        if key not in LAYOUT_OPTIONS:
            raise LayoutError(unknown("option of a strategy", key, LAYOUT_OPTIONS))
    for name in ("dp", "pp", "tp", "microbatches"):
        if options.get(name) is not None:
            check_count(name, options[name])
    if not isinstance(options.get("shard"), (bool, type(None))):
        raise LayoutError(f"shard={options['shard']!r}: use True or False.")
    for name in ("by", "schedule"):
        if not isinstance(options.get(name), (str, type(None))):
            raise LayoutError(f"{name}={options[name]!r}: use a name.")


def strategy_of(layout: Layout) -> str:
    """The name a user would give the layout."""
    kinds = [layout.dp > 1, layout.pp > 1, layout.tp > 1]
    if sum(kinds) > 1:
        return "hybrid"
    if layout.pp > 1:
        return "model" if layout.microbatches == 1 else "pipeline"
    return "model" if layout.tp > 1 else "data" if layout.dp > 1 else "none"


def short_name(layout: Layout) -> str:
    """One word for a mark in a curve; it tells layers from tensors, and shards from replicas."""
    name = strategy_of(layout)
    if name == "model":
        return "layers" if layout.pp > 1 else "tensor"
    return "shards" if name == "data" and layout.dp_shard > 1 else name
