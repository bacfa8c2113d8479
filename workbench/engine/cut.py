"""Cut: a model's forward in consecutive stages of about equal cost, for pipelines and layers.

A stage is a part of the tape (see tape.py) that runs on a copy of the whole model with only that
stage's parameters, so that names stay those of the whole model. What depends on parameters crosses
from a stage to the next, through stages that do not need it too; what depends on inputs alone is
computed again wherever it is needed, since every rank has the inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from workbench.engine.flow import Flow, Place
from workbench.engine.recorder import record
from workbench.engine.replay import StagePlan, Wiring, install, keep, run
from workbench.engine.tape import Tape
from workbench.engine.units import Stages, unit_names
from workbench.errors import LayoutError

__all__ = ["Cut", "StagePlan", "balance", "cut", "cut_tape", "install", "keep", "run", "unit_names"]


class TooFewPlacesError(LayoutError):
    """most: the stages that there may be."""

    def __init__(self, why: str, most: int) -> None:
        super().__init__(why)
        self.most = most


@dataclass(frozen=True)
class Cut:
    """stages in order. tied: parameters that several stages use, with the stages. over_batch:
    whether the model gives a value that is not one a sample.
    """

    stages: list[StagePlan]
    tied: dict[str, list[int]]
    over_batch: bool


def cut(  # noqa: PLR0913 - all of how a model is called decides its tape
    bones: nn.Module,
    inputs: Any,
    num_stages: int,
    *,
    device: torch.device,
    training: bool = True,
    precision_dtype: torch.dtype | None = None,
    stages: Stages | None = None,
    like: Cut | None = None,
) -> Cut:
    """Cut the forward of a skeleton into stages, the dearest of them as cheap as can be.

    inputs: what the model is called with, such as one microbatch; the cut is for their shapes.
    precision_dtype: of autocast. stages: the recipe's function, for a model that cannot be
    recorded. like: cut at the same places, such as for the shorter last microbatch.

    Raises LayoutError when the forward cannot be recorded, TooFewPlacesError (which is one) when it
    cannot be cut so often.
    """
    tape = record(
        bones,
        inputs,
        device=device,
        training=training,
        precision_dtype=precision_dtype,
        stages=stages,
    )
    return cut_tape(tape, type(bones).__name__, num_stages, like=like)


def cut_tape(tape: Tape, name: str, num_stages: int, *, like: Cut | None = None) -> Cut:
    """What `cut` does, of a forward already recorded; name: of the model, for what is refused."""
    flow = Flow(tape)
    places = flow.places()
    if like is None:
        chosen = _chosen(flow, places, num_stages)
    else:
        starts = {plan.start for plan in like.stages}
        chosen = [place for place in places if (place.unit, place.nth) in starts]
        if len(chosen) + 1 != len(like.stages):
            raise LayoutError(
                f"{name} calls other parts for other inputs, so that its stages "
                "do not stay the same. Give all batches one shape."
            )
    return _cut_at(flow, chosen)


def balance(costs: list[float], crossing: list[float | None], num_parts: int) -> list[int]:
    """Where to cut a row of pieces, so that the dearest part is as cheap as can be.

    costs [n] of the pieces; crossing [n - 1] what a cut after each piece moves, None where none
    is allowed. Of equal solutions the one that moves least. -> [num_parts - 1] indices of the
    pieces that begin the parts after the first; more cuts than are allowed are an IndexError.
    """
    begins = [0, *(i + 1 for i, moved in enumerate(crossing) if moved is not None), len(costs)]
    if num_parts > len(begins) - 1:
        raise IndexError("fewer places than cuts")
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    at = [sums[begin] for begin in begins]
    moved = [0.0, *((crossing[begin - 1] or 0.0) for begin in begins[1:-1]), 0.0]
    # least[p][j]: the dearest of p parts that end at begins[j].
    dearest = _least(at, num_parts, lambda before, begin, end: max(before, at[end] - at[begin]))
    limit = dearest[-1][-1][0] * (1 + 1e-9)

    def moves(before: float, begin: int, end: int) -> float:
        return before + moved[begin] if at[end] - at[begin] <= limit else float("inf")

    table = _least(at, num_parts, moves)
    chosen, end = [], len(begins) - 1
    for row in reversed(table[1:]):
        end = row[end][1]
        chosen.append(begins[end])
    return chosen[-2::-1]


def _least(
    at: list[float], num_parts: int, total: Callable[[float, int, int], float]
) -> list[list[tuple[float, int]]]:
    """[parts][end] -> the least total(before, begin, end) and the begin it has."""
    never = float("inf")
    rows = [[(0.0, 0), *((never, 0) for _ in at[1:])]]
    for _ in range(num_parts):
        before = rows[-1]
        rows.append([(never, 0)])
        for end in range(1, len(at)):
            ways = ((total(before[b][0], b, end), b) for b in range(end) if before[b][0] < never)
            rows[-1].append(min(ways, default=(never, 0)))
    return rows


def _chosen(flow: Flow, places: list[Place], num_stages: int) -> list[Place]:
    free = [place for place in places if not place.why_not]
    if num_stages > len(free) + 1:
        barred = next((place for place in places if place.why_not), None)
        why = f" Before {barred.unit} lies {barred.why_not}." if barred else ""
        places_needed = f"{num_stages - 1} place{'' if num_stages == 2 else 's'} to cut"
        raise TooFewPlacesError(
            f"{num_stages} stages need {places_needed}, and the model has {len(free)}.{why}",
            len(free) + 1,
        )
    begins = [0, *(place.index for place in places), len(flow.stays)]
    costs = [flow.cost(begin, end) for begin, end in pairwise(begins)]
    crossing = [None if p.why_not else float(flow.num_bytes(p.crosses)) for p in places]
    return [places[piece - 1] for piece in balance(costs, crossing, num_stages)]


def _cut_at(flow: Flow, chosen: list[Place]) -> Cut:
    tape = flow.tape
    begins = [0, *(place.index for place in chosen), len(tape.nodes)]
    places = [None, *chosen, None]
    plans = [
        _plan(flow, (begin, end), (before, after))
        for (begin, end), (before, after) in zip(pairwise(begins), pairwise(places), strict=True)
    ]
    users = {name: [i for i, p in enumerate(plans) if name in p.params] for name in tape.params}
    return Cut(
        stages=_with_unused(tape, plans),
        tied={name: used_by for name, used_by in users.items() if len(used_by) > 1},
        over_batch=_over_batch(tape),
    )


def _over_batch(tape: Tape) -> bool:
    """Whether some tensor of the output has another first dim than the inputs."""
    counts = {tape.values[slot].shape[:1] for slot in tape.inputs}
    return any(tape.values[slot].shape[:1] not in counts for slot in tape.returns)


def _plan(flow: Flow, span: tuple[int, int], ends: tuple[Place | None, Place | None]) -> StagePlan:
    tape, (before, after) = flow.tape, ends
    takes, gives = (place.crosses if place else () for place in ends)
    nodes = tuple(tape.nodes[index] for index in flow.indices(*span))
    written = {storage for node in nodes for storage in node.mutates}
    writes = flow.made(*span)
    used = {name for node in nodes for name in node.state} | writes.keys()
    used |= tape.returns_state if after is None else set()
    params = frozenset(used.intersection(tape.params))
    units = [n.unit for n in tape.nodes[slice(*span)] if n.unit and n.state.intersection(params)]
    wiring = Wiring(
        inputs=tuple(tape.inputs),
        signature=tape.signature,
        takes=takes,
        gives=gives,
        copied=frozenset(s for s in (*tape.inputs, *takes) if tape.values[s].storage in written),
        kept=frozenset((*gives, *writes.values(), *(() if after else tape.returns))),
        last=after is None,
        output=tape.output,
        writes=writes,
        num_values=len(tape.values),
    )
    return StagePlan(
        nodes=nodes,
        takes=tuple(tape.values[slot].meta(span[0]) for slot in takes),
        gives=tuple(tape.values[slot].meta(span[1]) for slot in gives),
        params=params,
        buffers=frozenset(used.intersection(tape.buffers)),
        units=list(dict.fromkeys(units)),
        share=flow.cost(*span) / max(flow.cost(0, len(tape.nodes)), 1.0),
        start=(before.unit, before.nth) if before else None,
        dropped=Counter(name for node in tape.nodes[: span[0]] for name in node.dropped),
        wiring=wiring,
    )


def _with_unused(tape: Tape, plans: list[StagePlan]) -> list[StagePlan]:
    """What no call uses is held with what stands before it in the model."""
    for kind in ("params", "buffers"):
        home = 0
        extra: list[set[str]] = [set() for _ in plans]
        for name in getattr(tape, kind):
            users = [i for i, plan in enumerate(plans) if name in getattr(plan, kind)]
            home = users[0] if users else home
            if not users:
                extra[home].add(name)
        plans = [
            replace(plan, **{kind: getattr(plan, kind) | more})
            for plan, more in zip(plans, extra, strict=True)
        ]
    return plans
