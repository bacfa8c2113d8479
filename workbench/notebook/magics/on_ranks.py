"""%%dist: run a cell on ranks; %dist: all magics at a glance."""

from __future__ import annotations

from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import line_cell_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments
from IPython.display import display

from workbench.driver import current
from workbench.driver.echo import named
from workbench.notebook import overview
from workbench.notebook.line import from_line, word
from workbench.notebook.magics import Commands
from workbench.spec.ranks import parse_ranks


@magics_class
class CellMagics(Commands):
    """Run cells on ranks."""

    @magic_arguments()
    @argument("-r", "--ranks", type=word, default="all", help="which, e.g. 0,2 or 0-3 (all)")
    @argument("-o", "--out", type=word, metavar="NAME", help="keep the result in this variable")
    @line_cell_magic
    @from_line
    def dist(self, options: Any, cell: str | None = None) -> Any:
        """Run the cell on ranks and show what they print; %dist alone lists all magics.

        Example::

            %%dist --ranks 0,2
            rank, world_size

        A rank knows `rank` and `world_size`, and the variables of earlier cells. An interrupt
        ends the cell there, not the ranks. Returns the values by rank, as text.
        In Python: ``engines.run_cell("rank, world_size", ranks=[0, 2])``
        """
        if cell is None:
            return self.shown.display(overview.table(self.shell), silent=options.silent)
        if options.out and not options.out.isidentifier():
            raise UsageError(f"%%dist: --out {options.out!r} is no name of a variable.")
        chosen = parse_ranks(options.ranks)
        # So that line numbers are those of the editor, which counts the line of the magic.
        result = current.engines().run_cell(f"\n{cell}", ranks=chosen, display=show_rich)
        if options.out:
            self.shell.user_ns[options.out] = result  # type: ignore[union-attr]
        return self.shown.skip(result)


def show_rich(ranks: list[int], bundle: dict[str, Any]) -> None:
    """Show a figure, or what else a cell displayed, below the ranks it is of."""
    print(f"[{named(ranks)}]")  # noqa: T201 - a magic's output
    display(bundle["data"], metadata=bundle["metadata"], raw=True)
