"""drop-link: the rank's connections to the others are shut, as by a switch or cable that fails."""

from workbench.engine.here import here
from workbench.spec.fault import Fault

HOWS = ("",)


def strike(fault: Fault) -> None:
    """What the ranks exchange next raises, here and at the others."""
    del fault
    if here.world is not None:
        here.world.free()
