"""%dist_export: the training there is as a script for torchrun."""

from __future__ import annotations

from typing import Any

from IPython.core.magic import line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments

from workbench.driver import current
from workbench.notebook import show
from workbench.notebook.line import from_line, word
from workbench.notebook.magics import Commands


@magics_class
class ExportMagics(Commands):
    """Write the training down."""

    @magic_arguments()
    @argument("file", type=word, metavar="FILE", help="of the script, such as script.py")
    @argument("--force", action="store_true", help="overwrite a file that is there")
    @line_magic
    @from_line
    def dist_export(self, options: Any) -> Any:
        """Write recipe and layout as a plain torchrun script, which gives the same curve.

        Where it does not (dropout, BatchNorm under other microbatches), it says so.

        Example::

            %dist_export script.py

        Returns the path. In Python: ``run.export("script.py")``
        """
        run = current.run()
        path = run.export(options.file, force=options.force)
        written = show.exported(run, options.file, path)
        return self.shown.display(written, silent=options.silent)
