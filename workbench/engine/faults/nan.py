"""nan: the loss of one step is no number, or (gradient) its gradient; as by a bad sample or a bit
that flips. What it is poisoned by is the rank's own; the others meet it in what they exchange.
"""

from workbench.engine.here import here
from workbench.spec.fault import Fault

HOWS = ("loss", "gradient")


def strike(fault: Fault) -> None:
    """The next microbatch of this rank is poisoned."""
    if here.trainer is not None:
        has_loss = here.trainer.spread.has_loss
        part = None if has_loss else here.trainer.held.parts[0]
        here.trainer.finite.poison(fault.how or HOWS[0], part)
