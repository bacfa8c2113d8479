"""%dist_start, %dist_status, %dist_stop: the ranks."""

from __future__ import annotations

from argparse import BooleanOptionalAction
from typing import Any

from IPython.core.magic import line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments

from workbench.driver import current, session
from workbench.driver.session import LEASE_S
from workbench.errors import StartError
from workbench.notebook import show
from workbench.notebook.line import from_line, number, whole
from workbench.notebook.magics import Commands

TIMEOUT_S = 60.0


@magics_class
class EngineMagics(Commands):
    """Start ranks, look at them, end them."""

    @magic_arguments()
    @argument(
        "-n", "--num-ranks", type=whole, help="ranks; default one a GPU, or one a core, at most 4"
    )
    @argument(
        "--timeout", type=number, metavar="S", help=f"the longest wait, in seconds ({TIMEOUT_S:g})"
    )
    @argument(
        "--lease",
        type=number,
        metavar="S",
        help=f"seconds the ranks outlive the kernel ({LEASE_S:g})",
    )
    @argument(
        "--spares",
        type=whole,
        metavar="N",
        help="processes kept warm to take the place of lost ranks (0)",
    )
    @argument("--detach", action="store_true", help="a lease for ever: a training needs no kernel")
    @argument("--cpu", action="store_true", help="leave GPUs alone")
    @argument(
        "--curve",
        action=BooleanOptionalAction,
        default=None,
        help="encrypt what notebook and ranks say (it is); --no-curve signs it alone",
    )
    @line_magic
    @from_line
    def dist_start(self, options: Any) -> Any:
        """Start ranks and join them; ready when a collective has run on all of them.

        Example::

            %dist_start -n 4 --spares 1

        Returns the engines. When as many are up already, it returns these.
        In Python: ``engines = workbench.start(n=4, spares=1)``
        """
        from workbench.driver.engines import num_cores, start

        how: dict[str, Any] = {} if options.timeout is None else {"timeout": options.timeout}
        if options.detach or options.lease is not None:
            how["lease"] = None if options.detach else options.lease
        if options.cpu:
            how["cpu"] = True
        if options.curve is not None:
            how["curve"] = options.curve
        if options.spares is not None:
            how["spares"] = options.spares
        engines = current.fitting(options.num_ranks)
        if engines is not None:
            other = " %dist_stop first, to start with other options." if how else ""
            text = f"Already up: {show.ready(engines, num_cores())}.{other}"
            return self.shown.say(engines, text, silent=options.silent)
        try:
            engines = start(options.num_ranks, **how)
        except KeyboardInterrupt:
            raise StartError("The start was interrupted; nothing of it is left running.") from None
        text = f"{show.ready(engines, num_cores())}.{current.left_over()}"
        return self.shown.say(engines, text, silent=options.silent)

    @magic_arguments()
    @argument("-v", "--verbose", action="store_true", help="host, log and directory, too")
    @line_magic
    @from_line
    def dist_status(self, options: Any) -> Any:
        """The ranks with device, threads and process, and what is trained on them.

        Example::

            %dist_status -v

        Returns a list of dicts, shown as a table. In Python: ``engines.status()``
        """
        table = show.status(current.engines(), verbose=options.verbose)
        return self.shown.display(table, silent=options.silent)

    @magic_arguments()
    @argument(
        "--all", action="store_true", help="every cluster, those of kernels that are gone, too"
    )
    @line_magic
    @from_line
    def dist_stop(self, options: Any) -> None:
        """End the training and the ranks; of what they had, checkpoints and journal stay.

        Example::

            %dist_stop

        In Python: ``engines.stop()``
        """
        found = current.all_engines()
        chosen = found if options.all else found[-1:]
        for engines in chosen:
            engines.stop()
        if options.all:
            session.close()
            session.end_abandoned()
        if not options.silent:
            text = "\n".join(map(show.stopped, chosen)) or current.why_none()
            print(text)  # noqa: T201 - a magic's output
