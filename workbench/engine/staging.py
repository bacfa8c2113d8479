"""Staging: host memory that a rank copies its share of a checkpoint into, to be written from.

The training stands still for the copy alone. The memory is kept from save to save: the first touch
of fresh pages costs several times the copy itself. On an accelerator it is pinned.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Mapping

import torch
from torch import Tensor

from workbench.engine import share as shares
from workbench.engine.share import Held, Share
from workbench.engine.state import Piece
from workbench.errors import CheckpointError
from workbench.spec.formats import size

# Memory that is so much larger than what is needed is let go, as after a switch.
MOST_SPARE = 2


class Staging:
    """The memory of one rank, and the last plan: the next save has the same one, mostly.

    To be filled again only once the save before is written.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._planned: tuple[tuple[int, int], Held] | None = None
        self._share: Share | None = None

    def knows(self, place: tuple[int, int], held: Held) -> bool:
        """Whether the last plan was made for what this rank holds now, at this (rank, size)."""
        return self._planned == (place, held)

    @property
    def share(self) -> Share:
        """This rank's share of the last plan."""
        assert self._share is not None
        return self._share

    def keep(self, place: tuple[int, int], held: Held, share: Share) -> Share:
        """Remember a plan that all ranks have made."""
        self._planned, self._share = (place, held), share
        return share

    def forget(self) -> None:
        """A plan that not all ranks made must not be used again."""
        self._planned = self._share = None

    def fill(self, share: Share, pieces: Mapping[str, Piece]) -> Tensor:
        """Copy what this rank writes -> the data of its file, uint8 [data_bytes].

        Raises CheckpointError where memory is short.
        """
        device = next((piece.local.device for piece in pieces.values()), torch.device("cpu"))
        memory = self._room(share.data_bytes, pinned=device.type == "cuda")
        with torch.no_grad():
            for part in share.parts:
                source = shares.local(part, pieces)
                place = memory[part.begin : part.end].view(source.dtype).view(source.shape)
                place.copy_(source, non_blocking=True)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return memory

    def _room(self, num_bytes: int, *, pinned: bool) -> Tensor:
        if not num_bytes <= self._memory.numel() <= MOST_SPARE * num_bytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # before the new one is made
            try:
                self._memory = _pinned(num_bytes) if pinned else _pages(num_bytes)
            except (MemoryError, OSError, RuntimeError) as error:
                raise CheckpointError(
                    f"A save needs {size(num_bytes)} of host memory for the copy that is "
                    "written, and there is not so much. Use more ranks, or shard the training."
                ) from error
        return self._memory[:num_bytes]


def _pinned(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def _pages(num_bytes: int) -> Tensor:
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    pages = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without
            pages.madvise(mmap.MADV_HUGEPAGE)  # fewer faults at the first touch
    return torch.frombuffer(pages, dtype=torch.uint8)
