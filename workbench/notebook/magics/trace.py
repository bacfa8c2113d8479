"""%dist_trace: recorded steps as a file for a trace viewer."""

from __future__ import annotations

from typing import Any

from IPython.core.magic import line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments

from workbench.driver import current
from workbench.errors import InputError
from workbench.notebook import show
from workbench.notebook.line import from_line, whole, word
from workbench.notebook.magics import Commands


@magics_class
class TraceMagics(Commands):
    """Take a timeline elsewhere."""

    @magic_arguments()
    @argument("file", type=word, metavar="FILE", help="to write, such as trace.json")
    @argument("--step", type=whole, metavar="N", help="the recorded step nearest to N (all)")
    @argument("--profile", action="store_true", help="take a step under torch.profiler for it")
    @argument("--force", action="store_true", help="overwrite a file that is there")
    @line_magic
    @from_line
    def dist_trace(self, options: Any) -> Any:
        """Write recorded steps of all ranks for ui.perfetto.dev or chrome://tracing.

        Example::

            %dist_trace trace.json --profile

        Returns the path. In Python: ``run.trace("trace.json")``, ``run.profile("trace.json")``
        """
        run = current.run()
        if options.profile and options.step is not None:
            raise InputError("--profile takes a new step, so --step has no place beside it.")
        before = run.events
        if options.profile:
            path = run.profile(options.file, force=options.force)
        else:
            path = run.trace(options.file, options.step, force=options.force)
        written = show.traced(run, before, options.file, path)
        return self.shown.display(written, silent=options.silent)
