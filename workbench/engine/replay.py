"""Replay: run one stage of a model, its part of the tape, on a copy of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from workbench.engine.nest import filler, signature, tensors
from workbench.engine.tape import Node
from workbench.errors import LayoutError

BOUND = "_workbench_bound"


@dataclass(frozen=True)
class Wiring:
    """Slots of the inputs, of what is taken and given, of what is copied because it is written in
    place, of what is needed at the end; buffers assigned anew, with their slots.

    output: a template, of use on the last stage alone.
    """

    inputs: tuple[int, ...]
    signature: tuple[Any, ...]
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    copied: frozenset[int]
    kept: frozenset[int]
    last: bool
    output: Any
    writes: dict[str, int]
    num_values: int


@dataclass(frozen=True, eq=False)
class StagePlan:
    """One stage. takes, gives: tensors without memory of the shape and dtype of what crosses in
    and out; requires_grad says whether a gradient comes back. params, buffers: names, of tied
    ones the first. units: parts with parameters. share: of the cost of all stages.
    start: the unit it begins with and which call of it, None for the first stage.
    dropped: how often stages before it have called each dropout module.
    """

    nodes: tuple[Node, ...]
    takes: tuple[Tensor, ...]
    gives: tuple[Tensor, ...]
    params: frozenset[str]
    buffers: frozenset[str]
    units: list[str]
    share: float
    start: tuple[str, int] | None
    dropped: dict[str, int]
    wiring: Wiring


def run(plan: StagePlan, model: nn.Module, inputs: Any, received: tuple[Tensor, ...] = ()) -> Any:
    """Run a stage: what it gives to the next, a tuple as plan.gives; of the last, the output.

    inputs: the whole model's, of the shapes the plan was made for. received: as plan.takes.

    Raises LayoutError for inputs of other shapes.
    """
    bound = model.__dict__.setdefault(BOUND, WeakKeyDictionary())
    stage = bound.get(plan)
    if stage is None:
        stage = bound[plan] = _Bound(plan, model)
    return stage(inputs, received)


def keep(model: nn.Module, params: Iterable[str], buffers: Iterable[str]) -> None:
    """Set all other parameters and buffers of a copy to None; tied ones stay under all names."""
    for kind, names in (("parameters", set(params)), ("buffers", set(buffers))):
        tensors_of = getattr(model, f"named_{kind}")
        kept = {id(tensor) for name, tensor in tensors_of() if name in names}
        for name, tensor in list(tensors_of(remove_duplicate=False)):
            if id(tensor) not in kept:
                path, _, key = name.rpartition(".")
                # By setattr: torch's recurrent layers have a list of their weights to update.
                setattr(model.get_submodule(path), key, None)


def install(plan: StagePlan, model: nn.Module) -> None:
    """Make a copy of the model the stage: keeps what is its own, and model(inputs, received) is
    `run` of the plan, or of another one given as `plan`.

    Before it is wrapped: hooks of FSDP and DDP on the model then surround the stage. The user's
    hooks on the model itself are part of the tape, and are taken off.
    """
    keep(model, plan.params, plan.buffers)
    model._forward_hooks.clear()
    model._forward_pre_hooks.clear()
    default = plan

    def forward(inputs: Any, received: tuple[Tensor, ...] = (), plan: StagePlan = default) -> Any:
        return run(plan, model, inputs, received)

    model.forward = forward


class _Bound:
    """A plan with its calls and names looked up in one model."""

    def __init__(self, plan: StagePlan, model: nn.Module) -> None:
        self._wiring = wiring = plan.wiring
        last_use: dict[int, int] = {}
        for index, node in enumerate(plan.nodes):
            last_use.update(dict.fromkeys((*node.reads, *node.outs), index))
        # A value is let go when it was needed last, as it would be in the forward itself.
        frees: list[list[int]] = [[] for _ in plan.nodes]
        for slot, index in last_use.items():
            if slot not in wiring.kept:
                frees[index].append(slot)
        calls = [_step(node, model) for node in plan.nodes]
        self._steps = list(zip(calls, map(tuple, frees), strict=True))
        self._output = filler(wiring.output, model) if wiring.last else None
        self._writes = []
        for name, slot in wiring.writes.items():
            path, _, key = name.rpartition(".")
            self._writes.append((model.get_submodule(path), key, slot))

    def __call__(self, inputs: Any, received: tuple[Tensor, ...]) -> Any:
        wiring = self._wiring
        if (got := signature(inputs)) != wiring.signature:
            raise LayoutError(
                f"A stage made for inputs {wiring.signature} got {got}. Cut the model for these."
            )
        # The last one takes what is of no use.
        values: list[Any] = [None] * (wiring.num_values + 1)
        for slots, given in ((wiring.inputs, tensors(inputs)), (wiring.takes, received)):
            for slot, tensor in zip(slots, given, strict=True):
                values[slot] = tensor.clone() if slot in wiring.copied else tensor
        for step, frees in self._steps:
            step(values)
            for slot in frees:
                values[slot] = None
        for owner, key, slot in self._writes:
            setattr(owner, key, values[slot])
        if self._output is not None:
            return self._output(values)
        return tuple(self._given(slot, values[slot]) for slot in wiring.gives)

    def _given(self, slot: int, value: Tensor) -> Tensor:
        # What is passed on gets a place of its own in the graph, as schedules expect of an output.
        passed = slot in self._wiring.takes and value.requires_grad and value.is_leaf
        return value.view_as(value) if passed else value.contiguous()


def _step(node: Node, model: nn.Module) -> Callable[[list], None]:
    call: Any = node.function or model.get_submodule(node.unit)
    fills = [filler(value, model) for value in node.args]
    named = [(key, filler(value, model)) for key, value in node.kwargs.items()]
    outs = node.outs
    what = node.unit or getattr(node.function, "__name__", "a function")

    def store(values: list, result: Any) -> None:
        made = list(tensors(result))
        if len(made) != len(outs):
            raise LayoutError(
                f"{what} returned {len(made)} tensors, and {len(outs)} when its stage was made. "
                "Return the same at each call."
            )
        for slot, tensor in zip(outs, made, strict=True):
            values[slot] = tensor

    def step(values: list) -> None:
        result = call(*[fill(values) for fill in fills], **{k: fill(values) for k, fill in named})
        store(values, result)

    def simple(values: list) -> None:
        result = call(fill(values))
        if isinstance(result, Tensor):
            values[out] = result
        else:
            store(values, result)

    if len(fills) == len(outs) == 1 and not named:
        (fill,), (out,) = fills, outs
        step = simple
    return step if node.grad is None and node.autocast is None else _within(node, step)


def _within(node: Node, step: Callable[[list], None]) -> Callable[[list], None]:
    def within(values: list) -> None:
        with ExitStack() as stack:
            if node.grad is False:
                stack.enter_context(torch.no_grad())
            if node.autocast is not None:
                kind, enabled, dtype = node.autocast
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            step(values)

    return within
