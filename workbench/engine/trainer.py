"""Trainer: one rank's model, optimizer and data position, and the steps it takes.

It knows nothing of notebooks or slices' senders. Everything random in a step follows from
(seed, step, rank), and the position in the data from the number of samples taken, so a step is a
function of the state alone and can be redone after any interruption.
"""

from __future__ import annotations

import contextlib
import gc
import math
import random
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from workbench.engine import axes
from workbench.engine.data import shares
from workbench.engine.recipe import Recipe, explain
from workbench.engine.world import World
from workbench.errors import RecipeError, RunError, WorldLostError
from workbench.spec.layout import Layout
from workbench.spec.options import TrainOptions
from workbench.spec.records import COLUMNS

# How torch tells that a peer went away or did not come; gloo, then NCCL.
PEER_GONE = ("Connection closed by peer", "Connection reset", "Timed out waiting", "pair closure")


@dataclass(frozen=True)
class Plan:
    """What stays the same for one training whatever its world: recipe, options."""

    recipe: Recipe
    options: TrainOptions


class Trainer:
    """Builds the model under a layout and takes steps; `model` is the user's module, unwrapped."""

    def __init__(self, plan: Plan, layout: Layout, world: World) -> None:
        self.plan = plan
        self.layout = layout
        self.world = world
        self.step = 0
        self.samples = 0
        self._uses: axes.Uses | None = None
        recipe, options = plan.recipe, plan.options
        all_shares = shares(recipe.batch, layout.dp, options.accumulate)
        self.microbatches = all_shares[world.rank]
        with seeded(recipe.seed):
            self.model = recipe.model().to(world.device)
        self._trained = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        self._axes = axes.used(layout)
        # Until the first step has shown which parameters take part in the loss.
        self._seeks_unused = layout.dp_replicate > 1
        self._wrapped = self._spread()
        self.optimizer = recipe.optimizer(self.model.parameters())
        _check_params(self.optimizer, self.model)
        # DDP's reducer waits for its buckets in C++, out of the meter's sight.
        self._waits_in_reducer = isinstance(self._wrapped, DistributedDataParallel)

    def _spread(self) -> nn.Module:
        wrapped = self.model
        for axis in self._axes:
            wrapped = axis.spread(wrapped, self.world, seeks_unused=self._seeks_unused)
        return wrapped

    def _settle(self, uses: axes.Uses) -> None:
        """After the first step: stop looking for unused parameters where no rank has any.

        The look costs each step a walk of the graph, and is decided by all ranks together.
        """
        unused = torch.tensor([len(uses.unused())], device=self.world.device)
        torch.distributed.all_reduce(unused)
        uses.close()
        self._uses = None
        if not int(unused):
            self._seeks_unused = False
            del self._wrapped
            gc.collect()  # the old reducer's hooks sit on the parameters
            self._wrapped = self._spread()

    def notes(self) -> list[str]:
        """What of this model depends on the number of ranks, to be told at the start."""
        if self.layout.dp == 1:
            return []
        kinds = {type(part).__name__ for part in self.model.modules()}
        told = []
        if any("BatchNorm" in kind and "Sync" not in kind for kind in kinds):
            told.append("BatchNorm takes its statistics from each rank's share of the batch")
        if any("Dropout" in kind for kind in kinds):
            told.append("Dropout draws other masks at another number of ranks")
        return told

    def run_steps(
        self, num_steps: int, columns: dict[str, list], *, since_s: float | None
    ) -> float:
        """Take steps, appending one value a step to each of COLUMNS; returns when it ended.

        since_s: the end of the step before, on the clock of perf_counter, if this goes on from it.

        Raises what the user's code raises, RunError for a loss that is not finite (the state is
        that before the step), WorldLostError when another rank left.
        """
        self._wrapped.train()
        if self._seeks_unused and self._uses is None:
            self._uses = axes.Uses(self.model)
        ended_s = since_s or time.perf_counter()
        for _ in range(num_steps):
            ended_s = self._take_step(ended_s, columns)
        return ended_s

    def _take_step(self, began_s: float, columns: dict[str, list]) -> float:
        meter = self.world.meter
        meter.take()
        sent_before = self.world.bytes_sent()
        loss = data_s = busy_s = launch_to_end_s = 0.0
        done_s = began_s
        for index, (offset, count) in enumerate(self.microbatches):
            before_s = time.perf_counter()
            inputs, target = self._fetch(self.samples + offset, count)
            fetched_s = time.perf_counter()
            self._reseed(index)
            with self._without_sync(index):
                loss += self._forward_backward(inputs, target, count)
            done_s = time.perf_counter()
            data_s += fetched_s - before_s
            busy_s += done_s - fetched_s
            if self._waits_in_reducer and meter.last_launch_s > fetched_s:
                launch_to_end_s += done_s - meter.last_launch_s
        if not self._seeks_unused:
            self._check_all_used()
        self._update()
        if self._uses is not None:
            self._settle(self._uses)
        ended_s = time.perf_counter()
        busy_s += ended_s - done_s
        self.samples += self.plan.recipe.batch
        self.step += 1
        held_s, payload_bytes, _ = meter.take()
        held_s += launch_to_end_s
        sent_after = self.world.bytes_sent()
        sent = payload_bytes if sent_after is None else sent_after - (sent_before or 0)
        # An accelerator runs behind the host, whose clock says nothing of what the step waited for.
        comm_s = held_s if self.world.device.type == "cpu" else None
        values = (loss, ended_s - began_s, busy_s - (comm_s or 0.0), comm_s, data_s, sent)
        for name, value in zip(COLUMNS, values, strict=True):
            columns[name].append(value)
        return ended_s

    def _fetch(self, first: int, count: int) -> tuple[Any, Any]:
        inputs, target = self.plan.recipe.samples.fetch(first, count)
        if self.world.device.type == "cpu":
            return inputs, target
        return moved(inputs, self.world.device), moved(target, self.world.device)

    def _reseed(self, index: int) -> None:
        """Dropout draws the same numbers when a step is redone, on this number of ranks."""
        where = (self.step * self.world.size + self.world.rank) * len(self.microbatches) + index
        seed = (self.plan.recipe.seed * 1_000_003 + where) % 2**63
        # torch.manual_seed would take a millisecond: it asks every kind of accelerator in turn.
        torch.default_generator.manual_seed(seed)
        if self.world.device.type != "cpu":
            torch.get_device_module(self.world.device).manual_seed(seed)

    def _without_sync(self, index: int) -> contextlib.AbstractContextManager:
        """All microbatches but the last leave their gradients on the rank."""
        if index == len(self.microbatches) - 1 or not self._axes:
            return contextlib.nullcontext()
        return self._axes[0].without_sync(self._wrapped)

    def _forward_backward(self, inputs: Any, target: Any, count: int) -> float:
        """One microbatch; returns its part of the mean loss over the global batch."""
        recipe, batch = self.plan.recipe, (inputs, target)
        output = None
        try:
            with self._precision():
                output = self._wrapped(inputs)
                loss = recipe.loss(output, target)
        except Exception as error:
            if self.step == 0 and not is_peer_gone(error):
                told = None if raised_by_user(error) else explain(error, recipe, batch, output)
                if told is not None:
                    raise told from error
            raise
        share = count / recipe.batch
        value = loss.item() * share
        if not math.isfinite(value):
            raise RunError(
                f"The loss is {loss.item()} at step {self.step + 1:,}. The run stopped with the "
                f"state of step {self.step:,}: try a lower learning rate or clip, or restore."
            )
        # The axes average over their ranks; weighted so, the average is the mean over samples.
        (loss * (share * self.layout.dp)).backward()
        return value

    def _check_all_used(self) -> None:
        """Raises RecipeError for a parameter without gradient that the first step had used."""
        if not self._waits_in_reducer:
            return
        missing = [name for name, param in self._trained if param.grad is None]
        if missing:
            raise RecipeError(
                f"{', '.join(missing[:3])} took no part in the loss of step {self.step + 1:,}, but "
                "did before. Give each parameter a part in every step, or train with --shard."
            )

    def _precision(self) -> contextlib.AbstractContextManager:
        if self.plan.options.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.world.device.type, dtype=torch.bfloat16)

    def _update(self) -> None:
        if self.plan.options.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.plan.options.clip)
        lr = self.plan.recipe.lr
        if callable(lr):
            for group in self.optimizer.param_groups:
                group["lr"] = lr(self.step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def evaluate(self) -> dict[str, float]:
        """The recipe's metrics, computed alike on every rank; {} for a recipe without."""
        recipe = self.plan.recipe
        if recipe.evaluate is None:
            return {}
        self.model.eval()
        try:
            with seeded(recipe.seed), torch.no_grad():
                return recipe.evaluate(self.model)
        finally:
            self.model.train()

    def num_parameters(self) -> int:
        """Parameters of the whole model."""
        return sum(param.numel() for param in self.model.parameters())


def _check_params(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raises RecipeError for an optimizer that steps nothing of the model."""
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not stepped & {id(p) for p in model.parameters()}:
        raise RecipeError(
            "optimizer(params) holds no parameter of the model. Pass it what it was given: "
            "return torch.optim.SGD(params, lr=0.1)"
        )


def raised_by_user(error: BaseException) -> bool:
    """Whether the exception was raised in so many words, not found by torch."""
    frames = traceback.extract_tb(error.__traceback__)
    last = (frames[-1].line or "") if frames else ""
    return last.lstrip().startswith(("raise", "assert"))


def is_peer_gone(error: BaseException) -> bool:
    """Whether a collective failed because another rank left or did not come."""
    return isinstance(error, WorldLostError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in PEER_GONE)
    )


def moved(value: Any, device: torch.device) -> Any:
    """Tensors in nested tuples, lists and dicts, moved to the device."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, (tuple, list)):
        return type(value)(moved(item, device) for item in value)
    if isinstance(value, dict):
        return {key: moved(item, device) for key, item in value.items()}
    return value


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Every generator a model may draw its first parameters from, seeded and put back."""
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
