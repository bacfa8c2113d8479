"""slow: the rank takes longer in each step from then on, as a node that throttles or shares."""

import time

from workbench.spec.fault import Fault

HOWS = ("",)
LASTS = True
USUAL_S = 0.05


def strike(fault: Fault) -> None:
    """Once a step, until it is cleared."""
    time.sleep(fault.for_s or USUAL_S)


def undo() -> None:
    """Nothing is left of it."""
