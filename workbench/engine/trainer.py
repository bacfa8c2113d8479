"""Trainer: one rank's model, optimizer and data position, and the steps it takes.

It knows nothing of notebooks or slices' senders, nor of strategies. Everything random in a step
follows from (seed, step, sample), and the position in the data from the number of samples taken, so
a step is a function of the state alone and can be redone after any interruption.
"""

from __future__ import annotations

import contextlib
import gc
import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import UninitializedParameter
from torch.profiler import record_function

from workbench.engine import books, state
from workbench.engine.axes import dp_replicate
from workbench.engine.blueprint import Blueprint, Plan
from workbench.engine.clock import DATA, OPTIMIZER
from workbench.engine.data import mixed
from workbench.engine.finite import Finite
from workbench.engine.footprint import Saved, footprint
from workbench.engine.held import Held
from workbench.engine.micro import Micro, moved, padded
from workbench.engine.notes import loss_note, notes
from workbench.engine.recipe import explain
from workbench.engine.spread import Pass, Spread
from workbench.engine.told import is_peer_gone, raised_by_us, raised_by_user
from workbench.engine.world import World
from workbench.errors import InputError, RecipeError
from workbench.spec.layout import Layout
from workbench.spec.records import MARKER


class Trainer:
    """Builds the model under a layout and takes steps."""

    def __init__(self, blueprint: Blueprint, layout: Layout, world: World) -> None:
        self.blueprint, self.plan = blueprint, blueprint.plan
        self.layout, self.world = layout, world
        self.step = self.samples = 0
        self.spread = Spread(blueprint, layout, world)
        self.optimizer = _optimizer(blueprint, self.spread)
        self._uses: dp_replicate.Uses | None = None
        is_ddp = layout.pp == layout.dp_shard == 1 < layout.dp_replicate
        # Until the first step has shown which parameters take part in the loss.
        self._seeks_unused = self._is_ddp = is_ddp and not self.spread.is_idle
        self._pass: Pass | None = None
        self._loss = 0.0
        self._output: Any = None
        self._saved = Saved()
        self.finite = Finite(
            skips=self.plan.options.on_nan == "skip",
            names=blueprint.names,
            group=None if self.spread.is_idle else self.spread.everyone,
        )
        self._num_taken = 0

    @property
    def held(self) -> Held:
        """What this rank holds of the model."""
        return self.spread.held

    def _ready(self) -> Pass:
        """What takes microbatches; made with the first step, when the values are there."""
        if self._pass is None:
            if self._is_ddp:
                # A rank that is new here learns it from the others: buckets in another order in
                # one step would be another sum in its last bits.
                group, is_known = self.spread.group("dp_replicate"), self.blueprint.all_used
                is_known = dp_replicate.any_knows(is_known, group, self.world.device)
                self.blueprint.all_used, self._seeks_unused = is_known, not is_known
            self._pass = self.spread.ready(
                self._enter, self._weighted, seeks_unused=self._seeks_unused
            )
        return self._pass

    def _settle(self, uses: dp_replicate.Uses) -> None:
        """After the first step: stop looking for unused parameters where no rank has any."""
        unused = torch.tensor([len(uses.unused())], device=self.world.device)
        torch.distributed.all_reduce(unused, group=self.spread.group("dp_replicate"))
        uses.close()
        self._uses = None
        if not int(unused):
            self.know_all_used()

    def know_all_used(self) -> None:
        """Do not look for unused parameters, which costs each step a walk of the graph."""
        self.blueprint.all_used = True
        if self._seeks_unused:
            self._pass = None
            gc.collect()  # the old reducer's hooks sit on the parameters

    def notes(self) -> list[str]:
        """What of this model depends on the layout, to be told at the start."""
        told = notes(self.blueprint.bones, self.layout, self.plan.options.accumulate)
        told += filter(None, (self.blueprint.loss_note, self.blueprint.state_note))
        return [*told, *(self.blueprint.tensor_plan.notes if self.layout.tp > 1 else ())]

    def run_steps(
        self, num_steps: int, columns: dict[str, list], *, follows: bool
    ) -> dict[str, Any] | None:
        """Take steps, appending one value a step to each of COLUMNS -> the last step, whole.

        follows: whether they go on from the last ones, with nothing but waiting between.

        Raises what the user's code raises, RunError for a loss that is not finite (the state is
        that before the step), WorldLostError when another rank left.
        """
        for part in self.held.parts:
            part.train()
        self._ready()
        if self._seeks_unused and self._uses is None:
            self._uses = dp_replicate.Uses(self.held.parts[0])
        meter, timer, pages = self.world.meter, self.world.meter.clock.timer, []
        meter.pulse.step = self.step + 1
        try:
            for number in range(num_steps):
                meter.watches = number == num_steps - 1
                marker = record_function(MARKER) if meter.watches else contextlib.nullcontext()
                with marker:
                    pages.append(self._take_step(follows=follows or number > 0))
        finally:
            meter.watches = False
            meter.clock.off()
            books.enter(pages, timer, columns)
        return pages[-1].sample(timer, self.world.offset) if pages else None

    def _take_step(self, *, follows: bool) -> books.Page:
        meter, clock = self.world.meter, self.world.meter.clock
        sent_before = self.world.bytes_sent()
        meter.take()
        clock.begin(follows=follows)
        self._loss = 0.0
        self.finite.begin()
        # Of a stage without one, too: others may finish the step without this rank.
        self.world.meter.pulse.loss(self.step + 1, 0.0)
        rounds = self._rounds()
        for index, places in enumerate(rounds):
            with clock.during(DATA):
                micros = self._micros(index, places)
            self._forward_backward(micros, is_last=index == len(rounds) - 1)
        if self._is_ddp and not self._seeks_unused:
            self._check_all_used()
        self.spread.settle_gradients()
        with clock.during(OPTIMIZER):
            self._update()
        if self._uses is not None:
            self._settle(self._uses)
        ticked = clock.end()
        self.samples += self.plan.recipe.batch
        self.step += 1
        self._num_taken += 1
        ops = meter.take()
        sent_after = self.world.bytes_sent()
        sent = sum(op.num_bytes for op in ops if op.kind != "recv")
        if sent_after is not None:
            sent = sent_after - (sent_before or 0)
        loss = self._loss if self.spread.has_loss else 0.0
        page = books.Page(self.step, loss, sent, ticked, ops if meter.watches else None)
        clock.pulse.finished(self.step, page.at_once(clock.timer))
        return page

    def _rounds(self) -> list[list[tuple[int, int]]]:
        """Microbatches that are under way together: all of a pipeline's, else one at a time."""
        size = self.layout.microbatches
        places = self.spread.micros
        return [places[first : first + size] for first in range(0, len(places), size)]

    def _micros(self, index: int, places: list[tuple[int, int]]) -> list[Micro]:
        first = index * self.layout.microbatches
        return [self._micro(first + n, *place) for n, place in enumerate(places)]

    def _micro(self, number: int, offset: int, count: int) -> Micro:
        recipe, first = self.plan.recipe, self.samples + offset
        inputs, target = recipe.samples.fetch(first, count)
        if self.world.device.type != "cpu":
            inputs, target = moved(inputs, self.world.device), moved(target, self.world.device)
        length = self.spread.padded or count
        # The axes average over their ranks; weighted so, the average is the mean over samples.
        weight = count / recipe.batch * self.layout.dp
        inputs = padded(inputs, count, length)
        return Micro(first, count, weight, inputs, target, length, number)

    @contextlib.contextmanager
    def _enter(self, micro: Micro, stage: int) -> Iterator[None]:
        """A forward pass of a microbatch: its precision, and where its random numbers begin."""
        before = self.spread.drawn_before(stage)
        self.spread.draw.put((self.step, micro.first, micro.count, micro.padded, before))
        # What is no module (functional dropout) draws by this; the same on tensor-parallel ranks.
        seed = mixed("step", self.plan.recipe.seed, self.step, micro.first, stage)
        # torch.manual_seed would take a millisecond: it asks every kind of accelerator in turn.
        torch.default_generator.manual_seed(seed)
        if self.world.device.type != "cpu":
            torch.get_device_module(self.world.device).manual_seed(seed)
        with self._precision(), self.spread.draw.active():
            yield

    def _forward_backward(self, micros: list[Micro], *, is_last: bool) -> None:
        self._output = None
        try:
            with self._watched():
                self._ready().run(micros, is_last=is_last)
        except Exception as error:
            if self.step == 0 and not is_peer_gone(error):
                batch = micros[0].inputs, micros[0].target
                if not raised_by_user(error) and not raised_by_us(error):
                    told = explain(error, self.plan.recipe, batch, self._output)
                    if told is not None:
                        raise told from error
            raise
        finally:
            self._output = None

    def _watched(self) -> contextlib.AbstractContextManager:
        """In the second step, which is as all that follow, what autograd keeps is counted."""
        return self._saved.watching() if self._num_taken == 1 else contextlib.nullcontext()

    def _weighted(self, output: Any, micro: Micro) -> Tensor:
        """The microbatch's part of the step's loss."""
        self._output = output
        loss = self.plan.recipe.loss(output, micro.target)
        loss, value = self.finite.checked(loss, self.step + 1)
        self._output = None
        self._loss += value * micro.count / self.plan.recipe.batch
        if self.spread.has_loss:
            self.world.meter.pulse.loss(self.step + 1, self._loss)
        return loss * micro.weight

    def _check_all_used(self) -> None:
        """Raises RecipeError for a parameter without gradient that the first step had used."""
        missing = [n for n, p in self.held.named_parameters() if p.requires_grad and p.grad is None]
        if missing:
            raise RecipeError(
                f"{', '.join(missing[:3])} took no part in the loss of step {self.step + 1:,}, but "
                "did before. Give each parameter a part in every step on every rank."
            )

    def _precision(self) -> contextlib.AbstractContextManager:
        dtype = self.blueprint.precision_dtype
        if dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.world.device.type, dtype=dtype)

    def _update(self) -> None:
        if self._is_bad():
            self.finite.left_out(self.held.named_parameters(), self.step + 1)
            self.optimizer.zero_grad(set_to_none=True)
            return
        lr = self.plan.recipe.lr
        if callable(lr):
            for group in self.optimizer.param_groups:
                group["lr"] = lr(self.step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.finite.taken()

    def _is_bad(self) -> bool:
        """Whether the step's loss or gradient is not finite, on any rank; clips where it is."""
        clip = self.plan.options.clip
        if clip is not None and self.layout.pp == 1:
            return not math.isfinite(self.spread.clip(clip))  # a norm over all ranks
        params = [param for _, param in self.held.named_parameters()]
        is_bad = self.spread.agree(self.finite.is_bad(param.grad for param in params))
        if not is_bad and clip is not None:
            self.spread.clip(clip)
        return is_bad

    def evaluate(self) -> dict[str, float]:
        """The recipe's metrics, computed alike on every rank; {} for a recipe without."""
        recipe = self.plan.recipe
        if recipe.evaluate is None or self.spread.is_idle:
            return {}
        for part in self.held.parts:
            part.eval()
        try:
            with seeded(recipe.seed), torch.no_grad():
                return recipe.evaluate(self.spread.whole(self._ready()))
        finally:
            state.reshard(self.held)

    def memory(self) -> dict[str, int | None]:
        """Bytes of this rank by what they are for."""
        return footprint(self.held, self.optimizer, self._saved if self._num_taken > 1 else None)

    def shown(self) -> dict[str, Any]:
        """How the training lies on this rank, as plain values; held: of all parameters, 0 to 1."""
        return {
            "notes": self.notes(),
            "stages": self.spread.stages_shown(),
            "held": self.held.num_elements() / self.num_parameters(),
        }

    def num_parameters(self) -> int:
        """Parameters of the whole model."""
        return sum(self.blueprint.sizes.values())


def first_trainer(plan: Plan, layout: Layout, world: World) -> Trainer:
    """A training at its beginning: the whole model made from the seed, then laid out.

    Raises RecipeError, and LayoutError for a layout that does not fit model, batch or ranks.
    """
    with seeded(plan.recipe.seed):
        model = plan.recipe.model()
    _check_made(model)
    blueprint = Blueprint(plan, model, world.device)
    _check_same(blueprint, world)
    most = plan.recipe.samples.length
    if plan.options.batch is not None and most is not None and plan.options.batch > most:
        raise InputError(
            f"batch={plan.options.batch} is more than the {most:,} samples of the data. "
            f"Use at most {most}."
        )
    blueprint.share(world)
    blueprint.check(layout, world.size)
    if world.rank == 0:
        with seeded(plan.recipe.seed), world.meter.alone():
            blueprint.loss_note = loss_note(plan.recipe, model)
    trainer = Trainer(blueprint, layout, world)
    state.fill(trainer.held, model)
    return trainer


def _check_made(model: torch.nn.Module) -> None:
    """Raises RecipeError for parameters that get their shape with the first input."""
    lazy = [n for n, p in model.named_parameters() if isinstance(p, UninitializedParameter)]
    if lazy:
        raise RecipeError(
            f"{lazy[0]} has no shape before the first input (nn.Lazy...). Give the sizes: "
            "nn.Linear(16, 4) instead of nn.LazyLinear(4)."
        )


def _check_same(blueprint: Blueprint, world: World) -> None:
    """Raises RecipeError, on all ranks, when one made something else than rank 0."""
    recipe = blueprint.plan.recipe
    every: list[Any] = [None] * world.size
    mine = state.digest(blueprint.bones), recipe.samples.length, recipe.batch
    torch.distributed.all_gather_object(every, mine)
    for rank, found in enumerate(every):
        for what, value, first in zip(("model", "data", "batch"), found, every[0], strict=True):
            if value != first:
                raise RecipeError(
                    f"Rank {rank} has another {what} than rank 0. A recipe must give the same on "
                    "all ranks: do not let it depend on `rank`."
                )


def _optimizer(blueprint: Blueprint, spread: Spread) -> torch.optim.Optimizer:
    """The recipe's optimizer with this rank's parameters, in the groups of the whole model.

    It is made from the whole list, with empty ones in the place of what other ranks hold, so that
    a recipe that groups by place or shape gives the same groups on every stage.
    """
    mine = dict(spread.held.named_parameters())
    bones = dict(blueprint.bones.named_parameters())
    every = [mine.get(name, bones[name]) for name in blueprint.names]
    optimizer = blueprint.plan.recipe.optimizer(iter(every))
    held = set(mine.values())
    for group in optimizer.param_groups:
        group["params"] = [param for param in group["params"] if param in held]
    return optimizer


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
