"""stall: the rank does not go on, but is there: stopped (SIGSTOP), or in a loop without an end.

A process that is stopped goes on with SIGCONT, which the notebook sends after `--for`, or with
`%dist_fault clear`. The loop ends after `--for`, or with an interrupt, as one in a user's code.
"""

import os
import signal
import time

from workbench.spec.fault import Fault

HOWS = ("stop", "loop")


def strike(fault: Fault) -> None:
    """Returns when it is over."""
    if fault.how != "loop":
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    until_s = None if fault.for_s is None else time.monotonic() + fault.for_s
    while until_s is None or time.monotonic() < until_s:
        pass
