"""Units: the submodules of a user's model that pipeline stages are made of.

A list of layers (nn.Sequential or nn.ModuleList) that lies in no other one is opened, and so is
what holds it; every other module is called as a whole, so that its own hooks fire.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import nn

from workbench.errors import RecipeError

LISTS = (nn.Sequential, nn.ModuleList)
Stages = Callable[[nn.Module], Sequence[nn.Module]]


def opened(model: nn.Module) -> set[nn.Module]:
    """The modules whose forward is taken apart: the model, lists of layers, and what holds them."""
    found = {model}

    def walk(module: nn.Module, above: tuple[nn.Module, ...]) -> None:
        path = (*above, module)
        if isinstance(module, LISTS) and sum(map(_holds, module.children())) >= 2:
            found.update(path)
            return
        for child in module.children():
            walk(child, path)

    walk(model, ())
    return found


def unit_names(bones: nn.Module, stages: Stages | None = None) -> list[str]:
    """Names of the units with parameters, in the order of the module tree, or as `stages` says.

    Raises RecipeError when stages(model) gives something else than submodules of the model.
    """
    if stages is not None:
        given = given_names(bones, stages)
        return list(dict.fromkeys(name for name in given if _holds(bones.get_submodule(name))))
    found = opened(bones)

    def walk(module: nn.Module, name: str) -> Iterator[str]:
        if module not in found:
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
    parts = list(given) if isinstance(given, (list, tuple, *LISTS)) else []
    for part in parts:
        if part not in names:
            raise RecipeError(
                f"stages(model) gives {_kind(part)}, which is no submodule of the model. "
                "Give submodules in the order they are called: return [model.first, *model.layers]"
            )
    if not parts:
        raise RecipeError(
            f"stages(model) gives {_kind(given)} instead of a list of submodules. "
            "Write: def stages(model): return [model.first, *model.layers]"
        )
    return [names[part] for part in parts]


def _holds(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _kind(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return "an empty list"
    return f"a {type(value).__name__}"
