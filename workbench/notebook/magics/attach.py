"""%dist_attach: ranks and training of another kernel."""

from __future__ import annotations

from typing import Any

from IPython.core.magic import line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments

from workbench.notebook import show
from workbench.notebook.line import from_line, word
from workbench.notebook.magics import Commands


@magics_class
class AttachMagics(Commands):
    """Go on where another kernel ended."""

    @magic_arguments()
    @argument(
        "which",
        nargs="?",
        type=word,
        help="number or name of one; default the only one, else a list to choose from",
    )
    @argument(
        "--take-over",
        action="store_true",
        help="also from a notebook that lives, after the step under way",
    )
    @line_magic
    @from_line
    def dist_attach(self, options: Any) -> Any:
        """Take over ranks and training of a kernel that is gone; watch those of one that lives.

        Example::

            %dist_attach
            %dist_attach digits-1 --take-over

        Returns the run, or what is watched of it; the engines where nothing was trained; of
        several clusters a list to choose from.
        In Python: ``engines = workbench.attach(take_over=True)``, ``workbench.watch()``
        """
        from workbench.driver import clusters
        from workbench.driver.attach import attach_to
        from workbench.driver.engines import num_cores
        from workbench.driver.watching import watch_at

        there = clusters.others()
        if options.which is None and len(there) > 1:
            return self.shown.display(show.clusters(there), silent=options.silent)
        cluster = clusters.chosen(options.which)
        if cluster.card.is_controlled and not options.take_over:
            return self.shown.display(watch_at(cluster), silent=options.silent)
        engines = attach_to(cluster, take_over=options.take_over)
        if engines.run is None:
            text = f"Attached: {show.ready(engines, num_cores())}."
            return self.shown.say(engines, text, silent=options.silent)
        return self.shown.display(engines.run, silent=options.silent)
