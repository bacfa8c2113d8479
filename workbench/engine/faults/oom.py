"""oom: the process grows until it is killed, as Linux does when memory is used up.

It stops far from the machine's own limit, which others need, and ends itself by the signal that
Linux would send. `allocation` is the other way memory runs out: what is asked for is refused, and
the step raises.
"""

import os
import signal

import torch

from workbench.spec.fault import Fault

HOWS = ("killed", "allocation")
GROWTH_BYTES, PIECE_BYTES = 256 << 20, 16 << 20
NOBODY_HAS_BYTES = 1 << 60


def strike(fault: Fault) -> None:
    """Does not return, or raises RuntimeError as torch does."""
    if fault.how == "allocation":
        torch.empty(NOBODY_HAS_BYTES, dtype=torch.uint8)
    held = [torch.ones(PIECE_BYTES, dtype=torch.uint8) for _ in range(GROWTH_BYTES // PIECE_BYTES)]
    del held
    os.kill(os.getpid(), signal.SIGKILL)
