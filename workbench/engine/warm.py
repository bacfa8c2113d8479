"""Warm: a spare does beforehand what takes a process longer the first time.

The first forward and backward pass of a process is twice as long as the next (kernels chosen,
memory touched), and a pipeline's model has to be recorded before it can be cut.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from workbench.engine.blueprint import Blueprint
from workbench.engine.data import shares
from workbench.engine.here import here
from workbench.engine.trainer import seeded
from workbench.spec.layout import Layout


def warm(layout: dict) -> None:
    """Get used to the training that `prepare` has built, under a layout; not collective.

    What the user's code raises here it will raise again where somebody hears it.
    """
    blueprint, wanted = here.prepared, Layout(**layout)
    # A spare that will have an accelerator has none yet, and its CPU may take minutes.
    if blueprint is None or here.world is not None or blueprint.trains_on != "cpu":
        return
    options, recipe = blueprint.plan.options, blueprint.plan.recipe
    with contextlib.suppress(Exception), here.meter.alone():
        every = shares(recipe.batch, wanted.dp, options.accumulate * wanted.microbatches)
        count = max(count for _, count in every[0])
        inputs = blueprint.inputs(count)
        if wanted.pp > 1:
            blueprint.cut(wanted.num_stages, inputs, (count,))
        with seeded(recipe.seed):
            _pass(recipe.model(), inputs, blueprint)


def _pass(model: nn.Module, inputs: object, blueprint: Blueprint) -> None:
    """Forward and backward, of anything: not of the user's loss, which may count its calls."""
    dtype = blueprint.precision_dtype
    precision = contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)
    with precision:
        output = model(inputs)
    outputs = [one for one in tree_leaves(output) if isinstance(one, Tensor)]
    sum(one.float().mean() for one in outputs if one.requires_grad).backward()  # type: ignore[union-attr]
    torch.optim.AdamW(model.parameters()).step()


def warm_up() -> None:
    """What is the same for all trainings: what a first step imports, the threads it starts."""
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(2, 4)).sum().backward()
    optimizer.step()
