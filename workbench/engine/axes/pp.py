"""Pipeline parallelism: consecutive layers on consecutive ranks, microbatches in flight.

With one microbatch the ranks take turns: the lecture's model parallelism by layers. Activations go
from stage to stage, their gradients back; the schedules are torch's. Every rank fetches the inputs
of a microbatch for itself, so only what depends on parameters crosses a boundary, and what goes
into torch's schedule as the model's input is the number of the microbatch.

Source: Huang et al. 2019, https://arxiv.org/abs/1811.06965
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    get_schedule_class,
)
from torch.distributed.tensor import DTensor

from workbench.engine.axes.halves import HalvesStage
from workbench.engine.clock import BACKWARD, FORWARD, Clock
from workbench.engine.cut import StagePlan, run
from workbench.engine.micro import Micro, shortened
from workbench.spec.layout import Layout

Enter = Callable[[Micro, int], contextlib.AbstractContextManager]
During = Callable[[str, int], contextlib.AbstractContextManager]


class Stage(HalvesStage):
    """torch's stage, which says what it is about to do with which microbatch.

    during: a context for a kind of work on a microbatch by its number in the round.
    """

    def __init__(self, *args: Any, during: During, **how: Any) -> None:
        super().__init__(*args, **how)
        self._during = during

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **how: Any) -> Any:
        """torch's, once everybody knows the microbatch."""
        with self._during(FORWARD, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **how)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **how: Any) -> Any:
        """torch's: of everything, or of the inputs alone."""
        with self._during(BACKWARD, bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, *args, **how)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **how: Any) -> Any:
        """torch's, in schedules that keep the gradients of weights for later."""
        with self._during(BACKWARD, bwd_chunk_id):
            return super().backward_weight_one_chunk(bwd_chunk_id, *args, **how)


class Pipeline:
    """One step's microbatches through the stages of this rank.

    parts: the rank's copies of the module, one a stage, whose forward this takes over. plans: by
    stage number. enter: a context in which a stage runs forward on a microbatch (precision,
    position of dropout). loss: (output, microbatch) to its weighted part of the step's loss.
    """

    def __init__(  # noqa: PLR0913 - keyword-only
        self,
        parts: Mapping[int, nn.Module],
        plans: Sequence[StagePlan],
        *,
        layout: Layout,
        group: dist.ProcessGroup,
        device: torch.device,
        enter: Enter,
        loss: Callable[[Any, Micro], Tensor],
        clock: Clock,
    ) -> None:
        self.clock = clock
        self.parts = parts
        self.plans = plans
        self.layout = layout
        self.group = group
        self.device = device
        self.enter = enter
        self.loss = loss
        self._micros: Sequence[Micro] = ()
        self._now = 0
        self._whole: Callable[[int, tuple[Tensor, ...]], Any] | None = None
        self._is_last = layout.num_stages - 1 in parts
        for number, part in parts.items():
            part.forward = self._forward(number, partial(run, plans[number], part))
        self._schedule = self._made()

    def _forward(self, number: int, run_stage: Callable) -> Callable:
        is_first, is_last = number == 0, number == self.layout.num_stages - 1

        def forward(*received: Tensor) -> Any:
            if self._whole is not None:
                return self._whole(number, received)
            micro = self._micros[self._now]
            with self.enter(micro, number):
                output = run_stage(micro.inputs, () if is_first else received)
                if not is_last:
                    return output
                return self.loss(shortened(output, micro.count, micro.padded), micro)

        return forward

    def _made(self) -> PipelineScheduleSingle | PipelineScheduleMulti:
        stages = [self._stage(number, part) for number, part in self.parts.items()]
        kind = get_schedule_class(self.layout.order.torch_name)
        # The losses carry their weights: torch must not divide by the number of microbatches.
        how = {"loss_fn": _as_it_is, "scale_grads": False}
        if issubclass(kind, PipelineScheduleSingle):
            return kind(stages[0], self.layout.microbatches, **how)  # pyright: ignore[reportArgumentType]
        return kind(stages, self.layout.microbatches, **how)  # pyright: ignore[reportArgumentType]

    def _stage(self, number: int, part: nn.Module) -> Stage:
        plan = self.plans[number]
        takes = [_like(meta) for meta in plan.takes] or [torch.zeros(1, dtype=torch.int64)]
        gives = [_like(meta) for meta in plan.gives]
        if number == self.layout.num_stages - 1:
            gives = [torch.empty((), device="meta", requires_grad=True)]
        return Stage(
            part,
            number,
            self.layout.num_stages,
            self.device,
            input_args=tuple(takes),
            output_args=tuple(gives),
            group=self.group,
            during=partial(self._during, number),
        )

    def _during(self, number: int, kind: str, index: int) -> contextlib.AbstractContextManager:
        if kind == FORWARD:
            self._now = index
        return self.clock.during(kind, (number, self._micros[index].number))

    def run(self, micros: Sequence[Micro], *, is_last: bool) -> None:
        """Forward and backward of one round of microbatches, of several in a step.

        Raises what a stage raised: the user's own exception, not torch's around it.
        """
        self._micros = micros
        del is_last  # sharded gradients are summed after each round, replicas after the step
        numbers = torch.arange(len(micros))
        args = (numbers,) if 0 in self.parts else ()
        how: dict[str, Any] = {"target": numbers, "losses": []} if self._is_last else {}
        try:
            self._schedule.step(*args, return_outputs=False, **how)
        except RuntimeError as error:
            first = error
            while isinstance(first.__cause__, Exception):
                first = first.__cause__
            if first is error:
                raise
            raise first from None
        finally:
            self._micros = ()

    def through(self, inputs: Any, plans: Sequence[StagePlan]) -> Any:
        """The whole model's output for any inputs, on every rank; plans: the stages for them."""
        self._whole = lambda number, received: run(
            plans[number], self.parts[number], inputs, received
        )
        last = self.layout.num_stages - 1
        output: Any = None
        given: tuple[Tensor, ...] = ()
        try:
            for number in range(self.layout.num_stages):
                if number not in self.parts:
                    continue
                if number > 0 and number - 1 not in self.parts:
                    given = self._received(plans[number], self._peer(number - 1))
                given = self.parts[number](*given)
                if number == last:
                    output = given
                elif number + 1 not in self.parts:
                    for tensor in given:
                        dist.send(tensor.contiguous(), self._peer(number + 1), group=self.group)
        finally:
            self._whole = None
        told = [output]
        dist.broadcast_object_list(told, self._peer(last), group=self.group, device=self.device)
        return told[0]

    def _received(self, plan: StagePlan, source: int) -> tuple[Tensor, ...]:
        tensors = tuple(
            torch.empty(meta.shape, dtype=meta.dtype, device=self.device) for meta in plan.takes
        )
        for tensor in tensors:
            dist.recv(tensor, source, group=self.group)
        return tensors

    def _peer(self, stage: int) -> int:
        return dist.get_global_rank(self.group, self.layout.rank_of_stage(stage))


class Whole(nn.Module):
    """The model as its user knows it, to be called with any inputs; it lies on several ranks.

    Attributes are those of the first of this rank's stages.
    """

    def __init__(self, pipeline: Pipeline, plans_for: Callable[[Any], Sequence[StagePlan]]) -> None:
        super().__init__()
        self.part = next(iter(pipeline.parts.values()))
        self._pipeline = pipeline
        self._plans_for = plans_for

    def forward(self, inputs: Any) -> Any:
        """inputs as the model takes them -> its output, the same on every rank."""
        return self._pipeline.through(inputs, self._plans_for(inputs))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("part"), name)


def sum_tied(params: Sequence[tuple[Tensor, list[int]]], group: dist.ProcessGroup) -> None:
    """Sum the gradients of parameters that several pipeline ranks hold, on each of them alike.

    params: (parameter, ranks of the group that hold it), in the same order on all ranks.
    """
    me = dist.get_rank(group)
    for param, holders in params:
        mine = param.grad if param.grad is not None else torch.zeros_like(param)
        local = _local(mine).contiguous()
        others = [rank for rank in holders if rank != me]
        received = {rank: torch.empty_like(local) for rank in others}
        ops = []
        for rank in others:
            peer = dist.get_global_rank(group, rank)
            ops.append(dist.P2POp(dist.isend, local, peer, group))
            ops.append(dist.P2POp(dist.irecv, received[rank], peer, group))
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        # In the order of the ranks: the same bits everywhere.
        parts = [local if rank == me else received[rank] for rank in holders]
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        _local(mine).copy_(total)
        param.grad = mine


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _as_it_is(output: Tensor, _target: Any) -> Tensor:
    return output


def _like(meta: Tensor) -> Tensor:
    made = torch.empty(meta.shape, dtype=meta.dtype, device="meta")
    return made.requires_grad_(meta.requires_grad)
