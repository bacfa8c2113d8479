"""What is said of a tensor plan: what stays whole and why, what to do where nothing is cut."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from workbench.engine.axes.tp import Group, inputs, outputs
from workbench.engine.tensor_calls import is_linear
from workbench.engine.tensor_proof import OTHERWISE, is_head_count
from workbench.engine.units import shown

# What is whole is named from this share of the model's parameters on, all blocks together.
SMALL = 0.01
NAMED = 8
MULTIHEAD_WHY = "nn.MultiheadAttention is not cut by itself"
# How the code between the layers of an attention has to look, by whether q, k, v are one layer.
ONE_LAYER = "put whole heads side by side in its rows, with view(..., -1, 3, width of a head)"
THREE_LAYERS = "take the number of heads from the tensor, with view(..., -1, width of a head)"
# What tensor_proof says of a row that more than its columns lead to.
DEPENDS = "also depends on trained tensors that are not cut"
FEATURES = "between them, each feature has to be computed by itself"


@dataclass(frozen=True)
class Refused:
    """A group that was tried, and why it is not cut: what the row does or would do."""

    group: Group
    why: str


def reasons(refused: Sequence[Refused]) -> dict[str, str]:
    """Why layers are not cut, by name: as the row of a group, else as a column of the first."""
    found = {name: one.why for one in reversed(refused) for name in one.group.columns}
    return found | {one.group.row: one.why for one in refused}


def whole(bones: nn.Module, cut: Collection[str], why: Mapping[str, str]) -> list[str]:
    """One line on the matrices that stay whole, or none; cut: names of modules; why: by module."""
    modules = dict(bones.named_modules())
    sizes = _sizes(modules, {id(modules[name].weight) for name in cut})
    known = {n: MULTIHEAD_WHY for n in sizes if _is_multihead(modules.get(n))} | {**why}
    taken = {_starred(name) for name in cut}
    alike: dict[tuple[str, str], list[str]] = {}
    for name in sizes:
        shown = name if _starred(name) in taken else _starred(name)
        alike.setdefault((shown, known.get(name, "")), []).append(name)
    least = SMALL * sum(p.numel() for p in bones.parameters())
    found = [
        (shown if len(names) > 1 else names[0], reason)
        for (shown, reason), names in alike.items()
        if sum(sizes[name] for name in names) >= least
    ]
    if not found:
        return []
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return [f"Whole on every tensor-parallel rank: {', '.join(_listed(found[:NAMED]))}{more}"]


def _sizes(modules: Mapping[str, nn.Module], cut: Collection[int]) -> dict[str, int]:
    """Numbers in the matrices that are not cut, by what they are called."""
    sizes: dict[str, int] = {}
    seen = set(cut)
    for name, module in modules.items():
        for key, param in module.named_parameters(recurse=False):
            if param.ndim > 1 and id(param) not in seen:
                seen.add(id(param))
                called = _called(modules, name, key)
                sizes[called] = sizes.get(called, 0) + param.numel()
    return sizes


def _called(modules: Mapping[str, nn.Module], name: str, key: str) -> str:
    """What a matrix belongs to: an attention, a layer; itself where it is of a user's module."""
    keys = name.split(".")
    for place in range(1, len(keys) + 1):
        outer = ".".join(keys[:place])
        if _is_multihead(modules[outer]):
            return outer
    is_torchs = type(modules[name]).__module__.startswith("torch.") or is_linear(modules[name])
    return name if name and is_torchs else f"{name}.{key}".lstrip(".")


def _is_multihead(module: nn.Module | None) -> bool:
    return isinstance(module, nn.MultiheadAttention)


def _starred(name: str) -> str:
    """`blocks.*.up` for `blocks.3.up`; a bare number stays what it is."""
    keys = name.split(".")
    return ".".join("*" if key.isdigit() else key for key in keys) if len(keys) > 1 else name


def _listed(found: Iterable[tuple[str, str]]) -> Iterator[str]:
    """The names, a reason behind the last of those it holds for."""
    for reason, some in itertools.groupby(found, key=lambda one: one[1]):
        names = ", ".join(name for name, _ in some)
        yield f"{names} ({reason})" if reason else names


def no_group(bones: nn.Module, refused: Sequence[Refused]) -> str:
    """Why nothing is cut, and what to change of what looked as if it could be."""
    if refused:
        return _looked_like_one(bones, min(refused, key=lambda one: _precedence(bones, one)))
    return "No two linear layers of the model were found that can be cut together."


def pairs(bones: nn.Module, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Linear layers that fit each other, each with a weight of its own."""
    held = Counter(
        id(param) for module in bones.modules() for param in module.parameters(recurse=False)
    )
    modules = {name: bones.get_submodule(name) for name in names}
    own = [n for n, m in modules.items() if all(held[id(p)] == 1 for p in m.parameters())]
    for first, second in itertools.combinations(own, 2):
        if outputs(modules[first]) == inputs(modules[second]):
            yield first, second


def written(first: str, second: str) -> str:
    """A tensor_plan of two layers, as a recipe has it."""
    return f'{{"{first}": "colwise", "{second}": "rowwise"}}'


def _precedence(bones: nn.Module, one: Refused) -> tuple[bool, bool]:
    """Least for what most likely was meant as a pair: attention, then layers of one module."""
    parents = {name.rpartition(".")[0] for name in (*one.group.columns, one.group.row)}
    return _attention(bones, one.group) == "", len(parents) > 1


def _attention(bones: nn.Module, group: Group) -> str:
    """How the code of an attention has to look; "" for layers that are none."""
    first, *others = group.columns
    if len(others) > 1:
        return THREE_LAYERS
    fused = outputs(bones.get_submodule(first))
    return ONE_LAYER if fused == 3 * inputs(bones.get_submodule(group.row)) else ""


def _looked_like_one(bones: nn.Module, one: Refused) -> str:
    others, row = one.group.columns, one.group.row
    like = f"{', '.join(others)} and {row} look like a {'pair' if len(others) == 1 else 'group'}"
    if one.why == DEPENDS:
        return (
            f"{like}, but other trained weights reach {row} past {' and '.join(others)}, and "
            f"{'a pair' if len(others) == 1 else 'a group'} can be cut only where none do."
        )
    if one.why != OTHERWISE:
        return f"{like}, but {row} {one.why}."
    advice = _attention(bones, one.group) or FEATURES
    return f"{like}, but cut in parts they compute something else: {advice}."


def size_name(bones: nn.Module, group: Group, parts: int) -> str:
    """What a degree must divide, as the user knows it: there are so many `heads (attention.n)`."""
    for name, attribute in group.heads:
        if getattr(bones.get_submodule(name), attribute) == parts:
            return f"heads ({f'{name}.{attribute}'.lstrip('.')})"
    for name in group.columns:
        if outputs(bones.get_submodule(name)) == parts:
            return f"outputs of {shown(bones, name)}"
    first = group.columns[0]
    if heads := _heads_around(bones, first, parts):
        return f"heads ({heads})"
    if _attention(bones, group):
        around = first.rpartition(".")[0]
        return f"heads of {around}" if around else "heads"
    return f"parts that {shown(bones, first)} can be cut into"


def _heads_around(bones: nn.Module, name: str, parts: int) -> str:
    """A number of heads of that size, of the nearest module around a layer; "" without one."""
    while name:
        name = name.rpartition(".")[0]
        for key, value in vars(bones.get_submodule(name)).items():
            if value == parts and is_head_count(key, value):
                return f"{name}.{key}".lstrip(".")
    return ""
