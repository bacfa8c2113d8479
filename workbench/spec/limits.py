"""Limits: what a model and its batch allow, and why a layout does not fit them.

Found on a rank when a training is built, before anything is spread; the driver and the panel ask
here, so that a button that is off says what the magic would say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from workbench.spec.layout import Layout
from workbench.spec.nearest import instead, text


@dataclass(frozen=True)
class Limits:
    """units: names of the parts with parameters that stages are made of, in order; pp_why: why
    there is no cutting at all. tensor: what a tensor-parallel degree must divide, by what there
    are so many of: {"heads (attention.heads)": 4}; tp_why: why there is none. both_why: why not
    together with a pipeline. shard_why: why the state cannot be sharded; dp_why: why gradients
    cannot be averaged. A why may say what to change of the model, and names no layout.
    """

    batch: int
    accumulate: int = 1
    units: list[str] = field(default_factory=list)
    pp_why: str = ""
    tensor: dict[str, int] = field(default_factory=dict)
    tp_why: str = ""
    both_why: str = ""
    shard_why: str = ""
    dp_why: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for the wire."""
        return asdict(self)


def why_not(layout: Layout, limits: Limits, ranks: int) -> str:
    """Why the layout cannot be used on so many ranks, and which can; "" when it can."""
    if why := _size_why(layout, ranks) or _order_why(layout, limits):
        return f"{why} {use_instead(layout, limits, ranks)}".rstrip()
    if why := _model_why(layout, limits):
        return as_it_is(why, use_instead(layout, limits, ranks))
    if why := _batch_why(layout, limits):
        use = use_instead(layout, limits, ranks).rstrip(".")
        batch = f"batch >= {_pieces(layout, limits)}"
        return f"{why} {use}, or start with {batch}." if use else f"{why} Start with {batch}."
    return ""


def as_it_is(why: str, use: str) -> str:
    """A sentence that may say what to change of the model, with what to use until then."""
    return f"{why.rstrip('.')}. As the model is, {use[:1].lower()}{use[1:]}" if use else why


def use_instead(
    layout: Layout, limits: Limits, ranks: int, also: Callable[[Layout], bool] = lambda _: True
) -> str:
    """The advice of a refusal, which is accepted: layouts near this one that fit; "" for none.

    also: what they have to be besides.
    """

    def fits(one: Layout) -> bool:
        return also(one) and is_fit(one, limits, ranks)

    return instead(layout, ranks, limits.batch // limits.accumulate, fits)


def is_fit(layout: Layout, limits: Limits, ranks: int) -> bool:
    """Whether the layout can be used on so many ranks."""
    return not (
        _size_why(layout, ranks)
        or _order_why(layout, limits)
        or _model_why(layout, limits)
        or _batch_why(layout, limits)
    )


def _size_why(layout: Layout, ranks: int) -> str:
    if layout.world_size <= ranks:
        return ""
    there_are = f"there {'is' if ranks == 1 else 'are'} {ranks}"
    return f"{_degrees(layout)} needs {layout.world_size} ranks, and {there_are}."


def _model_why(layout: Layout, limits: Limits) -> str:
    """What the model or its optimizer does not allow at all."""
    asked = {
        limits.dp_why: layout.dp > 1,
        limits.shard_why: layout.dp_shard > 1,
        limits.pp_why: layout.pp > 1,
        limits.tp_why: layout.tp > 1,
        limits.both_why: layout.tp > 1 and layout.pp > 1,
    }
    return next((why for why, is_asked in asked.items() if why and is_asked), "")


def _order_why(layout: Layout, limits: Limits) -> str:
    """Which degree is too much for the model, or which order for the degrees."""
    if layout.pp > 1 and not limits.pp_why:
        stages, units = layout.num_stages, len(limits.units)
        if stages > units:
            parts = f"{units} part{'' if units == 1 else 's'} with parameters"
            named = f"the model has {parts} ({_some(limits.units)})"
            return f"{text(layout)} needs {stages} stages, and {named}."
        if layout.order.splits and layout.dp_shard > 1:
            return (
                f"{layout.schedule} computes gradients of weights apart from the rest, where "
                "sharding (FSDP2) misses some."
            )
        if why := layout.order.why_not(layout.pp, layout.microbatches):
            return f"{layout.schedule} x{layout.microbatches} {why}."
    if layout.tp > 1 and not limits.tp_why:
        for what, size in limits.tensor.items():
            if size % layout.tp:
                return f"tp={layout.tp} does not divide the {size} {what}."
    return ""


def _pieces(layout: Layout, limits: Limits) -> int:
    return layout.dp * layout.microbatches * limits.accumulate


def _batch_why(layout: Layout, limits: Limits) -> str:
    if limits.batch >= _pieces(layout, limits):
        return ""
    factors: Mapping[str, int] = {
        "shares": layout.dp, "microbatches": layout.microbatches, "accumulate": limits.accumulate
    }  # fmt: skip
    product = " x ".join(f"{count} {name}" for name, count in factors.items() if count > 1)
    return f"batch={limits.batch} is less than {product}."


def _degrees(layout: Layout) -> str:
    """The degrees as text, without the order of a pipeline."""
    return str(layout).partition(",")[0]


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
