"""Blueprint: what is known of a training's model before it is spread over ranks.

It outlives layouts: every one is built from it, and what takes time to find (how the model can be
cut, what tensor parallelism may split) is found once.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from workbench.engine import dropout, flops, state, tensor_plan
from workbench.engine.axes import dp_replicate, dp_shard
from workbench.engine.cut import Cut, cut_tape, unit_names
from workbench.engine.recipe import Recipe
from workbench.engine.recorder import record
from workbench.engine.skeleton import fake_like, faked, skeleton
from workbench.engine.tape import Tape
from workbench.engine.world import World
from workbench.errors import LayoutError, RecipeError
from workbench.spec.layout import Layout
from workbench.spec.limits import Limits, why_not
from workbench.spec.options import TrainOptions


@dataclass(frozen=True)
class Plan:
    """What stays the same for one training whatever its world: recipe, options."""

    recipe: Recipe
    options: TrainOptions


class Blueprint:
    """Made from the whole model, which it does not keep."""

    def __init__(self, plan: Plan, model: nn.Module, device: torch.device) -> None:
        self.plan = plan
        self.device = device
        # A spare is bound to the device of its rank only once it is needed.
        self.trains_on = device.type
        self.bones = skeleton(model)
        self.names = [name for name, _ in self.bones.named_parameters()]
        self.sizes = {name: param.numel() for name, param in self.bones.named_parameters()}
        whole = plan.recipe.optimizer(self.bones.parameters())
        _check_params(whole, self.bones)
        # By name, since a stage has only some of the parameters of a group.
        self.groups = state.group_names(self.bones, whole)
        self.optimizer_kind = type(whole).__name__
        self.loss_note = ""
        # Whether steps have shown that every parameter takes part in the loss.
        self.all_used = False
        self.flops: float | None = None
        self.state_note = ""
        self._facts: dict[str, Any] = {}
        self._tapes: dict[tuple, Tape] = {}
        self._cuts: dict[tuple, Cut] = {}

    @property
    def precision_dtype(self) -> torch.dtype | None:
        """What autocast computes in; None without."""
        return torch.bfloat16 if self.plan.options.precision == "bf16" else None

    def inputs(self, count: int) -> Any:
        """Inputs of as many samples as in a microbatch, for their shapes."""
        return self.plan.recipe.samples.fetch(0, count)[0]

    def cut(self, num_stages: int, inputs: Any, key: tuple, *, training: bool = True) -> Cut:
        """The model in stages; key: what tells inputs of other shapes apart.

        The places are the same whatever the inputs: those found for a microbatch of two samples.

        Raises LayoutError where it cannot be cut.
        """
        count = min(2, self.plan.recipe.batch)
        name, first = type(self.bones).__name__, (num_stages, True, count)
        if first not in self._cuts:
            tape = self._tape((True, count), self.inputs(count))
            self._cuts[first] = cut_tape(tape, name, num_stages)
        full_key = (num_stages, training, *key)
        if full_key not in self._cuts:
            tape = self._tape((training, *key), inputs)
            self._cuts[full_key] = cut_tape(tape, name, num_stages, like=self._cuts[first])
        return self._cuts[full_key]

    def _tape(self, key: tuple, inputs: Any) -> Tape:
        """The forward for inputs of these shapes, recorded once however often it is cut."""
        if key not in self._tapes:
            training = key[0]
            self._tapes[key] = record(
                self.bones,
                inputs,
                device=self.device,
                training=training,
                precision_dtype=self.precision_dtype if training else None,
                stages=self.plan.recipe.stages,
            )
        return self._tapes[key]

    def share(self, world: World) -> None:
        """Let all ranks know what one finds of the model; collective.

        The last rank counts its operations while rank 0 looks for what may be cut.
        """
        mine: dict[str, Any] = {}
        with world.meter.alone():
            if world.rank == world.size - 1:
                mine["flops"] = flops.per_sample(self.bones, self.plan.recipe, self.device)
            if world.rank == 0:
                mine["limits"] = self.limits
                mine["state_note"] = self._state_note()
                if not self.limits.tp_why:
                    mine |= {"tensor_plan": self.tensor_plan, "dropout_shapes": self.dropout_shapes}
        every: list[Any] = [None] * world.size
        torch.distributed.all_gather_object(every, mine)
        for told in every:
            self.learn(told)

    def learn(self, told: dict[str, Any]) -> None:
        """Take over what another process has found of the same model; see `facts`."""
        self._facts |= told
        for name, value in told.items():
            setattr(self, name, value)

    @property
    def facts(self) -> dict[str, Any]:
        """What takes time to find, for a process that builds the same model later."""
        return {**self._facts, "loss_note": self.loss_note}

    @functools.cached_property
    def tensor_plan(self) -> tensor_plan.TensorPlan:
        """What tensor parallelism may split: the recipe's plan, or what was found and proved."""
        how = self.inputs(min(2, self.plan.recipe.batch)), self.device, self.optimizer_kind
        if self.plan.recipe.tensor_plan is not None:
            return tensor_plan.given(self.bones, self.plan.recipe.tensor_plan, *how)
        return tensor_plan.find(self.bones, *how)

    @functools.cached_property
    def dropout_shapes(self) -> dict[str, list[tuple[int, ...]]]:
        """Shapes of each dropout module's inputs in the whole model, by name and call."""
        shapes: dict[str, list[tuple[int, ...]]] = {}
        with faked(self.bones, self.device) as (model, mode):
            for name, module in model.named_modules():
                if dropout.kind_of(module) is not None:
                    note = functools.partial(_note_shape, shapes, name)
                    module.register_forward_pre_hook(note)
            if any(dropout.kind_of(module) for module in model.modules()):
                inputs = fake_like(self.inputs(1), mode, self.device)
                with mode:
                    model(inputs)
        return shapes

    @functools.cached_property
    def limits(self) -> Limits:
        """What the model and its batch allow."""
        pp_why, tp_why, both_why, units, tensor = "", "", "", [], {}
        try:
            count = min(2, self.plan.recipe.batch)
            units = [u for s in self.cut(1, self.inputs(count), (count,)).stages for u in s.units]
        except LayoutError as error:
            pp_why = str(error)
            units = unit_names(self.bones)
        try:
            tensor, tp_why = self.tensor_plan.sizes, self.tensor_plan.why
            if not self.tensor_plan.inside(units).groups:
                both_why = (
                    "Tensor parallelism would split layers of this model that may lie on two "
                    "stages of a pipeline. Use tp or pp, or put such layers in one module."
                )
        except (LayoutError, RecipeError) as error:
            tp_why = str(error)
        return replace(
            self._batch_limits(),
            units=units,
            pp_why=pp_why,
            tensor=dict(tensor),
            tp_why=tp_why,
            both_why=both_why,
            shard_why=dp_shard.why_not(self.bones, self.optimizer_kind),
            dp_why=dp_replicate.why_not(self.bones),
        )

    def check(self, layout: Layout, ranks: int) -> None:
        """Raises LayoutError for a layout that the model, its batch or the ranks do not allow."""
        if why := why_not(layout, self.limits, ranks):
            raise LayoutError(why)

    def _state_note(self) -> str:
        """What the forward itself writes or draws, as a sentence; "" when nothing was seen."""
        tape = self._tapes.get((True, min(2, self.plan.recipe.batch)))
        if tape is None:
            return ""
        # Of norms more is told elsewhere.
        norms = {n for n, m in self.bones.named_modules() if hasattr(m, "running_mean")}
        changed = tape.changed.intersection(tape.buffers)
        buffers = [name for name in changed if name.rpartition(".")[0] not in norms]
        found = sorted({*buffers, *filter(None, tape.attributes)})
        told = f"The forward changes {', '.join(found[:3])}" if found else ""
        if "" in tape.attributes:
            told = f"{told} and draws" if told else "The forward draws"
            told += " from Python's or NumPy's generator"
        if not told:
            return ""
        return (
            f"{told}, which depends on how the batch is spread and is not moved by a switch unless "
            "it is a buffer: the curve may differ between layouts."
        )

    def _batch_limits(self) -> Limits:
        return Limits(batch=self.plan.recipe.batch, accumulate=self.plan.options.accumulate)


def _note_shape(shapes: dict, name: str, _module: nn.Module, args: tuple) -> None:
    if args and isinstance(args[0], torch.Tensor):
        shapes.setdefault(name, []).append(tuple(args[0].shape))


def _check_params(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raises RecipeError for an optimizer that steps nothing of the model, or needs a closure."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise RecipeError(
            f"{type(optimizer).__name__} runs the model several times in a step, and here a step "
            "is one pass. Use another optimizer, such as AdamW."
        )
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not stepped & {id(p) for p in model.parameters()}:
        raise RecipeError(
            "optimizer(params) holds no parameter of the model. Pass it what it was given: "
            "return torch.optim.SGD(params, lr=0.1)"
        )
