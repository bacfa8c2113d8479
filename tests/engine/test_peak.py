"""What ranks can do at most is measured for as many as train, and one busy moment is not it."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest
import torch

from tests.engine.procs import ranks
from workbench.engine import flops

CPU = torch.device("cpu")
ON_LINUX = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores are chosen")


def _peak(rank: int, dtype: torch.dtype) -> tuple[float, float]:
    began_s = time.perf_counter()
    return flops.peak_per_s(CPU, dtype, is_active=True), time.perf_counter() - began_s


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_peak_is_of_this_device(dtype):
    """A CPU that computes bfloat16 by hand takes 0.2 s for a product of the largest size."""
    ((peak, took_s),) = ranks(1, _peak, dtype)
    assert 1e7 < peak < 1e15
    assert took_s < 2


def _stopped_meanwhile(rank: int) -> float:
    if rank == 1:
        # Stopped as the first window begins, and for most of it.
        again = f"sleep 0.02; kill -{signal.SIGSTOP:d} $0; sleep 0.03; kill -{signal.SIGCONT:d} $0"
        subprocess.Popen(["sh", "-c", again, str(os.getpid())])
    return flops.peak_per_s(CPU, torch.float32, is_active=True)


def test_equal_ranks_have_the_same_peak_though_one_was_disturbed():
    undisturbed, disturbed = ranks(2, _stopped_meanwhile)
    assert undisturbed == disturbed > 0


def _one_of_four_and_all(rank: int) -> tuple[float, float]:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    one, every = 0.0, 0.0
    for _ in range(2):  # other processes may want the core, too
        one = max(one, flops.peak_per_s(CPU, torch.float32, is_active=rank == 0))
        every = max(every, flops.peak_per_s(CPU, torch.float32, is_active=True))
    return one, every


@ON_LINUX
def test_ranks_share_a_core_and_one_alone_has_it_all():
    told = ranks(4, _one_of_four_and_all)
    assert [one for one, _ in told[1:]] == [0, 0, 0]
    assert len({every for _, every in told}) == 1
    alone, quarter = told[0]
    assert 0.5 < alone / (4 * quarter) < 2
