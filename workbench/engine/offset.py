"""Offset: how far this rank's clock is from that of rank 0.

Processes of one machine read the same monotonic clock. Between machines rank 0 sends its time on
request; the round that took least tells the offset to half of what it took.

Source: Mills 1991, "Internet Time Synchronization", https://doi.org/10.1109/26.103043
"""

from __future__ import annotations

import hashlib
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

ROUNDS = 16
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Offset:
    """perf_counter() - seconds is the time of rank 0, give or take error_s."""

    seconds: float
    error_s: float


def measure(rank: int, size: int, device: torch.device, *, clock_id: int | None = None) -> Offset:
    """The offset of this rank; collective. clock_id: the same on ranks that share a clock."""
    mine = _own_clock() if clock_id is None else clock_id
    every = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size)]
    dist.all_gather(every, torch.tensor([mine], dtype=torch.int64, device=device))
    clocks = [int(one) for one in every]
    found = Offset(0.0, 0.0)
    for peer in range(1, size):
        if clocks[peer] != clocks[0] and rank in (0, peer):
            if rank == 0:
                _answer(peer, device)
            else:
                found = _asked(device)
    return found


def _asked(device: torch.device) -> Offset:
    """Ask rank 0 for its time, several times, and keep what came back soonest."""
    best = Offset(0.0, float("inf"))
    answer = torch.zeros(1, dtype=torch.float64, device=device)
    for _ in range(ROUNDS):
        asked_s = time.perf_counter()
        dist.send(answer, 0)
        dist.recv(answer, 0)
        theirs_s = answer.item()
        came_s = time.perf_counter()
        if (half_s := (came_s - asked_s) / 2) < best.error_s:
            best = Offset(asked_s + half_s - theirs_s, half_s)
    return best


def _answer(peer: int, device: torch.device) -> None:
    asked = torch.zeros(1, dtype=torch.float64, device=device)
    for _ in range(ROUNDS):
        dist.recv(asked, peer)
        dist.send(torch.tensor([time.perf_counter()], dtype=torch.float64, device=device), peer)


def _own_clock() -> int:
    """A number for the boot of this machine: its monotonic clock starts there."""
    boot = BOOT_ID.read_text() if BOOT_ID.exists() else ""
    digest = hashlib.blake2b(f"{socket.gethostname()} {boot}".encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little", signed=True)
