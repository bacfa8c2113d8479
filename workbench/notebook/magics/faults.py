"""%dist_stacks, %dist_interrupt, %dist_replace: ranks that stand still."""

from __future__ import annotations

from typing import Any

from IPython.core.magic import line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments

from workbench.driver import current, stacks, watch
from workbench.driver.echo import named
from workbench.notebook import show_faults
from workbench.notebook.line import from_line, whole, word
from workbench.notebook.magics import Commands
from workbench.spec.ranks import parse_ranks


@magics_class
class FaultMagics(Commands):
    """Look at ranks that stand still, and free them."""

    @magic_arguments()
    @argument("ranks", nargs="?", type=word, default="all", help="which, e.g. 0,2 or 0-3 (all)")
    @line_magic
    @from_line
    def dist_stacks(self, options: Any) -> Any:
        """What each rank does, and where in the Python code; equal ones together.

        Example::

            %dist_stacks

        It asks by a signal, which a rank answers whatever it does, unless its process is stopped.
        Returns a dict of stacks by rank. In Python: ``workbench.driver.stacks.take(engines)``
        """
        engines = current.engines()
        chosen = stacks.chosen(engines, parse_ranks(options.ranks))
        return self.shown.display(show_faults.stacks(engines, chosen), silent=options.silent)

    @magic_arguments()
    @argument("ranks", nargs="?", type=word, default="all", help="which, e.g. 0,2 or 0-3 (all)")
    @line_magic
    @from_line
    def dist_interrupt(self, options: Any) -> None:
        """End the step that ranks are in: what computes is interrupted, what waits is freed.

        Example::

            %dist_interrupt

        Parameters stay those of the last whole step, and %dist_resume goes on from there.
        In Python: ``workbench.driver.watch.break_off(engines)``
        """
        engines = current.engines()
        chosen = stacks.chosen(engines, parse_ranks(options.ranks))
        ended = watch.break_off(engines, chosen)
        if not options.silent:
            text = (
                f"{named(ended).capitalize()} interrupted." if ended else "Nothing was under way."
            )
            print(text)  # noqa: T201 - a magic's output

    @magic_arguments()
    @argument("rank", type=whole, help="whose process is killed")
    @line_magic
    @from_line
    def dist_replace(self, options: Any) -> None:
        """Kill the process of a rank, whatever it does, so that another takes its place.

        Example::

            %dist_replace 2

        What then becomes of a training is the same as when the rank is lost by itself.
        In Python: ``workbench.driver.watch.fence(engines, 2)``
        """
        engines = current.engines()
        pid = watch.fence(engines, options.rank)
        if not options.silent:
            print(f"Rank {options.rank} (process {pid}) is killed.")  # noqa: T201 - a magic's output
