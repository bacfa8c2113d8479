"""Limits: what a model and its batch allow, and why a layout does not fit them.

Found on a rank when a training is built, before anything is spread; the driver and the panel ask
here, so that a button that is off says what the magic would say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from workbench.spec.layout import Layout

# The schedule that takes any number of microbatches.
ANY_NUMBER = "gpipe"


@dataclass(frozen=True)
class Limits:
    """units: names of the parts with parameters that stages are made of, in order; pp_why: why
    there is no cutting at all. tensor: what a tensor-parallel degree must divide, by its name;
    tp_why: why there is none. both_why: why not together with a pipeline. shard_why: why
    the state cannot be sharded; dp_why: why gradients cannot be averaged.
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
    """Why the layout cannot be used on so many ranks; "" when it can. One sentence."""
    if layout.world_size > ranks:
        return (
            f"{_degrees(layout)} needs {layout.world_size} ranks, and there are {ranks}. "
            f"Use a layout such as {_smaller(layout, ranks)}."
        )
    if layout.dp > 1 and limits.dp_why:
        return limits.dp_why
    if layout.dp_shard > 1 and limits.shard_why:
        return limits.shard_why
    return _pp_why(layout, limits) or _tp_why(layout, limits) or _batch_why(layout, limits)


def _pp_why(layout: Layout, limits: Limits) -> str:
    if layout.pp == 1:
        return ""
    if limits.pp_why:
        return limits.pp_why
    stages, units = layout.num_stages, len(limits.units)
    if stages > units:
        most = units // layout.order.stages_per_rank
        part = f"{units} part{'' if units == 1 else 's'} with parameters ({_some(limits.units)})"
        use = f"Use pp <= {most}" if most > 1 else "Use data parallelism"
        return f"{_text(layout)} needs {stages} stages, and the model has {part}. {use}."
    if layout.order.splits and layout.dp_shard > 1:
        return (
            f"{layout.schedule} computes gradients of weights apart from the rest, where sharding "
            "(FSDP2) misses some. Use another schedule, or replicas."
        )
    why = layout.order.why_not(layout.pp, layout.microbatches)
    if not why:
        return ""
    least = layout.order.least_microbatches(layout.pp)
    few = layout.microbatches < least
    use = f" Use {least} or more, or schedule {ANY_NUMBER}." if few else ""
    return f"{layout.schedule} x{layout.microbatches} {why}.{use}"


def _tp_why(layout: Layout, limits: Limits) -> str:
    if layout.tp == 1:
        return ""
    if limits.tp_why or (limits.both_why and layout.pp > 1):
        return limits.tp_why or limits.both_why
    for name, size in limits.tensor.items():
        if size % layout.tp:
            return f"tp={layout.tp} does not divide {name}, {size}. Use {_fitting(limits.tensor)}."
    return ""


def _batch_why(layout: Layout, limits: Limits) -> str:
    pieces = layout.dp * layout.microbatches * limits.accumulate
    if limits.batch >= pieces:
        return ""
    factors: Mapping[str, int] = {
        "shares": layout.dp, "microbatches": layout.microbatches, "accumulate": limits.accumulate
    }  # fmt: skip
    text = " x ".join(f"{count} {name}" for name, count in factors.items() if count > 1)
    most = limits.batch // (layout.dp * limits.accumulate)
    fewer = f", or at most {most} microbatches" if layout.microbatches > 1 and most else ""
    return f"batch={limits.batch} is less than {text}. Use batch >= {pieces}{fewer}."


def _degrees(layout: Layout) -> str:
    """The degrees as text, without the order of a pipeline."""
    return str(layout).partition(",")[0]


def _text(layout: Layout) -> str:
    """The layout as text, without an order that nobody typed."""
    plain = (layout.schedule, layout.microbatches) == (ANY_NUMBER, 1)
    return _degrees(layout) if plain else str(layout)


def _smaller(layout: Layout, ranks: int) -> str:
    """Degrees that fit so many ranks: the largest is lowered until they do, the last of equals."""
    degrees: dict[str, Any] = layout.degrees()
    degrees = {name: min(degree, ranks) for name, degree in degrees.items()}
    while math.prod(degrees.values()) > ranks:
        largest = max(reversed(degrees), key=lambda name: degrees[name])
        degrees[largest] -= 1
    return _degrees(Layout(**degrees))


def _fitting(tensor: Mapping[str, int]) -> str:
    """The degrees that divide all sizes: `tp=2 or 4`."""
    least = min(tensor.values())
    fit = [n for n in range(2, least + 1) if all(size % n == 0 for size in tensor.values())]
    return f"tp={' or '.join(map(str, fit[:4]))}" if fit else "another strategy"


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
