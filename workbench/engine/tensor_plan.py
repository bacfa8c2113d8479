"""Tensor plan: which linear layers of a user's module are cut together, found and proven.

A candidate is a linear layer and those right before it that share one input: q, k, v and the output
of attention, or the two layers of a perceptron. It is used only when a run as any rank would take
it, in one process, gives what the whole gives (see tensor_proof.py); else it stays whole on every
rank, which is slower and never wrong.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from workbench.engine import tensor_notes
from workbench.engine.axes.tp import Group, TensorPlan, outputs
from workbench.engine.axes.tp import inputs as layer_inputs
from workbench.engine.tensor_calls import Call, Recording, Visit, is_linear, record
from workbench.engine.tensor_notes import Refused
from workbench.engine.tensor_proof import Found, Proof, prove
from workbench.engine.units import shown
from workbench.errors import RecipeError

__all__ = ["KINDS", "Group", "TensorPlan", "find", "given"]

KINDS = ("colwise", "rowwise", "vocab", "gathered")
# They look at a matrix or at all gradients as a whole; most others work element by element.
WHOLE_TENSORS = {"LBFGS", "Muon", "Adafactor", "Shampoo", "SOAP", "LAMB", "Lamb", "LARS"}
WHOLE_WHY = (
    "{} looks at whole matrices, and tensor parallelism cuts them. "
    "Use an optimizer that works element by element, such as AdamW."
)
# An embedding or an output layer is cut from this share of the model's parameters on.
LARGE = 0.1
# A module is run whole for the proof; above this many parameters that takes too much memory.
PROVABLE = 2**27
# Pairs of layers that are tried for a tensor_plan to propose.
TRIED = 20


def find(
    bones: nn.Module, inputs: Any, device: torch.device, optimizer_kind: str = ""
) -> TensorPlan:
    """The plan for a model that is called as `bones(inputs)`; bones: its skeleton.

    inputs: those of one or two samples, with values. optimizer_kind: name of the optimizer's class.
    A plan that cuts nothing says so in `why`.
    """
    if optimizer_kind in WHOLE_TENSORS:
        return TensorPlan(why=WHOLE_WHY.format(optimizer_kind))
    try:
        recording = record(bones, inputs, device)
    except Exception as error:  # noqa: BLE001 - the user's code may need values
        linear = [name for name, module in bones.named_modules() if is_linear(module)]
        pair = next(tensor_notes.pairs(bones, linear), None)
        such = f", such as {tensor_notes.written(*pair)}" if pair else ""
        return TensorPlan(
            why=f"The model does not run on tensors without values ({type(error).__name__}), so "
            f"nothing was found to cut. Give tensor_plan in the recipe{such}."
        )
    search = _Search(bones, recording)
    search.run()
    if not search.groups:
        why = tensor_notes.no_group(bones, list(search.refused.values()))
        notes = search.notes()
        if not search.refused and (pair := search.pair()):
            why += f" Give tensor_plan in the recipe, such as {pair}."
        return TensorPlan(why=why, notes=notes)
    return search.plan()


@dataclass
class _Search:
    """Goes over the linear layers in the order of their calls and keeps what is proven."""

    bones: nn.Module
    recording: Recording
    groups: list[Group] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    refused: dict[str, Refused] = field(default_factory=dict)  # by row
    _known: dict[Any, Found] = field(default_factory=dict)

    def run(self) -> None:
        for index in range(len(self.recording.calls)):
            columns = self._columns_before(index)
            if columns:
                self._try(columns, self.recording.calls[index])

    def plan(self) -> TensorPlan:
        embeddings, gathered = _vocabulary(self)
        plan = TensorPlan(tuple(self.groups), embeddings, gathered, self.sizes)
        return replace(plan, notes=self.notes(plan))

    def taken(self) -> set[str]:
        return {name for group in self.groups for name in (*group.columns, group.row)}

    def pair(self) -> str:
        """A tensor_plan of two layers that is proven, though they are not called in a row."""
        names = [call.name for call in self.recording.calls]
        for first, second in itertools.islice(tensor_notes.pairs(self.bones, names), TRIED):
            if not self.why_not(Group((first,), second)):
                return tensor_notes.written(first, second)
        return ""

    def module(self, name: str) -> nn.Module:
        return self.bones.get_submodule(name)

    def free(self, name: str) -> bool:
        """Whether a layer may be cut: its parameters are its own, and only it uses them."""
        params = {id(p) for p in self.module(name).parameters(recurse=False)}
        shared = [
            other
            for other, module in self.bones.named_modules()
            if module is not self.module(name)
            and params & {id(p) for p in module.parameters(recurse=False)}
        ]
        return not shared and name not in self.recording.strays

    def _columns_before(self, index: int) -> list[Call]:
        """The calls right before that share one input which is not that of this call."""
        calls, taken = self.recording.calls, self.taken()
        found: list[Call] = []
        if index == 0 or calls[index].name in taken:
            return found
        for call in reversed(calls[:index]):
            if call.name in taken or call.input is not calls[index - 1].input:
                break
            found.insert(0, call)
        alike = calls[index].input is calls[index - 1].input
        names = {call.name for call in found} | {calls[index].name}
        fit = len(names) == len(found) + 1 and all(self.free(name) for name in names)
        return found if fit and not alike else []

    def why_not(self, group: Group) -> str:
        """Add a group that was named; why it cannot be cut, "" when it was added."""
        names = (*group.columns, group.row)
        called = {call.name: call for call in reversed(self.recording.calls)}
        if not called.keys() >= set(names) or not all(map(self.free, names)):
            return "is not called, or shares its weight with other code"
        before = len(self.groups)
        self._try([called[name] for name in group.columns], called[group.row])
        if len(self.groups) > before:
            return ""
        refused = self.refused.get(group.row)
        return refused.why if refused else "no module lies around with the layers before it"

    def _try(self, columns: list[Call], row: Call) -> None:
        group = Group(tuple(call.name for call in columns), row.name)
        for visit in self._around(group, [*columns, row]):
            if sum(p.numel() for p in self.module(visit.name).parameters()) > PROVABLE:
                self.refused[row.name] = Refused(group, "lies in a module too large to be checked")
            elif self._accepts(group, visit):
                self.refused.pop(row.name, None)
                return

    def _accepts(self, group: Group, visit: Visit) -> bool:
        """Try a group in one module around it; layers and modules alike are tried once."""
        module = self.module(visit.name)
        inner = _within(visit.name, [group])[0]
        earlier = _within(visit.name, self.groups)
        limit = math.gcd(*self.sizes.values())
        key = (_signature(module), repr((visit.args, visit.kwargs)), inner, earlier)
        first = key not in self._known
        if first:
            self._known[key] = prove(Proof(module, visit, (*earlier, inner)), limit)
        found = self._known[key]
        if found.why:
            self.refused[group.row] = Refused(group, found.why)
            return False
        heads = tuple((_joined(visit.name, name), attribute) for name, attribute in found.heads)
        self.groups.append(replace(group, heads=heads))
        if first and not found.implied:
            name = tensor_notes.size_name(self.bones, self.groups[-1], found.parts)
            self.sizes[name] = found.parts
        return True

    def _around(self, group: Group, calls: list[Call]) -> list[Visit]:
        """The smallest visit that all the calls are in and the one around that, the whole model
        only if there is no other; none if a call happens outside of its module.
        """
        levels = zip(*(call.inside for call in calls), strict=False)
        common = [level[0] for level in levels if len(set(level)) == 1]
        inside = [self.recording.visits[index] for index in (common[1:] or common)[-2:]]
        members = {*group.columns, group.row}
        everywhere = [
            {self.recording.visits[index].name for index in call.inside}
            for call in self.recording.calls
            if call.name in members
        ]
        return [v for v in reversed(inside) if all(v.name in names for names in everywhere)]

    def notes(self, plan: TensorPlan | None = None) -> list[str]:
        """One line on the matrices that stay whole."""
        cut = self.taken() | set(plan.embeddings + plan.gathered if plan else ())
        why = dict.fromkeys(self.recording.strays, "other code uses its weight, too")
        why |= tensor_notes.reasons(list(self.refused.values()))
        return tensor_notes.whole(self.bones, cut, why)


def _joined(prefix: str, name: str) -> str:
    return ".".join(part for part in (prefix, name) if part)


def _within(prefix: str, groups: list[Group]) -> tuple[Group, ...]:
    """The groups that lie in a module, by their names in it."""
    start = f"{prefix}." if prefix else ""

    def short(name: str) -> str:
        return "" if name == prefix else name.removeprefix(start)

    return tuple(
        Group(
            tuple(short(name) for name in group.columns),
            short(group.row),
            tuple((short(name), attribute) for name, attribute in group.heads),
        )
        for group in groups
        if group.row.startswith(start)
    )


def _signature(module: nn.Module) -> Any:
    """Equal for modules that compute the same on different parameters."""
    plain = (int, float, str, bool, type(None))
    return tuple(
        (
            type(part),
            name,
            tuple((n, tuple(p.shape)) for n, p in part.named_parameters(recurse=False)),
            # Where a block stands among its like says nothing of what it computes.
            tuple(
                (key, value)
                for key, value in sorted(vars(part).items())
                if isinstance(value, plain) and not any(s in key for s in ("idx", "index"))
            ),
        )
        for name, part in module.named_modules()
    )


def _vocabulary(search: _Search) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Large embeddings, and output layers, that divide by whatever the groups divide by.

    An embedding and an output layer with one weight are cut alike, or not at all.
    """
    common = math.gcd(*search.sizes.values())
    least = LARGE * sum(p.numel() for p in search.bones.parameters())
    by_weight: dict[int, list[str]] = {}
    for name, module in search.bones.named_modules():
        for param in module.parameters(recurse=False):
            if param.ndim == 2 and param.numel() >= least and param.shape[0] % common == 0:
                by_weight.setdefault(id(param), []).append(name)
    embeddings: list[str] = []
    gathered: list[str] = []
    last = search.recording.calls[-1].name
    for names in by_weight.values():
        tables = [name for name in names if _is_table(search.module(name))]
        heads = [name for name in names if type(search.module(name)) is nn.Linear]
        known = len(tables) + len(heads) == len(names) and not set(names) & search.recording.strays
        if known and not set(names) & search.taken() and (tables or heads == [last]):
            embeddings += tables
            gathered += heads
    return tuple(embeddings), tuple(gathered)


def _is_table(module: nn.Module) -> bool:
    """Whether it is an embedding whose rows are looked up and nothing more."""
    return (
        type(module) is nn.Embedding
        and module.max_norm is None
        and not module.sparse
        and not module.scale_grad_by_freq
    )


def given(
    bones: nn.Module,
    plan: dict[str, str],
    inputs: Any = None,
    device: torch.device | None = None,
    optimizer_kind: str = "",
) -> TensorPlan:
    """The plan that a recipe's `tensor_plan` means: patterns of module names to one of KINDS.

    A rowwise layer ends the group of the colwise ones before it, in the order of the model's names.
    With inputs (see `find`) the groups are proven too, which finds heads that must be divided.

    Raises RecipeError for a pattern that matches nothing, for layers that do not fit their kind or
    each other, and for a group that would compute something else.
    """
    if optimizer_kind in WHOLE_TENSORS:
        return TensorPlan(why=WHOLE_WHY.format(optimizer_kind))
    modules = dict(bones.named_modules())
    kinds = _kinds(modules, plan)
    found = TensorPlan(
        tuple(_groups([(name, kinds[name]) for name in modules if name in kinds])),
        tuple(name for name, kind in kinds.items() if kind == "vocab"),
        tuple(name for name, kind in kinds.items() if kind == "gathered"),
        _sizes(modules, kinds),
    )
    if device is None:
        return found
    try:
        recording = record(bones, inputs, device)
    except Exception:  # noqa: BLE001 - the user's code may need values
        return replace(found, notes=["tensor_plan is used as given: it could not be checked"])
    return _proven(_Search(bones, recording), found)


def _kinds(modules: dict[str, nn.Module], plan: dict[str, str]) -> dict[str, str]:
    """Names of modules to kinds, checked one by one."""
    kinds: dict[str, str] = {}
    for pattern, kind in plan.items():
        if kind not in KINDS:
            raise RecipeError(
                f"tensor_plan gives {pattern!r} the kind {kind!r}. Known: {', '.join(KINDS)}."
            )
        names = [name for name in modules if name and fnmatchcase(name, pattern)]
        if not names:
            raise RecipeError(
                f"tensor_plan names {pattern!r}, which matches no module of the model. Print the "
                "model to see their names."
            )
        kinds |= dict.fromkeys(names, kind)
    dims: dict[int, str] = {}
    for name, kind in kinds.items():
        _check_kind(name, modules[name], kind)
        dims[id(modules[name].weight)] = kind
    for name, module in modules.items():
        for param in module.parameters(recurse=False):
            kind = dims.get(id(param))
            other = kinds.get(name)
            if kind and (other is None or (kind == "rowwise") != (other == "rowwise")):
                raise RecipeError(
                    f"tensor_plan cuts the weight of {name} as {kind} under another name. Name "
                    f"{name} too: vocab for an embedding, gathered for an output layer."
                )
    return kinds


def _groups(ordered: list[tuple[str, str]]) -> Iterator[Group]:
    columns: list[str] = []
    for name, kind in ordered:
        if kind == "colwise":
            columns.append(name)
        elif kind == "rowwise" and columns:
            yield Group(tuple(columns), name)
            columns = []
        elif kind == "rowwise":
            raise RecipeError(
                f"tensor_plan cuts {name} rowwise, and no layer before it colwise. Name both."
            )
    if columns:
        raise RecipeError(
            f"tensor_plan cuts {columns[-1]} colwise, and no layer after it rowwise. Name both."
        )


def _proven(search: _Search, plan: TensorPlan) -> TensorPlan:
    for group in plan.groups:
        if why := search.why_not(group):
            raise RecipeError(f"tensor_plan cuts {group.row}, which {why}. Leave its group out.")
    stray = search.recording.strays.intersection((*plan.embeddings, *plan.gathered))
    if stray:
        raise RecipeError(
            f"tensor_plan cuts {min(stray)}, whose weight other code uses too. Leave it out."
        )
    return replace(plan, groups=tuple(search.groups), sizes=plan.sizes | search.sizes)


def _check_kind(name: str, module: nn.Module, kind: str) -> None:
    fits = _is_table(module) if kind == "vocab" else is_linear(module)
    if not fits:
        needed = "an nn.Embedding" if kind == "vocab" else "an nn.Linear"
        raise RecipeError(
            f"tensor_plan cuts {name} as {kind}, which needs {needed}, and it is "
            f"{type(module).__name__}. Name the layers themselves."
        )


def _sizes(modules: dict[str, nn.Module], kinds: dict[str, str]) -> dict[str, int]:
    sizes = {}
    for name, kind in kinds.items():
        if kind == "rowwise":
            sizes[f"inputs of {shown(modules[''], name)}"] = layer_inputs(modules[name])
        elif kind == "vocab":
            sizes[f"rows of {shown(modules[''], name)}"] = modules[name].weight.shape[0]  # pyright: ignore
        else:
            sizes[f"outputs of {shown(modules[''], name)}"] = outputs(modules[name])
    return sizes
