"""Strategies: the names a user types for a region of Layouts.

Each is a function of the number of ranks and of its own options; what it returns is a Layout, and
nothing below knows the name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from workbench.errors import LayoutError
from workbench.spec.layout import Layout
from workbench.spec.near import unknown
from workbench.spec.schedules import SCHEDULES

BY = ("layers", "tensor")
# Enough for a bubble of a third or less, and for every schedule.
CHUNKS_PER_RANK = 2


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
    if dp is pp is tp is None:
        if ranks < 4 or ranks % 2:
            raise LayoutError(
                f"{ranks} ranks have no product for hybrid by itself. Use 4, 6 or 8 ranks, or say "
                "which: --dp, --pp, --tp."
            )
        pp, tp = 2, 2 if ranks % 8 == 0 else 1
    dp, pp, tp = _product(ranks, dp, pp, tp)
    order: dict[str, Any] = {}
    if pp > 1:
        chosen = pipeline(pp, microbatches=microbatches, schedule=schedule)
        order = {"schedule": chosen.schedule, "microbatches": chosen.microbatches}
    elif microbatches is not None or schedule is not None:
        raise LayoutError("microbatches and schedule belong to a pipeline: use --pp 2 or more.")
    how = {"dp_shard" if shard else "dp_replicate": dp}
    return Layout(pp=pp, tp=tp, **how, **order)


def _product(ranks: int, dp: int | None, pp: int | None, tp: int | None) -> tuple[int, int, int]:
    """The three degrees; raises LayoutError unless their product is the number of ranks."""
    given = {"pp": pp or 1, "tp": tp or 1}
    rest = given["pp"] * given["tp"]
    found = ranks // rest if dp is None and ranks % rest == 0 else dp
    if found is not None and found * rest == ranks:
        return found, given["pp"], given["tp"]
    divisors = [n for n in range(2, ranks + 1) if ranks % n == 0]
    asked = {name: degree for name, degree in given.items() if degree > 1}
    if dp is None and len(asked) == 1:
        name, degree = asked.popitem()
        use = f"Use {name}={_either(divisors)}" if divisors else "Use strategy none"
        raise LayoutError(f"{name}={degree} does not divide {_many(ranks)}. {use}.")
    have = given if dp is None else {"dp": dp, **given}
    text = " x ".join(f"{name}={degree}" for name, degree in have.items())
    size = rest * (dp or 1)
    what = f"is {size}, and there {'is' if ranks == 1 else 'are'} {_many(ranks)}"
    if dp is None:
        what = f"is {size}, which does not divide {_many(ranks)}"
    first = next((n for n in (dp, *divisors) if n in divisors[:-1]), None)
    such = f", such as dp={first} and pp={ranks // first}" if first else ""
    raise LayoutError(f"{text} {what}. Use degrees with the product {ranks}{such}.")


def _many(ranks: int) -> str:
    return f"{ranks} rank{'' if ranks == 1 else 's'}"


def _either(numbers: Sequence[int]) -> str:
    """`2, 4 or 8`."""
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last


STRATEGIES: dict[str, Callable[..., Layout]] = {
    strategy.__name__: strategy for strategy in (data, model, pipeline, hybrid, none)
}


def options_of(strategy: str) -> list[str]:
    """The options that a strategy takes. Raises LayoutError for a name that is not known."""
    if strategy not in STRATEGIES:
        raise LayoutError(unknown("strategy", strategy, STRATEGIES))
    return list(inspect.signature(STRATEGIES[strategy]).parameters)[1:]


LAYOUT_OPTIONS = tuple(dict.fromkeys(option for name in STRATEGIES for option in options_of(name)))


def layout_for(strategy: str, ranks: int, **options: Any) -> Layout:
    """The Layout that a strategy name with its options means on so many ranks.

    Options that are None or False count as not given.

    Raises LayoutError for a name that is not known, and for an option of another strategy.
    """
    taken = options_of(strategy)
    check_options(options)
    # Not `in (None, False)`: 0 is equal to False, and is to be refused.
    given = {k: value for k, value in options.items() if value is not None and value is not False}
    for key in given:
        if key not in taken:
            whose = [name for name in STRATEGIES if key in options_of(name)]
            # Those first that take what this strategy takes, too: hybrid for a sharded pipeline.
            near = sorted(whose, key=lambda name: -len({*taken} & {*options_of(name)}))
            raise LayoutError(
                f"{key} does not go with {strategy}: it is an option of {' and '.join(whose)}. "
                f"Use {' or '.join(near)} with {key}."
            )
    return STRATEGIES[strategy](ranks, **given)


def check_options(options: Mapping[str, Any]) -> None:
    """Raises LayoutError for an option that no strategy has, given or not, or of another kind."""
    for key in options:
        if key not in LAYOUT_OPTIONS:
            raise LayoutError(unknown("option of a strategy", key, LAYOUT_OPTIONS))
    for name in ("dp", "pp", "tp", "microbatches"):
        value = options.get(name)
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or value < 1
        ):
            raise LayoutError(f"{name}={value!r} is not a degree. Use a whole number >= 1.")
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
