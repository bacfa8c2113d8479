"""Finite: losses and gradients that are no numbers are met by all ranks in the same way.

A rank whose loss is not finite makes its gradient so as well: what the ranks sum then tells the
others. Where each holds another part of the gradient, one number is summed before the step is
taken: by a pipeline in the meeting it has anyway, with clipping in the norm. The look at the
gradients is one norm a tensor, a few thousandths of a step (docs/log.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from workbench.errors import RunError

# Updates that are left out one after another: then nothing is learned any more.
MOST_IN_A_ROW = 10


class Finite:
    """What one rank has met in the step under way, and the updates that were left out.

    skips: leave out the update of such a step, instead of stopping before it. group: the ranks that
    train, None for one alone. names: of the whole model's parameters, in its order.
    """

    def __init__(
        self, *, skips: bool, names: Sequence[str], group: dist.ProcessGroup | None
    ) -> None:
        self.skips = skips
        self.names = {name: place for place, name in enumerate(names)}
        self.group = group
        self.loss: float | None = None
        self.in_a_row = 0
        self._poison = ""
        self._skipped: list[dict[str, Any]] = []

    def begin(self) -> None:
        """A step begins."""
        self.loss = None

    def checked(self, loss: Tensor, step: int) -> tuple[Tensor, float]:
        """A microbatch's loss and its value; one that is not finite as the policy has it.

        Raises RunError for it where nothing is skipped. step: the number of the one under way.
        """
        loss = self._poisoned(loss)
        value = loss.item()
        if math.isfinite(value):
            return loss, value
        if not self.skips:
            raise RunError(_stopped(f"loss is {value}", step))
        self.loss = value
        return loss * math.nan, math.nan

    def is_bad(self, grads: Iterable[Tensor | None]) -> bool:
        """Whether this rank has met anything in the step that is not finite."""
        if self.loss is not None:
            return True
        local = [_local(grad) for grad in grads if grad is not None]
        # The norm of a large one may overflow, of numbers that are all finite.
        return not _are_sums_finite(local) and not all(map(_is_finite, local))

    def left_out(self, named: Iterable[tuple[str, nn.Parameter]], step: int) -> None:
        """All ranks have met it, and the step's update is left out.

        Raises RunError, on all of them, where that is not to be, or was too often.
        """
        what = self._what(named)
        if not self.skips:
            raise RunError(_stopped(what, step))
        self.in_a_row += 1
        if self.in_a_row > MOST_IN_A_ROW:
            raise RunError(
                f"{MOST_IN_A_ROW} updates in a row were left out, and at step {step:,} the {what} "
                "again: restore, with a lower learning rate or clip."
            )
        self._skipped.append({"step": step, "cause": what})

    def taken(self) -> None:
        """An update was made."""
        self.in_a_row = 0

    def skipped(self) -> list[dict[str, Any]]:
        """Steps without an update since the last time this was asked, and what was not finite."""
        told, self._skipped = self._skipped, []
        return told

    def poison(self, how: str, part: nn.Module | None) -> None:
        """Let the next loss be no number (`loss`), or only its gradient (`gradient`).

        part: on a rank that sees no loss, the module whose output is taken for it.
        """
        if part is None:
            self._poison = how
            return

        def spoil(_module: nn.Module, _inputs: Any, output: Any) -> Any:
            hook.remove()
            return pytree.tree_map_only(Tensor, lambda one: _spoilt(one, how), output)

        hook = part.register_forward_hook(spoil)

    def _poisoned(self, loss: Tensor) -> Tensor:
        how, self._poison = self._poison, ""
        return _spoilt(loss, how) if how else loss

    def _what(self, named: Iterable[tuple[str, nn.Parameter]]) -> str:
        """What was not finite, as all ranks know it together; collective."""
        first = min(
            (
                self.names.get(name, 0)
                for name, param in named
                if param.grad is not None and not _is_finite(_local(param.grad))
            ),
            default=None,
        )
        told: list[Any] = [(self.loss, first)]
        if self.group is not None:
            told *= dist.get_world_size(self.group)
            dist.all_gather_object(told, (self.loss, first), group=self.group)
        losses = [loss for loss, _ in told if loss is not None]
        if losses:
            return f"loss is {losses[0]}"
        places = [place for _, place in told if place is not None]
        name = next((n for n, place in self.names.items() if places and place == min(places)), "")
        return f"gradient of {name} is not finite" if name else "gradient is not finite"


def _spoilt(value: Tensor, how: str) -> Tensor:
    if not value.is_floating_point():
        return value
    if how == "loss":
        return value * math.nan
    spoilt = value.clone()
    if spoilt.requires_grad:
        spoilt.register_hook(lambda grad: grad * math.nan)
    return spoilt


def _stopped(what: str, step: int) -> str:
    return (
        f"The {what} at step {step:,}. The run stopped with the state of step {step - 1:,}: try a "
        "lower learning rate or clip, or restore; --on-nan skip leaves such updates out."
    )


def _are_sums_finite(grads: list[Tensor]) -> bool:
    if not grads:
        return True
    norms = torch._foreach_norm(grads)
    if len({norm.dtype for norm in norms}) > 1:
        norms = [norm.double() for norm in norms]
    return math.isfinite(torch.stack(list(norms)).sum().item())


def _is_finite(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all())


def _local(grad: Tensor) -> Tensor:
    if isinstance(grad, DTensor):
        return grad.to_local()
    return grad.coalesce().values() if grad.is_sparse else grad
