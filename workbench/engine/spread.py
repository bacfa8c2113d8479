"""Spread: a model laid out over the ranks, axis by axis in one fixed order.

pp (which layers), tp (which rows and columns), what must know of both (dropout, batch statistics,
recomputation), dp_shard (which shard), memory, dp_replicate. Nothing here knows a strategy: hybrid
is what several axes give.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from workbench.engine import batchnorm, dropout, state
from workbench.engine import cut as cutting
from workbench.engine.axes import dp_replicate, dp_shard, pp, tp
from workbench.engine.blueprint import Blueprint
from workbench.engine.clipping import clip
from workbench.engine.data import shares
from workbench.engine.direct import Direct
from workbench.engine.held import Held, TensorCut
from workbench.engine.micro import Micro
from workbench.engine.recompute import recompute
from workbench.engine.skeleton import copy_of
from workbench.engine.units import shown
from workbench.engine.world import World
from workbench.errors import LayoutError
from workbench.spec.layout import Layout
from workbench.spec.limits import as_it_is, use_instead

Enter = Callable[[Micro, int], contextlib.AbstractContextManager]
Loss = Callable[[Any, Micro], Tensor]


class Pass(Protocol):
    """Takes microbatches forward and backward; gradients add up on the rank's parameters."""

    def run(self, micros: Sequence[Micro], *, is_last: bool) -> None:
        """is_last: no others follow in this step."""


class Spread:
    """What this rank holds of the model, and how it takes its part of a step.

    Nothing is held by a rank that the layout leaves idle, and the parameters have no values yet.
    """

    def __init__(self, blueprint: Blueprint, layout: Layout, world: World) -> None:
        self.blueprint = blueprint
        self.layout = layout
        self.device = world.device
        self.meter = world.meter
        self.is_idle = world.rank >= layout.world_size
        self._num_ranks = world.size
        self.where = layout.coordinate(world.rank)
        self.share = layout.share(world.rank)
        self.stages = [] if self.is_idle else layout.stages(world.rank)
        self.draw = dropout.Draw()
        self.held = Held([])
        self._mesh = world.mesh(layout)
        # All ranks of the layout, and all its shares of the batch, as one axis each.
        self._all = world.mesh(Layout(dp_replicate=layout.world_size))
        self._wide = world.mesh(replace(layout, dp_replicate=layout.dp, dp_shard=1))
        self._cut: cutting.Cut | None = None
        self._parts: dict[int, nn.Module] = {}
        options, recipe = blueprint.plan.options, blueprint.plan.recipe
        every = shares(recipe.batch, layout.dp, options.accumulate * layout.microbatches)
        self.micros = [] if self.is_idle else every[self.share]
        # All microbatches of a pipeline have one shape.
        is_padded = layout.pp > 1 and not self.is_idle
        self.padded = max(count for _, count in self.micros) if is_padded else 0
        if not self.is_idle:
            self._build()

    @property
    def has_loss(self) -> bool:
        """Whether the loss of this rank counts: tensor-parallel ranks all compute the same one."""
        return self.layout.num_stages - 1 in self._parts and self.where["tp"] == 0

    def group(self, axis: str) -> dist.ProcessGroup:
        """The process group of an axis that is used."""
        return self._mesh.get_group(axis)

    def _build(self) -> None:
        layout, blueprint = self.layout, self.blueprint
        if layout.pp > 1:
            self._cut = self._cut_model()
            self._check_sharable(self._cut)
            self._check_even(self._cut)
        cuts: dict[str, TensorCut] = {}
        for stage in self.stages:
            part = self._parts[stage] = copy_of(blueprint.bones)
            if self._cut is not None:
                cutting.install(self._cut.stages[stage], part)
            if layout.tp > 1:
                of = blueprint.tensor_plan
                if layout.pp > 1:
                    of = of.inside(blueprint.limits.units)
                cuts |= tp.cut(part, of, self.group("tp"), self.where["tp"], layout.tp)
        for part in self._parts.values():
            self._finish_part(part)
        self._tie_within_rank()
        self.held = Held(list(self._parts.values()), cuts)

    def _cut_model(self) -> cutting.Cut:
        """Raises LayoutError, with what can be used instead, for a model that cannot be cut so."""
        try:
            return self.blueprint.cut(
                self.layout.num_stages, self.blueprint.inputs(self.padded), (self.padded,)
            )
        except cutting.TooFewPlacesError as error:
            most = error.most
            use = self._instead(lambda one: one.num_stages <= most)
            raise LayoutError(as_it_is(str(error), use)) from None
        except LayoutError as error:
            raise LayoutError(
                as_it_is(str(error), self._instead(lambda one: one.pp == 1))
            ) from None

    def _instead(self, also: Callable[[Layout], bool]) -> str:
        """What to type instead of a layout that the limits allow, and something else does not."""
        return use_instead(self.layout, self.blueprint.limits, self._num_ranks, also)

    def _check_sharable(self, cut: cutting.Cut) -> None:
        """Raises LayoutError on all ranks for what is tied over stages of a rank, and sharded."""
        for name, stages in cut.tied.items():
            ranks = [self.layout.rank_of_stage(stage) for stage in stages]
            if self.layout.dp_shard > 1 and len(set(ranks)) < len(ranks):
                use = self._instead(lambda one: one.dp_shard == 1)
                raise LayoutError(
                    f"{name} is used by two stages that {self.layout.schedule} puts on one rank, "
                    f"where it cannot be sharded. {use}"
                )

    def _check_even(self, cut: cutting.Cut) -> None:
        """Raises LayoutError on all ranks for what samples that fill up a microbatch would change.

        They are cut off what has a row a sample, and not off a mean that the model takes itself.
        """
        options, recipe, layout = (
            self.blueprint.plan.options, self.blueprint.plan.recipe, self.layout
        )  # fmt: skip
        pieces = layout.dp * layout.microbatches * options.accumulate
        if cut.over_batch and recipe.batch % pieces:
            near = recipe.batch // pieces * pieces
            use = self._instead(
                lambda one: (
                    one.pp == 1
                    or recipe.batch % (one.dp * one.microbatches * options.accumulate) == 0
                )
            ).rstrip(".")
            raise LayoutError(
                f"The model gives a value over all its samples, so that microbatches must be even: "
                f"batch={recipe.batch} is not {pieces} times as many. {use}, or start with "
                f"batch={near or pieces} or {near + pieces}."
            )

    def _tie_within_rank(self) -> None:
        """Let two stages of this rank share what is tied: their gradients then add up by itself."""
        known: dict[str, nn.Parameter] = {}
        for part in self._parts.values():
            other = {p: known[n] for n, p in part.named_parameters() if n in known}
            for module in part.modules():
                for name, param in module._parameters.items():
                    if param is not None and param in other:
                        module._parameters[name] = other[param]
            known |= dict(part.named_parameters())

    def _finish_part(self, part: nn.Module) -> None:
        layout, blueprint = self.layout, self.blueprint
        dropout.make_invariant(
            part,
            self.draw,
            blueprint.plan.recipe.seed,
            full_shapes=blueprint.dropout_shapes if layout.tp > 1 else None,
            index=self.where["tp"],
            of=layout.tp,
        )
        if layout.dp > 1:
            batchnorm.make_exact(part, self._wide.get_group("dp_replicate"))
        if blueprint.plan.options.recompute:
            recompute(self._recomputed(part))
        if layout.dp_shard > 1:
            axes = ("dp_replicate", "dp_shard") if layout.dp_replicate > 1 else ("dp_shard",)
            mesh = self._mesh if len(layout.used()) == len(axes) else self._mesh[axes]
            dp_shard.spread(part, mesh)
        _give_memory(part, self.device)

    def _recomputed(self, part: nn.Module) -> list[nn.Module]:
        blocks = dp_shard.blocks(part)
        if not blocks:
            blocks = [part.get_submodule(name) for name in self.blueprint.limits.units]
        return [block for block in blocks if any(True for _ in block.parameters())]

    # A step.

    def ready(self, enter: Enter, loss: Loss, *, seeks_unused: bool) -> Pass:
        """What takes microbatches forward and backward; to be called once values are there."""
        if self.layout.pp > 1:
            assert self._cut is not None
            return pp.Pipeline(
                self._parts,
                self._cut.stages,
                layout=self.layout,
                group=self.group("pp"),
                device=self.device,
                enter=enter,
                loss=loss,
                clock=self.meter.clock,
            )
        (part,) = self._parts.values()
        module, without_sync = part, None
        if self.layout.dp_shard > 1:
            without_sync = dp_shard.without_sync
        elif self.layout.dp_replicate > 1:
            group = self.group("dp_replicate")
            module = dp_replicate.spread(part, group, self.meter, seeks_unused=seeks_unused)
            without_sync = dp_replicate.without_sync
        return Direct(module, enter=enter, loss=loss, without_sync=without_sync, meter=self.meter)

    def settle_gradients(self) -> None:
        """After the last backward pass: what the axes have not summed on the way."""
        if self.layout.pp == 1:
            return
        params = [param for _, param in self.held.named_parameters() if param.requires_grad]
        if self.layout.dp_replicate > 1 and self.layout.dp_shard == 1:
            dp_replicate.average(params, self.group("dp_replicate"))
        group, me = self.group("pp"), self.where["pp"]
        named = dict(self.held.named_parameters())
        tied = self._tied().items()
        pp.sum_tied([(named[n], ranks) for n, ranks in tied if me in ranks], group)

    def agree(self, is_bad: bool) -> bool:
        """Whether any of the ranks that hold other parts of the gradient met what it must not.

        All ranks of a pipeline, and all that shard, are together then, so that either all of them
        take the step or none does. Replicas have the same gradient, and know it by themselves.
        """
        layout = self.layout
        if layout.pp * layout.dp_shard * layout.tp == 1:
            return is_bad
        group = self.group("pp") if layout.dp_shard * layout.tp == 1 else self.everyone
        met = torch.full((1,), float(is_bad), device=self.device)
        dist.all_reduce(met, group=group)
        return bool(met)

    @property
    def everyone(self) -> dist.ProcessGroup | None:
        """All ranks that train; None for one alone."""
        return self._all.get_group() if self.layout.world_size > 1 else None

    def _tied(self) -> dict[str, list[int]]:
        """Parameters that several pipeline ranks hold, with those ranks."""
        if self._cut is None:
            return {}
        found = {
            name: sorted({self.layout.rank_of_stage(stage) for stage in stages})
            for name, stages in sorted(self._cut.tied.items())
        }
        return {name: ranks for name, ranks in found.items() if len(ranks) > 1}

    def clip(self, max_norm: float) -> float:
        """Scale the gradients so that their norm over all axes is at most max_norm -> it before."""
        holders = {name: len(ranks) for name, ranks in self._tied().items()}
        return clip(self.held, max_norm, self.layout, holders=holders, group=self.everyone)

    def whole(self, pipeline: Pass) -> nn.Module:
        """The model to be called with any inputs; pipeline: what `ready` gave."""
        if isinstance(pipeline, pp.Pipeline):
            return pp.Whole(pipeline, self._plans_for)
        (part,) = self._parts.values()
        return part

    def _plans_for(self, inputs: Any) -> Sequence[cutting.StagePlan]:
        tensors = [x for x in pytree.tree_leaves(inputs) if isinstance(x, Tensor)]
        key = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
        stages = self.layout.num_stages
        return self.blueprint.cut(stages, inputs, key, training=False).stages

    def drawn_before(self, stage: int) -> dict[str, int]:
        """How often each dropout module was called on a microbatch before it came to a stage."""
        return dict(self._cut.stages[stage].dropped) if self._cut is not None else {}

    # What the panel shows.

    def stages_shown(self) -> list[dict[str, Any]]:
        """Each stage's units and its share of the cost; [] without a pipeline."""
        if self._cut is None:
            return []
        bones = self.blueprint.bones
        return [
            {"units": [shown(bones, name) for name in plan.units], "share": plan.share}
            for plan in self._cut.stages
        ]


def _give_memory(part: nn.Module, device: torch.device) -> None:
    """Parameters without memory get some; buffers, which have values, move to the device."""

    def give(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)

    tied = state.tied(part)
    # `to_empty` would take the buffers' values.
    part._apply(give)
    for alias, name in tied.items():
        owner, _, leaf = alias.rpartition(".")
        part.get_submodule(owner)._parameters[leaf] = part.get_parameter(name)
