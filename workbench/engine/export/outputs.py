"""Outputs: what the calls on a tape return, found by running them once more without values."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from workbench.engine.export.calls import quoted
from workbench.engine.nest import Made, Ref, State, filler, template, tensors
from workbench.engine.probe import probed
from workbench.engine.replay import StagePlan
from workbench.engine.skeleton import fake_like, faked
from workbench.engine.tape import Node
from workbench.errors import LayoutError


class Outputs:
    """Of the calls of all stages of a cut.

    returned: slots of the tensors in the model's output; whole: its template; metas: of these
    tensors, without values.
    """

    def __init__(
        self,
        plans: Sequence[StagePlan],
        bones: nn.Module,
        inputs: Any,
        device: torch.device,
        precision_dtype: torch.dtype | None,
    ) -> None:
        self.bones = bones
        self.is_autocast = precision_dtype is not None
        self.is_contiguous: dict[int, bool] = {}  # of values that cross, by slot
        self._forms: dict[int, Any] = {}
        wiring = plans[-1].wiring
        self.whole = wiring.output
        self.returned = tuple(dict.fromkeys(_slots(self.whole)))
        precision = contextlib.nullcontext()
        if precision_dtype is not None:
            precision = torch.autocast(device.type, dtype=precision_dtype)
        with faked(bones, device) as (model, mode), mode, torch.enable_grad(), precision:
            model.train()
            values: list[Any] = [None] * (wiring.num_values + 1)
            given = tensors(fake_like(inputs, mode, device))
            for slot, tensor in zip(wiring.inputs, given, strict=True):
                values[slot] = tensor
            done: set[int] = set()
            for plan in plans:
                for node in plan.nodes:
                    if id(node) not in done:
                        done.add(id(node))
                        self._run(node, model, values)
                for slot in plan.wiring.gives:
                    self.is_contiguous[slot] = values[slot].is_contiguous()
            self.metas = [values[slot] for slot in self.returned]

    def _run(self, node: Node, model: nn.Module, values: list[Any]) -> None:
        call: Any = node.function or model.get_submodule(node.unit)
        args = [filler(value, model)(values) for value in node.args]
        kwargs = {key: filler(value, model)(values) for key, value in node.kwargs.items()}
        try:
            result = call(*args, **kwargs)
        except Exception as error:
            if node.function is not None:
                raise
            result = _made_up(node.unit, call, (args, kwargs), error)
        outs = iter(node.outs)
        self._forms[id(node)] = template(result, lambda _: Ref(next(outs)))
        for slot, tensor in zip(node.outs, tensors(result), strict=True):
            values[slot] = tensor

    def is_tensor(self, node: Node) -> bool:
        """Whether a call returns one tensor and nothing around it."""
        return isinstance(self._forms[id(node)], Ref)

    def pattern(self, node: Node, names: dict[int, str]) -> tuple[str, list[str]]:
        """What stands left of the `=` of a call, and the lines that then take its result apart."""
        form = self._forms[id(node)]
        if isinstance(form, Ref):
            return names[form.slot], []
        if isinstance(form, (tuple, list)) and _is_flat(form):
            parts = [_part(item, names) for item in form]
            return (f"{parts[0]}," if len(parts) == 1 else ", ".join(parts)), []
        steps = dict(_steps(form, "result"))
        return "result", [f"{name} = {steps[slot]}" for slot, name in names.items()]


def _made_up(name: str, unit: Any, arguments: tuple[list, dict], error: Exception) -> Any:
    """What a unit that looks at values returns for made-up ones."""
    try:
        return probed(unit, unit, tuple(arguments[0]), arguments[1])[0]
    except Exception:  # noqa: BLE001 - the user's unit may raise anything
        raise LayoutError(
            f"{name} does not run without values ({type(error).__name__}), so that its stage "
            "cannot be written as code. Export it under data parallelism."
        ) from error


def _is_flat(form: Sequence[Any]) -> bool:
    return all(
        isinstance(item, Ref)
        or (isinstance(item, (tuple, list)) and _is_flat(item))
        or item is None
        for item in form
    )


def _part(item: Any, names: dict[int, str]) -> str:
    if isinstance(item, (tuple, list)):
        parts = [_part(inner, names) for inner in item]
        return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"
    return names.get(item.slot, "_") if isinstance(item, Ref) else "_"


def _steps(form: Any, text: str) -> list[tuple[int, str]]:
    """(slot, expression) for each value in a result."""
    if isinstance(form, Ref):
        return [(form.slot, text)]
    if isinstance(form, Made):
        return [s for key, item in form.fields.items() for s in _steps(item, f"{text}.{key}")]
    if isinstance(form, dict):
        return [s for key, item in form.items() for s in _steps(item, f"{text}[{quoted(key)}]")]
    if isinstance(form, (tuple, list)):
        return [s for place, item in enumerate(form) for s in _steps(item, f"{text}[{place}]")]
    return []


def _slots(form: Any) -> list[int]:
    if state := _state(form):
        raise LayoutError(
            f"The model returns {state.name} itself, which a stage of a script cannot pass on. "
            "Export it under data parallelism."
        )
    return [slot for slot, _ in _steps(form, "")]


def _state(form: Any) -> State | None:
    """The first parameter or buffer in a template."""
    if isinstance(form, State):
        return form
    inside: Any = form if isinstance(form, (tuple, list)) else ()
    if isinstance(form, (Made, dict)):
        inside = (form.fields if isinstance(form, Made) else form).values()
    return next((found for item in inside if (found := _state(item))), None)


def access(inputs: Any, text: str) -> list[str]:
    """Expressions for the tensors of nested inputs called `text`, in their order."""
    if isinstance(inputs, Tensor):
        return [text]
    count = iter(range(10**6))
    form = template(inputs, lambda _: Ref(next(count)))
    return [step for _, step in _steps(form, text)]
