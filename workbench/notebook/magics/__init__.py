"""The magics, a file a topic: each reads its line, makes one call of the Python API, shows it."""

from __future__ import annotations

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics

from workbench.notebook.shown import Shown


class Commands(Magics):
    """Magics that show what they return once, themselves."""

    def __init__(self, shell: InteractiveShell, shown: Shown) -> None:
        super().__init__(shell)
        self.shown = shown


def all_commands() -> tuple[type[Commands], ...]:
    """The classes to register."""
    from workbench.notebook.magics.attach import AttachMagics
    from workbench.notebook.magics.audit import AuditMagics
    from workbench.notebook.magics.engines import EngineMagics
    from workbench.notebook.magics.export import ExportMagics
    from workbench.notebook.magics.fault import InjectionMagics
    from workbench.notebook.magics.faults import FaultMagics
    from workbench.notebook.magics.on_ranks import CellMagics
    from workbench.notebook.magics.run import RunMagics
    from workbench.notebook.magics.trace import TraceMagics
    from workbench.notebook.magics.train import TrainMagics

    return (
        EngineMagics,
        AttachMagics,
        TrainMagics,
        RunMagics,
        ExportMagics,
        TraceMagics,
        CellMagics,
        FaultMagics,
        InjectionMagics,
        AuditMagics,
    )
