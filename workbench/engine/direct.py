"""Direct: microbatches one after another through a model that is not cut along its layers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from workbench.engine.clock import BACKWARD, COMM, FORWARD
from workbench.engine.metered_group import Meter
from workbench.engine.micro import Micro

Enter = Callable[[Micro, int], contextlib.AbstractContextManager]
WithoutSync = Callable[[nn.Module], contextlib.AbstractContextManager]


class Direct:
    """Forward and backward of the module.

    loss: (output, microbatch) to its weighted part of the step's loss. without_sync: a context
    that leaves gradients on the rank.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        enter: Enter,
        loss: Callable[[Any, Micro], Tensor],
        without_sync: WithoutSync | None,
        meter: Meter,
    ) -> None:
        self.module = module
        self.enter = enter
        self.loss = loss
        self.without_sync = without_sync
        self.meter = meter
        # DDP's reducer waits for its buckets in C++, out of the meter's sight.
        self._waits_in_reducer = isinstance(module, DistributedDataParallel)

    def run(self, micros: Sequence[Micro], *, is_last: bool) -> None:
        """is_last: no others follow in this step, so that gradients are synchronised."""
        clock = self.meter.clock
        for index, micro in enumerate(micros):
            stays = self.without_sync is not None and not (is_last and index == len(micros) - 1)
            with self.without_sync(self.module) if stays else contextlib.nullcontext():  # pyright: ignore[reportOptionalCall]
                with clock.during(FORWARD, (0, micro.number)), self.enter(micro, 0):
                    loss = self.loss(self.module(micro.inputs), micro)
                before = clock.enter(BACKWARD, (0, micro.number))
                num_ops = len(self.meter.ops)
                loss.backward()
                if self._waits_in_reducer and len(self.meter.ops) > num_ops:
                    # After the last bucket's launch there is nothing left to compute.
                    clock.since_last_mark(COMM, tuple(self.meter.ops[num_ops:]))
                clock.back(before)
