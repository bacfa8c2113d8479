"""Case: all that decides what a script has to say, found on the rank that writes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.engine.axes import dp_shard
from workbench.engine.batchnorm import is_batchnorm
from workbench.engine.blueprint import Blueprint
from workbench.engine.data import shares
from workbench.engine.export.imports import Import, parsed
from workbench.engine.export.own_text import OwnText
from workbench.engine.skeleton import fake_like, faked
from workbench.spec.layout import AXES, SHORT, Layout


@dataclass
class Section:
    """Lines of a script, and the imports they need."""

    lines: list[str]
    imports: set[Import] = field(default_factory=set)

    def needs(self, imports: str) -> None:
        """Note import lines."""
        self.imports |= parsed(imports)


@dataclass(frozen=True)
class About:
    """What the driver knows: name of the run, step it is at, steps it goes to, name of the file."""

    run: str
    step: int
    steps: int
    file: str


@dataclass(frozen=True)
class Case:
    """unused: parameters that take no part in the loss, None where that is not known. draws:
    whether the forward draws random numbers.
    """

    about: About
    own: OwnText
    blueprint: Blueprint
    layout: Layout
    unused: tuple[str, ...] | None
    draws: bool

    @property
    def recipe(self) -> Any:
        """The recipe."""
        return self.blueprint.plan.recipe

    @property
    def options(self) -> Any:
        """Options of the training."""
        return self.blueprint.plan.options

    @property
    def bones(self) -> nn.Module:
        """The model without values."""
        return self.blueprint.bones

    @property
    def axes(self) -> dict[str, int]:
        """Degrees of the axes in use, by their short names, outermost first."""
        degrees = self.layout.degrees()
        return {SHORT[name]: degrees[name] for name in AXES if degrees[name] > 1}

    @property
    def data_axes(self) -> list[str]:
        """The axes over which a batch is shared out."""
        return [name for name in self.axes if name in ("dp", "fsdp")]

    @property
    def is_plain_ddp(self) -> bool:
        """Whether replicas are all there is, so that no mesh is needed."""
        return list(self.axes) == ["dp"]

    @property
    def share(self) -> str:
        """The number of this rank's share of the batch, as code; "" for the whole."""
        if self.is_plain_ddp:
            return "rank"
        both = f"dp * {self.axes.get('fsdp')} + fsdp"
        return both if len(self.data_axes) == 2 else "".join(self.data_axes)

    @property
    def share_factor(self) -> str:
        """`share` as a factor."""
        return f"({self.share})" if " " in self.share else self.share

    def group(self, axis: str) -> str:
        """The process group of an axis, as code."""
        return "dist.group.WORLD" if self.is_plain_ddp else f'mesh.get_group("{axis}")'

    @property
    def micros(self) -> int:
        """Microbatches of one share in one step."""
        return self.options.accumulate * self.layout.microbatches

    @property
    def is_even(self) -> bool:
        """Whether all microbatches of all shares have one size."""
        return self.recipe.batch % (self.layout.dp * self.micros) == 0

    @property
    def micro_size(self) -> int:
        """Samples in the largest microbatch."""
        every = shares(self.recipe.batch, self.layout.dp, self.micros)
        return max(count for share in every for _, count in share)

    @property
    def norms(self) -> list[Any]:
        """Batch normalisations whose batch is spread over ranks."""
        found = [module for module in self.bones.modules() if is_batchnorm(module)]
        return found if self.layout.dp > 1 else []

    @property
    def blocks(self) -> str:
        """Name of the list of repeated blocks, "" without one."""
        found = dp_shard.blocks(self.bones)
        names = (n for n, m in self.bones.named_modules() if found and list(m.children()) == found)
        return next(names, "")

    def seed(self, number: str) -> str:
        """The call that seeds all that may draw, as code."""
        return f"{'torch.manual_seed' if self.own.uses_only_torch else 'seed_all'}({number})"


def looked_at(blueprint: Blueprint) -> tuple[tuple[str, ...] | None, bool]:
    """Parameters that take no part in the loss (None: not to be told without values), and whether
    the forward draws random numbers.
    """
    recipe = blueprint.plan.recipe
    inputs, target = recipe.samples.fetch(0, min(2, recipe.batch))
    watch = _Draws()
    try:
        with faked(blueprint.bones, blueprint.device) as (model, mode):
            model.train()
            params = {n: p for n, p in model.named_parameters() if p.requires_grad}
            given = [fake_like(value, mode, blueprint.device) for value in (inputs, target)]
            with mode, torch.enable_grad():
                with watch:
                    output = model(given[0])
                loss = recipe.loss(output, given[1])
                grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
    except Exception:  # noqa: BLE001 - the user's code may look at values
        return None, True
    return tuple(n for n, grad in zip(params, grads, strict=True) if grad is None), watch.found


class _Draws(TorchDispatchMode):
    """Whether what runs below it draws random numbers; dropout of nothing does not."""

    found = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            named = zip((argument.name for argument in func._schema.arguments), args, strict=False)
            given = {**dict(named), **kwargs}
            is_attention = "_scaled_dot_product" in str(func)
            rate = given.get("dropout_p", given.get("p", 0.0 if is_attention else 1.0))
            self.found |= rate != 0
        return func(*args, **kwargs)


def listed(names: Sequence[str]) -> str:
    """Names in a Python tuple's brackets."""
    return f"({', '.join(names)},)" if len(names) == 1 else f"({', '.join(names)})"
