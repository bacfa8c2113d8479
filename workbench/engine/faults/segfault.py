"""segfault: the process reads memory that is not its own, as a faulty kernel or extension does."""

import ctypes
import resource

from workbench.spec.fault import Fault

HOWS = ("",)


def strike(fault: Fault) -> None:
    """Does not return, and leaves no core file."""
    del fault
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.string_at(0)
