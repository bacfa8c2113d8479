"""Units: the submodules of a user's model that pipeline stages are made of.

A list of layers (nn.Sequential, nn.ModuleList, nn.ModuleDict) that lies in no layer of another one
is opened, and so is what holds it; every other module is called as a whole: its own hooks fire.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from workbench.errors import RecipeError

# These have no forward: whoever holds them calls what is in them.
HOLDERS = (nn.ModuleList, nn.ModuleDict)
LISTS = (*HOLDERS, nn.Sequential)
Stages = Callable[[nn.Module], Sequence[nn.Module]]


def opened(model: nn.Module) -> set[nn.Module]:
    """The modules whose forward is taken apart: the model, lists of layers, and what holds them."""
    found = {model}

    def walk(module: nn.Module, above: tuple[nn.Module, ...], in_list: bool) -> None:
        path = (*above, module)
        if in_list:
            is_list = isinstance(module, HOLDERS)
        else:
            is_list = isinstance(module, LISTS) and sum(map(_holds, module.children())) >= 2
        if is_list:
            found.update(path)
        elif in_list or is_parametrized(module):  # which has a dict, but of no layers
            return
        for child in module.children():
            walk(child, path, is_list)

    walk(model, (), False)
    return found


def unit_names(bones: nn.Module, stages: Stages | None = None) -> list[str]:
    """Names of the units with parameters, in the order of the module tree, or as `stages` says.

    Raises RecipeError when stages(model) gives something else than submodules of the model.
    """
    if stages is not None:
        given = given_names(bones, stages)
        return list(dict.fromkeys(name for name in given if _holds(bones.get_submodule(name))))
    found, seen = opened(bones), set[nn.Module]()

    def walk(module: nn.Module, name: str) -> Iterator[str]:
        if module in seen:
            return
        seen.add(module)
        if module not in found and not isinstance(module, HOLDERS):
            if _holds(module):
                yield name
            return
        for key, child in module.named_children():
            yield from walk(child, f"{name}.{key}" if name else key)

    return list(walk(bones, ""))


def given_names(model: nn.Module, stages: Stages) -> list[str]:
    """Names of the submodules that stages(model) gives, in its order. Raises RecipeError."""
    names = {module: name for name, module in model.named_modules() if name}
    given = stages(model)
    parts = list(given) if isinstance(given, (list, tuple, nn.Sequential, nn.ModuleList)) else []
    for part in parts:
        if part not in names:
            raise RecipeError(
                f"stages(model) gives {_kind(part)}, which is no submodule of the model. "
                f"Give submodules in the order they are called: return {example(model)}"
            )
    if not parts:
        raise RecipeError(
            f"stages(model) gives {_kind(given)} instead of a list of submodules. "
            f"Write: def stages(model): return {example(model)}"
        )
    return [names[part] for part in parts]


def example(model: nn.Module) -> str:
    """What a recipe's `stages` may return, with the names of this model: `[model.a, *model.b]`."""
    found = [
        f"{'*' if isinstance(child, LISTS) else ''}model.{name}"
        for name, child in model.named_children()
        if name.isidentifier() and _holds(child)
    ]
    return f"[{', '.join(found or ['*model.children()'])}]"


def shown(model: nn.Module, name: str) -> str:
    """A unit's name for a reader: the bare number of a member of nn.Sequential gets its kind."""
    return f"{type(model.get_submodule(name)).__name__} {name}" if name.isdigit() else name


def _holds(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _kind(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return "an empty list"
    return f"a {type(value).__name__}"
