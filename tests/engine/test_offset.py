"""Clocks of ranks are aligned, to an error that is told."""

from __future__ import annotations

import time

import torch

from tests.engine.procs import ranks
from workbench.engine import offset

AHEAD_S = 1234.5


def _measured(rank: int, apart: bool) -> tuple[float, float]:
    plain = time.perf_counter
    if apart and rank == 1:
        time.perf_counter = lambda: plain() + AHEAD_S
    found = offset.measure(
        rank, 3, torch.device("cpu"), clock_id=(7 if rank == 1 else 5) if apart else None
    )
    return found.seconds, found.error_s


def test_ranks_of_one_machine_share_a_clock():
    assert ranks(3, _measured, False) == [(0.0, 0.0)] * 3


def test_a_rank_with_another_clock_is_told_apart_to_half_a_round_trip():
    first, ahead, last = ranks(3, _measured, True)
    assert first == last == (0.0, 0.0)
    seconds, error_s = ahead
    assert 0 < error_s < 0.1
    assert abs(seconds - AHEAD_S) <= error_s
