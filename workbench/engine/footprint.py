"""Footprint: what of a rank's memory is what.

Parameters, gradients and optimizer state follow from their sizes. Activations are what the forward
passes keep for the backward ones: each tensor is counted when autograd saves it and until it is let
go, its memory once, so that microbatches in flight and recomputation show. What a block keeps when
it runs again on the way back counts too.
"""

from __future__ import annotations

import resource
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer
from torch.utils import checkpoint

from workbench.engine.held import Held
from workbench.engine.metered_group import payload_bytes
from workbench.engine.shards import memory_of


class Saved:
    """Counts what autograd keeps while `watching` is entered. peak_bytes: the most at one time."""

    def __init__(self) -> None:
        self.now_bytes = self.peak_bytes = 0
        self._uses: dict[int, int] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A context for a step."""
        with saved_tensors_hooks(self._pack, lambda kept: kept.tensor), self._recomputations():
            yield

    @contextmanager
    def _recomputations(self) -> Iterator[None]:
        """Counts what torch's checkpoint keeps on the way back, where its hooks hide it from ours.

        Of nested hooks torch calls the innermost alone.
        """
        count, before = self._count, getattr(checkpoint, "_recomputation_hook", None)
        if before is None:  # another torch: its steps go on, and a test tells of the figure
            yield
            return

        class Counted(before):
            def __init__(self, *args: Any) -> None:
                super().__init__(*args)
                keep = self.pack_hook

                def pack(tensor: Tensor) -> Any:
                    # What checkpoint keeps is this object, which it has no cause to detach again.
                    kept = tensor.detach()
                    count(tensor, kept)
                    return keep(kept)

                self.pack_hook = pack

        checkpoint._recomputation_hook = Counted
        try:
            yield
        finally:
            checkpoint._recomputation_hook = before

    def _pack(self, tensor: Tensor) -> Any:
        kept = _Kept(tensor)
        self._count(tensor, kept)
        return kept

    def _count(self, tensor: Tensor, keeper: object) -> None:
        """Until the keeper goes the tensor's memory is kept; that of parameters is not counted."""
        if tensor.is_sparse or isinstance(tensor, nn.Parameter):
            return
        if isinstance(tensor._base, nn.Parameter):
            return
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        if key not in self._uses:
            self._uses[key] = 0
            self.now_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.now_bytes)
        self._uses[key] += 1
        weakref.finalize(keeper, self._let_go, key, num_bytes)

    def _let_go(self, key: int, num_bytes: int) -> None:
        self._uses[key] -= 1
        if not self._uses[key]:
            del self._uses[key]
            self.now_bytes -= num_bytes


class _Kept:
    """A tensor that autograd keeps; goes when the graph does."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def footprint(held: Held, optimizer: Optimizer, saved: Saved | None) -> dict[str, int | None]:
    """Bytes by what they are for; activations None before a step was watched."""
    params = list(held.named_parameters())
    sizes = [(payload_bytes(memory_of(param)), param.requires_grad) for _, param in params]
    kept = [x for state in optimizer.state.values() for x in state.values()]
    return {
        "parameters": sum(size for size, _ in sizes),
        "gradients": sum(size for size, is_trained in sizes if is_trained),
        "optimizer": sum(payload_bytes(memory_of(x)) for x in kept if isinstance(x, Tensor)),
        "activations": None if saved is None else saved.peak_bytes,
        "resident": resident_bytes(),
    }


def resident_bytes() -> int:
    """The most this process has had: of the accelerator's memory where there is one."""
    if torch.accelerator.is_available():
        return torch.accelerator.max_memory_reserved()
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most << 10
