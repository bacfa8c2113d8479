"""%dist_fault: have something go wrong on a rank, to see what follows."""

from __future__ import annotations

import re
from typing import Any

from IPython.core.magic import line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments

from workbench.driver import current
from workbench.errors import InputError
from workbench.notebook.line import from_line, whole, word
from workbench.notebook.magics import Commands
from workbench.notebook.show import Table
from workbench.spec.fault import PHASES, kinds

COLUMNS = ("kind", "rank", "step", "phase", "how", "for_s", "state")
CLEAR = "clear"
OPTIONS = {"rank": "rank", "at_step": "at-step", "phase": "phase", "how": "how", "for_s": "for"}
UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "min": 60.0}


@magics_class
class InjectionMagics(Commands):
    """Break something."""

    @magic_arguments()
    @argument("kind", nargs="?", type=word, help=f"{', '.join(kinds())}; or {CLEAR}")
    @argument("--rank", type=whole, metavar="N", help="which (the last that trains)")
    @argument("--at-step", type=whole, metavar="N", help="in this step (the next)")
    @argument("--phase", type=word, help=f"as it begins: {', '.join(PHASES)} (forward)")
    @argument(
        "--how", type=word, help="stall: stop or loop; nan: loss or gradient; oom: allocation"
    )
    @argument(
        "--for",
        dest="for_s",
        type=word,
        metavar="TIME",
        help="stall: how long, such as 5s; slow: in each step (50ms)",
    )
    @line_magic
    @from_line
    def dist_fault(self, options: Any) -> Any:
        """Have a rank of the training fail, stall, slow down or go wrong, once, at a step.

        Example::

            %dist_fault kill --rank 2 --at-step 100

        Alone it lists what waits and what has struck.

        Example::

            %dist_fault clear

        Returns a list of dicts, shown as a table.
        In Python: ``run.inject("kill", rank=2, at_step=100)``, ``run.clear_faults()``
        """
        run = current.run()
        if options.kind == CLEAR:
            for name, typed in OPTIONS.items():
                if getattr(options, name) is not None:
                    raise InputError(f"clear ends all faults: leave out --{typed}.")
            run.clear_faults()
        elif options.kind is not None:
            how = {"phase": options.phase, "how": options.how, "for_s": seconds(options.for_s)}
            how = {name: value for name, value in how.items() if value is not None}
            run.inject(options.kind, rank=options.rank, at_step=options.at_step, **how)
        rows = run.faults.rows()
        waiting = sum(row["state"] == "armed" for row in rows)
        title = f"Faults: {len(rows)}, waiting for a step: {waiting}" if rows else "No faults yet."
        return self.shown.display(Table(rows, COLUMNS, title), silent=options.silent)


def seconds(text: str | None) -> float | None:
    """`5s`, `200ms` or `5` as seconds. Raises InputError for what is no time."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)(ms|s|min|)", text)
    if found is None:
        raise InputError(f"--for {text}: use a time, such as 5s or 200ms.")
    return float(found[1]) * UNITS[found[2]]
